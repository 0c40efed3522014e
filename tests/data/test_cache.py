import errno

import pytest

from sparse_dataflow.data.cache import atomic_write, exclusive
from sparse_dataflow.files import folders
from sparse_dataflow.files.errors import UserError


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_the_partial_file_of_a_killed_process_is_replaced(tmp_path):
    path = tmp_path / "file"
    with atomic_write(path) as temporary:
        temporary.write_text("one")
    (tmp_path / temporary.name).write_text("left by a kill")
    with atomic_write(path) as temporary:
        assert not temporary.exists()
        temporary.write_text("two")
    assert path.read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_raises_user_error(tmp_path):
    with pytest.raises(UserError, match="No space left"), exclusive(tmp_path, "key"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_other_errors_propagate(tmp_path):
    with pytest.raises(ConnectionError), exclusive(tmp_path, "key"):
        raise ConnectionError("no network")


def test_an_unwritable_cache_folder_raises_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), exclusive(tmp_path / "file", "key"):
        pass


def test_a_folder_of_others_is_no_cache(tmp_path):
    (tmp_path / "locks").mkdir()
    (tmp_path / "tokens").write_text("mine")
    with pytest.raises(UserError, match="may not replace"), exclusive(tmp_path, "key"):
        pass
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["locks", "tokens"]
    assert (tmp_path / "tokens").read_text() == "mine"


def test_a_cache_that_has_no_mark_yet_goes_on(tmp_path):
    for name in ("locks", "texts", "tokens"):
        (tmp_path / name).mkdir()
    for _ in range(2):
        with exclusive(tmp_path, "key"):
            pass
    assert (tmp_path / folders.MARK).exists()
