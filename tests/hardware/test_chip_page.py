"""The page of chips: every known chip, and the keys of a file that describes another."""

import re

from places import ROOT

from sparse_dataflow.hardware import chips

PAGE = (ROOT / "docs/guide/chips.md").read_text(encoding="utf-8")


def test_every_known_chip_is_on_the_page():
    rows = PAGE.partition("| chip |")[2].partition("\n\n")[0]
    names = re.findall(r"`([\w-]+)`", rows)
    listed = {chips.lookup(name).name for name in names if name != "KIND"}
    assert listed == {*chips.KNOWN}


def test_the_examples_of_the_keys_are_a_chip(tmp_path):
    """The tables have every key that is legal."""
    tables = PAGE.split("| key | value | example |\n|---|---|---|\n")[1:]
    lines = []
    for head, rows, keys in zip(
        ("", "[network]"),
        tables,
        (chips._REQUIRED + chips._OPTIONAL, chips._NETWORK),
        strict=True,
    ):
        pairs = re.findall(r"^\| `(\w+)` \|.*\| `(.+)` \|$", rows.partition("\n\n")[0], re.M)
        assert {key for key, _ in pairs} == {*keys}
        lines += [head, *(f"{key} = {value}" for key, value in pairs)]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(lines))
    chip = chips.lookup(str(path))
    assert chip.name == "mine" and chip.network.island == 8 and chip.family == "hopper"
