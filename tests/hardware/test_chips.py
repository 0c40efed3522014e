"""Chips by name and from a TOML file, and their links."""

import pytest

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import chips, machines
from sparse_dataflow.hardware.chips import CHIPS
from sparse_dataflow.planner.efficiency import EFFICIENCIES

TOML = """
name = "mine"
bfloat16_tflops = 100
memory_gb = 48
bandwidth_gb_s = 900.5
host_gb_s = 32
family = "hopper"
[network]
island = 4
fast_gb_s = 50
slow_gb_s = 12.5
"""


@pytest.mark.parametrize("name", sorted(CHIPS))
def test_fast_links_are_faster_and_every_family_has_constants(name):
    chip = CHIPS[name]
    assert chip.network.fast > chip.network.slow > 1e9
    assert chip.bandwidth > chip.network.fast > chip.host_bandwidth / 2
    assert chip.network.fast_latency < chip.network.slow_latency
    assert chip.family in EFFICIENCIES
    assert (chip.network.axes > 1) == name.startswith("tpu")


@pytest.mark.parametrize(
    ("prefix", "name"), [("mi250x", "mi250x-gcd"), ("h100", "h100"), ("a100-8", "a100-80gb")]
)
def test_a_unique_prefix_names_a_chip(prefix, name):
    assert chips.lookup(prefix) is CHIPS[name]


@pytest.mark.parametrize("name", ["", "a100-", "tpu", "gtx"])
def test_unknown_and_ambiguous_names_are_refused(name):
    with pytest.raises(UserError, match=r"tpu-v5p.*TOML"):
        chips.lookup(name)


def test_a_chip_from_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    chip = chips.lookup(str(path))
    assert (chip.name, chip.family) == ("mine", "hopper")
    assert chip.peak("bfloat16") == 100e12 and chip.peak("float32") == 50e12
    assert chip.memory_bytes == 48e9 and chip.bandwidth == 900.5e9 and chip.host_bandwidth == 32e9
    assert (chip.network.island, chip.network.fast, chip.network.slow) == (4, 50e9, 12.5e9)


def test_a_file_may_have_rates_of_8_bit_products(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("int8_tflops = 200\n" + TOML)
    chip = chips.read(path)
    assert chip.peak("int8") == 200e12 and chip.peak("fp8") is None


@pytest.mark.parametrize(
    ("chip", "precision", "words"),
    [
        (CHIPS["h100"], "fp8", "native, up to 1,979 TFLOP/s; bfloat16 has 989"),
        (CHIPS["a100-80gb"], "int8", "native, up to 624 TFLOP/s; bfloat16 has 312"),
        (CHIPS["a100-80gb"], "fp8", "emulated, which is slower than without"),
        (CHIPS["tpu-v6e"], "fp8", "native, up to 918 TFLOP/s; bfloat16 has 918"),
        (CHIPS["tpu-v5p"], "fp8", "emulated"),
        (chips.Chip("a CPU", {"bfloat16": 1e12}), "int8", "emulated"),
        (chips.Chip("unknown"), "int8", "not known to be native"),
    ],
)
def test_a_chip_says_how_it_multiplies_8_bit_numbers(chip, precision, words):
    assert chip.product_words(precision, "bfloat16").startswith(f"{precision} products on ")
    assert words in chip.product_words(precision, "bfloat16")


def test_links_host_and_family_are_optional(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TOML.split("host_gb_s")[0])
    chip = chips.read(path)
    assert chip.network is None and chip.host_bandwidth is None and chip.family == ""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory_gb = 48", "", "has no memory_gb"),
        (
            "memory_gb = 48",
            "memory_gb = -1",
            "memory_gb = -1 is not legal; legal: a number above 0",
        ),
        ("memory_gb = 48", "memory_gb = true", "memory_gb = True is not legal"),
        ("memory_gb = 48", "memory_gb = inf", "memory_gb = inf is not legal"),
        ("memory_gb = 48", "memory = 48", "memory is unknown; legal: name"),
        ('"mine"', "7", "name = 7 is not legal; legal: text"),
        ('"hopper"', '"volta"', "family 'volta' is unknown; legal: ampere"),
        ("island = 4", "island = 4.5", "island = 4.5 is not legal; legal: a whole number above 0"),
        ("slow_gb_s = 12.5", "", "has no slow_gb_s"),
        ("name =", "name", "is not TOML"),
    ],
)
def test_an_illegal_file_is_refused(tmp_path, old, new, words):
    path = tmp_path / "mine.toml"
    path.write_text(TOML.replace(old, new))
    with pytest.raises(UserError, match=words):
        chips.read(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        chips.lookup(str(tmp_path / "none.toml"))


def test_a_network_must_be_a_table(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TOML.split("host_gb_s")[0] + "network = 3")
    with pytest.raises(UserError, match="network is not a table"):
        chips.read(path)


@pytest.mark.parametrize("name", [*chips.ALIASES, *chips.KNOWN, "mi250x", "rtx", "tpu-v6"])
def test_every_flag_takes_the_same_names_of_a_chip(name):
    for flag in ("--hardware", "--chips"):
        assert chips.lookup(name, flag) == machines.parse(f"{name}:4").chip
