import errno

import pytest

from sparse_dataflow.data.cache import exclusive, replacing
from sparse_dataflow.files.errors import UserError


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_what_a_killed_process_left_is_replaced(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as temporary:
        temporary.write_text("one")
    (tmp_path / temporary.name).write_text("left by a kill")
    with replacing(path) as temporary:
        assert not temporary.exists()
        temporary.write_text("two")
    assert path.read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_told_in_words(tmp_path):
    with pytest.raises(UserError, match="No space left"), exclusive(tmp_path, "key"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_other_errors_pass_unchanged(tmp_path):
    with pytest.raises(ConnectionError), exclusive(tmp_path, "key"):
        raise ConnectionError("no network")


def test_a_cache_that_cannot_be_made_is_told_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), exclusive(tmp_path / "file", "key"):
        pass
