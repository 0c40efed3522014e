"""Damaged checkpoints are named, set aside and replaced by the previous one."""

import os
from pathlib import Path

import pytest
from checkpoint_states import CONFIG, restored_step, saved, small_state
from marks import some

from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.files import manifest
from sparse_dataflow.files.errors import UserError


def data_file(folder: Path) -> Path:
    return max(folder.rglob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)


def flip(folder):
    content = bytearray(data_file(folder).read_bytes())
    content[len(content) // 2] ^= 4
    data_file(folder).write_bytes(content)


def truncate(folder):
    os.truncate(data_file(folder), data_file(folder).stat().st_size - 1)


def remove_data(folder):
    data_file(folder).unlink()


def break_json(folder):
    (folder / "extra.json").write_text("{")


def break_json_under_a_good_manifest(folder):
    facts = manifest.read(folder)
    (folder / "extra.json").write_text('{"extra": []}')
    (folder / manifest.NAME).unlink()
    manifest.write(folder, facts)


def remove_manifest(folder):
    (folder / manifest.NAME).unlink()


DAMAGES = [
    flip,
    truncate,
    remove_data,
    break_json,
    break_json_under_a_good_manifest,
    remove_manifest,
]


@pytest.mark.parametrize(
    "damage", some(DAMAGES, flip, remove_data, break_json_under_a_good_manifest, remove_manifest)
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(tmp_path, caplog, damage):
    saved(tmp_path, [1, 2, 3])
    damage(tmp_path / "3")
    assert restored_step(tmp_path, read_only=True) == 2
    assert (tmp_path / "3").exists()
    assert restored_step(tmp_path) == 2
    assert f"{tmp_path / '3'} cannot be used" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3.damaged"]
    saved(tmp_path, [3])
    assert restored_step(tmp_path) == 3
    damage(tmp_path / "3")
    with pytest.raises(UserError, match=r"step 3 .* is damaged; finished ones there: 1, 2"):
        Checkpoints(tmp_path, config=CONFIG).restore(small_state(0), step=3)
    assert (tmp_path / "3.damaged-2").exists()


@pytest.mark.parametrize("damage", some(DAMAGES, flip, break_json))
def test_if_all_are_damaged_they_are_named(tmp_path, damage):
    saved(tmp_path, [1, 2])
    for step in ("1", "2"):
        damage(tmp_path / step)
    for options in ({"read_only": True}, {}, {}):  # The second reader must not restart either.
        with pytest.raises(UserError, match=r"All checkpoints in .* are damaged: 1\S*, 2\S*\. "):
            Checkpoints(tmp_path, config=CONFIG, **options).restore(small_state(0))


def test_a_damaged_checkpoint_is_replaced_by_a_new_one_of_its_step(tmp_path):
    saved(tmp_path, [1, 2])
    flip(tmp_path / "2")
    saved(tmp_path, [2])
    assert restored_step(tmp_path) == 2
    assert (tmp_path / "2.damaged").exists()
