import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.files import manifest

FACTS = {"step": 3, "metric": 1.5}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "a").write_bytes(b"alpha")
    (folder / "deep" / "b").write_bytes(b"beta" * 100)
    (folder / "empty").write_bytes(b"")
    manifest.write(folder, FACTS)
    return folder


def test_an_untouched_folder_verifies(folder):
    assert manifest.verify(folder) == manifest.read(folder) == FACTS
    assert set(json.loads((folder / manifest.NAME).read_text())["files"]) == {
        "a",
        "deep/b",
        "empty",
    }


@settings(max_examples=60)
@given(
    files=st.dictionaries(
        st.text("abcxyz", min_size=1, max_size=4), st.binary(min_size=1), min_size=1, max_size=4
    ),
    data=st.data(),
)
def test_every_flipped_bit_is_damage(files, data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        manifest.write(folder, FACTS)
        victim = folder / data.draw(st.sampled_from([*sorted(files), manifest.NAME]))
        content = bytearray(victim.read_bytes())
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
        victim.write_bytes(content)
        if victim.name == manifest.NAME:
            # A flip in white space changes no value.
            try:
                assert manifest.verify(folder) == FACTS
            except manifest.Damaged:
                pass
        else:
            with pytest.raises(manifest.Damaged, match=victim.name):
                manifest.verify(folder)


def remove(folder):
    (folder / "deep" / "b").unlink()


def truncate(folder):
    (folder / "deep" / "b").write_bytes(b"beta" * 99)


def add(folder):
    (folder / "deep" / "c").write_bytes(b"")


def replace_by_folder(folder):
    (folder / "a").unlink()
    (folder / "a").mkdir()


def link_file(folder):
    (folder / "a").rename(folder.parent / "a")
    (folder / "a").symlink_to(folder.parent / "a")


def link_folder(folder):
    (folder / "deep").rename(folder.parent / "deep")
    (folder / "deep").symlink_to(folder.parent / "deep")


def lose_manifest(folder):
    (folder / manifest.NAME).unlink()


def rewrite_manifest(text):
    return lambda folder: (folder / manifest.NAME).write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, "deep/b is missing"),
        (truncate, "396 bytes instead of 400"),
        (add, "deep/c is not in its manifest"),
        (replace_by_folder, "a is missing"),
        (link_file, "not a regular file"),
        (link_folder, "is a link"),
        (lose_manifest, "never finished"),
        (rewrite_manifest(""), "not JSON"),
        (rewrite_manifest("[" * 100_000), "not JSON"),
        (rewrite_manifest("[]"), "has changed"),
        (rewrite_manifest('{"facts": {}, "files": 3, "sha256": ""}'), "has changed"),
    ],
)
def test_damage_is_named(folder, damage, message):
    damage(folder)
    with pytest.raises(manifest.Damaged, match=message):
        manifest.verify(folder)


def test_a_too_large_manifest_is_refused(folder, monkeypatch):
    monkeypatch.setattr(manifest, "MAX_BYTES", 100)
    with pytest.raises(manifest.Damaged, match="larger than 100 bytes"):
        manifest.load_json(folder / manifest.NAME)
    with pytest.raises(ValueError, match="100 bytes"):
        manifest.write(folder, FACTS)


def test_names_that_lead_out_of_the_folder_are_never_opened(folder):
    outside = folder.parent / "outside"
    outside.write_bytes(b"secret")
    body = {"facts": FACTS, "files": {}}
    for name in ("../outside", str(outside)):
        body["files"][name] = {"size": 6, "sha256": "0" * 64}
    body["sha256"] = manifest._digest({key: body[key] for key in ("facts", "files")})
    (folder / manifest.NAME).write_text(json.dumps(body))
    with pytest.raises(manifest.Damaged, match="outside is missing"):
        manifest.verify(folder)


def test_hidden_files_are_no_damage(folder):
    (folder / ".DS_Store").write_bytes(b"icons")
    assert manifest.verify(folder) == FACTS
