"""Appended lines: whole, and on disk before what follows them."""

import errno
import os

import pytest

from sparse_dataflow.files import appended, storage
from sparse_dataflow.files.appended import AppendedFile


def flushed_bytes(monkeypatch):
    """Returns {file: bytes on disk}, as fsync leaves them; it grows with each flush."""
    on_disk, fsync = {}, os.fsync

    def noted(number):
        fsync(number)
        path = os.readlink(f"/proc/self/fd/{number}")
        if os.path.isfile(path):
            on_disk[path] = open(path, "rb").read()

    monkeypatch.setattr(os, "fsync", noted)
    return on_disk


@pytest.mark.parametrize("before", [b"", b"whole\n", b"incompl", b"whole\nincompl"])
def test_a_line_never_joins_an_incomplete_one(tmp_path, before):
    (tmp_path / "a").write_bytes(before)
    file = AppendedFile(tmp_path / "a")
    file.append(b"new")
    file.append(b"newer")
    file.close()
    lines = (tmp_path / "a").read_bytes().split(b"\n")
    assert lines == [*before.removesuffix(b"\n").split(b"\n"), b"new", b"newer", b""][not before :]


def test_a_flush_covers_every_file_that_was_appended_to(tmp_path, monkeypatch):
    on_disk = flushed_bytes(monkeypatch)
    files = [AppendedFile(tmp_path / name) for name in ("a", "b", "c")]
    for number, file in enumerate(files):
        file.append(b"%d" % number)
    appended.flush()
    assert on_disk == {str(file.path): b"%d\n" % i for i, file in enumerate(files)}
    on_disk.clear()
    appended.flush()
    assert not on_disk
    files[1].append(b"more")
    appended.flush()
    assert on_disk == {str(files[1].path): b"1\nmore\n"}
    files[2].append(b"last")
    files[2].close()
    assert on_disk[str(files[2].path)] == b"2\nlast\n"


def test_a_flush_that_failed_is_repeated(tmp_path, monkeypatch):
    file = AppendedFile(tmp_path / "a")
    file.append(b"1")
    with monkeypatch.context() as patch:
        patch.setattr(
            storage, "flush_folder", lambda folder: (_ for _ in ()).throw(OSError(errno.EIO, ""))
        )
        with pytest.raises(OSError):
            appended.flush()
    on_disk = flushed_bytes(monkeypatch)
    appended.flush()
    assert on_disk == {str(file.path): b"1\n"}


def test_a_deleted_folder_does_not_fail_a_flush(tmp_path):
    (tmp_path / "run").mkdir()
    file = AppendedFile(tmp_path / "run" / "a")
    file.append(b"1")
    (tmp_path / "run" / "a").unlink()
    (tmp_path / "run").rmdir()
    appended.flush()


def test_a_replaced_file_and_a_made_folder_have_their_names_on_disk(tmp_path, monkeypatch):
    flushed, whole = [], storage.flush_folder
    monkeypatch.setattr(storage, "flush_folder", lambda f: (flushed.append(f), whole(f)))
    storage.make_folder(tmp_path / "a" / "b" / "c")
    assert set(flushed) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
    storage.replace(tmp_path / "a" / "file", b"content")
    assert flushed[-1] == tmp_path / "a"
