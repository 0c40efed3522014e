"""A folder lock: one owner at a time, whoever died before."""

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from marks import some

from sparse_dataflow.files import folders
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.folders import FolderLock

HOLD = """
import sys, time
from pathlib import Path
from sparse_dataflow.files.folders import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path):
    """A process that owns `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_with_the_host_and_pid_of_the_first(owner, tmp_path):
    before = sorted(os.listdir(tmp_path)), (tmp_path / folders.NAME).read_bytes()
    with pytest.raises(UserError) as refusal:
        FolderLock(tmp_path)
    words = str(refusal.value)
    assert re.search(rf"in use by process {owner.pid} on {os.uname().nodename} since 20", words)
    assert (sorted(os.listdir(tmp_path)), (tmp_path / folders.NAME).read_bytes()) == before


def test_the_lock_of_a_killed_process_is_taken_over_at_once(owner, tmp_path):
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert (tmp_path / folders.NAME).exists()
    with FolderLock(tmp_path) as lock:
        lock.check()
    assert not list(tmp_path.iterdir())


def without_flock(monkeypatch):
    def flock(file, operation):
        raise OSError(folders.errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(folders.fcntl, "flock", flock)


def test_without_flock_the_owner_is_looked_up_by_its_start_time(owner, tmp_path, monkeypatch):
    without_flock(monkeypatch)
    with pytest.raises(UserError, match=f"process {owner.pid}"):
        FolderLock(tmp_path)
    path = tmp_path / folders.NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": 1.0}))
    FolderLock(tmp_path).release()


@pytest.mark.parametrize("seconds", [3, -3, 3600])
def test_a_clock_that_is_set_makes_no_owner_dead(owner, tmp_path, monkeypatch, seconds):
    boot = psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot + seconds, raising=False)
    without_flock(monkeypatch)
    with pytest.raises(UserError, match=f"process {owner.pid}"):
        FolderLock(tmp_path)


RACE = """
import os, sys, time, errno
from pathlib import Path
from sparse_dataflow.files import folders
def flock(*_): raise OSError(int(sys.argv[3]), "")
folders.fcntl.flock = flock
folders.BEAT_SECONDS = 0.3
def slow(call):
    def after(*arguments):
        time.sleep(float(sys.argv[4]))
        return call(*arguments)
    return after
os.pwrite, os.ftruncate = slow(os.pwrite), slow(os.ftruncate)
time.sleep(max(0, float(sys.argv[2]) - time.time()))
try:
    lock = folders.FolderLock(Path(sys.argv[1]))
    print("owner", flush=True)
    sys.stdin.read()
    lock.check()
    lock.release()
except folders.UserError as error:
    print("refused" if "in use by process" in str(error) else error, flush=True)
"""


@pytest.mark.parametrize("before", ["nothing", "a dead owner", "an unfinished file"])
@pytest.mark.parametrize(
    ("number", "seconds"), some([(errno.ENOLCK, 0.0), (errno.ENOSYS, 0.02)], errno.ENOSYS)
)
def test_without_flock_one_of_several_processes_becomes_the_owner(
    tmp_path, before, number, seconds
):
    folder = tmp_path / "run"
    folder.mkdir()
    if before == "a dead owner":
        dead = folders.this_process() | {"pid": 2**22 + 1}
        (folder / folders.NAME).write_text(json.dumps(dead))
    elif before == "an unfinished file":
        (folder / folders.NAME).touch()
    start = str(time.time() + 1.0)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, folder, start, str(number), str(seconds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(5)
    ]  # fmt: skip
    answers = sorted(racer.stdout.readline().strip() for racer in racers)
    assert answers == ["owner", *["refused"] * 4]
    for racer in racers:
        assert racer.communicate("")[0] == ""
    assert not list(folder.iterdir())


@pytest.mark.parametrize("files", [0, 1, 2])
def test_without_flock_a_process_that_died_in_a_takeover_blocks_nobody(
    tmp_path, monkeypatch, files
):
    """Its file, which gave it the right to remove that of the dead owner, is there for ever."""
    without_flock(monkeypatch)
    monkeypatch.setattr(folders, "BEAT_SECONDS", 0.01)
    dead = [folders.this_process() | {"pid": 2**22 + n} for n in range(3)]
    path = tmp_path / folders.NAME
    path.write_text(json.dumps(dead[0]))
    for owner in dead[1 : files + 1]:
        facts = [path.stat().st_ino, json.loads(path.read_text())]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        path = tmp_path / f"{folders.NAME}.{digest[:16]}"
        path.write_text(json.dumps(owner))
    with FolderLock(tmp_path) as lock:
        lock.check()
        assert [file.name for file in tmp_path.iterdir()] == [folders.NAME]


@pytest.mark.parametrize("machine", ["this", "another"])
def test_an_owner_whose_file_names_another_ends(tmp_path, monkeypatch, machine):
    """As where two machines do not see each other's locks, and both took the folder."""
    monkeypatch.setattr(folders, "BEAT_SECONDS", 0.05)
    lock = FolderLock(tmp_path)
    path = tmp_path / folders.NAME
    other = json.dumps(folders.this_process() | {"machine": machine})
    path.write_text(other)
    end = time.monotonic() + 10
    with pytest.raises(UserError, match="taken over"):
        while time.monotonic() < end:
            lock.check()
            time.sleep(0.05)
    lock.release()
    assert path.read_text() == other


@pytest.mark.parametrize("counts", [True, False])
def test_an_owner_on_another_machine_is_alive_while_it_counts(tmp_path, monkeypatch, counts):
    """Its flock is not visible here."""
    monkeypatch.setattr(folders, "BEAT_SECONDS", 0.05)
    path, count = tmp_path / folders.NAME, [0]
    there = {"host": "far", "machine": "another", "pid": 1, "started": 1.0, "since": "2026"}
    path.write_text(json.dumps(there | {"count": 0}))

    def sleep(seconds):
        count[0] += counts
        path.write_text(json.dumps(there | {"count": count[0]}))

    monkeypatch.setattr(folders.time, "sleep", sleep)
    if counts:
        with pytest.raises(UserError, match="process 1 on far since 2026"):
            FolderLock(tmp_path)
    else:
        FolderLock(tmp_path).release()


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff" * 9000, b'{"pid": "1"}'])
def test_a_damaged_lock_is_taken_over(tmp_path, content, monkeypatch):
    monkeypatch.setattr(folders, "BEAT_SECONDS", 0.01)
    (tmp_path / folders.NAME).write_bytes(content)
    FolderLock(tmp_path).release()


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)]
)
def test_no_regular_file_is_refused(tmp_path, make):
    make(tmp_path / folders.NAME)
    with pytest.raises(UserError, match=r"not a regular file|cannot be written"):
        FolderLock(tmp_path)


def test_a_folder_that_goes_away_is_noticed_and_its_successor_stays(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    lock = FolderLock(folder)
    lock.check()
    folder.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="deleted, moved or taken over"):
        lock.check()
    folder.mkdir()
    with FolderLock(folder) as other:
        with pytest.raises(UserError, match="deleted, moved or taken over"):
            lock.check()
        lock.release()
        lock.release()
        other.check()
