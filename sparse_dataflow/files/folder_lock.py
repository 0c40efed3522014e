"""A lock on a folder: one running process owns it, and the next one is refused.

The owner holds an exclusive flock on a small file, which the operating system releases when the
process dies. The file names the owner in JSON. A file system may keep flocks on each machine for
itself, as mounts of object stores do. So the owner also counts up in the file, and a process on
another machine takes over a lock only if the count stands still.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import platform
import stat
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError

NAME = ".lock"

BEAT_SECONDS = 10.0
"""Seconds between two counts of the owner."""

DEAD_AFTER = 4
"""Number of missed counts after which the owner on another machine is taken for dead."""

_NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
_MAX_BYTES = 4096


class FolderLock:
    """The lock of this process on a folder, until `release`."""

    def __init__(self, folder: Path):
        """Acquires the lock.

        Raises:
          UserError: another process owns the folder, or it cannot be written.
        """
        self._folder, self._path = folder, folder / NAME
        self._owner = this_process()
        try:
            self._file = storage.retry(f"Locking {folder}", self._acquire)
        except OSError as error:
            raise UserError(
                f"Run folder {folder} cannot be written: {error.strerror or error}; "
                "make it writable."
            ) from error
        self._released, self._writing = threading.Event(), threading.Lock()
        threading.Thread(target=self._count_up, name="folder lock", daemon=True).start()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Checks that the folder is still where it was.

        Raises:
          UserError: it was deleted or moved, or another process took it over.
        """
        try:
            mine = _same_file(self._file, self._path)
        except OSError as error:
            if storage.is_transient(error):
                return
            mine = False
        if not mine:
            raise UserError(
                f"The run folder {self._folder} was deleted, moved or taken over by another "
                "process. If it was moved, continue with --resume and its new path."
            )

    def release(self) -> None:
        """Releases the lock and removes its file; does nothing the second time."""
        with self._writing:
            if self._released.is_set():
                return
            self._released.set()
            with contextlib.suppress(OSError):
                if _same_file(self._file, self._path):
                    self._path.unlink()
            os.close(self._file)

    def _acquire(self) -> int:
        while True:
            # Neither a link nor a named pipe is followed, or waited for.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(self._path, flags, 0o666)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise UserError(f"{self._path} is not a regular file; remove it.")
                self._take(file)
                # Another process may have released, and so removed, the file since it was opened.
                if _same_file(file, self._path):
                    self._write(file)
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def _take(self, file) -> None:
        """Takes the flock, and refuses a living owner."""
        has_flock = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise in_use(self._folder, _read(self._path)) from None
            if error.errno not in _NO_FLOCK:
                raise
            has_flock = False
        owner = _read(self._path)
        if not owner:
            return
        if owner.get("machine") != self._owner["machine"]:
            self._await_another_machine(owner)
        elif not has_flock and is_alive(owner):
            raise in_use(self._folder, owner)

    def _await_another_machine(self, owner) -> None:
        say_wait(self._folder, owner)
        end = time.monotonic() + DEAD_AFTER * BEAT_SECONDS
        while time.monotonic() < end:
            time.sleep(min(1.0, BEAT_SECONDS))
            now = _read(self._path)
            if not now:
                return
            if now != owner:
                raise in_use(self._folder, now)

    def _write(self, file) -> None:
        text = json.dumps(self._owner).encode()
        os.ftruncate(file, os.pwrite(file, text, 0))
        os.fsync(file)

    def _count_up(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            self._owner["count"] += 1
            # Once it is closed, the file's number may be that of another file.
            with self._writing, contextlib.suppress(OSError):
                if not self._released.is_set():
                    self._write(self._file)


def this_process() -> dict[str, Any]:
    """Returns what a lock says of its owner, with a count of 0."""
    return {
        "host": platform.node(),
        "machine": machine(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "count": 0,
    }


def in_use(place: object, owner: dict[str, Any]) -> UserError:
    """Returns the refusal of a place that another process owns."""
    who = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "another process"
    since = f" since {owner.get('since')}" if owner else ""
    return UserError(
        f"{place} is in use by {who}{since}"[:400] + "; wait for its end, or name another folder."
    )


def say_wait(place: object, owner: dict[str, Any]) -> None:
    """Says that the owner of a place may be dead, which takes a while to see."""
    logging.getLogger(__name__).info(
        "%s was in use on %s; waiting up to %.0f seconds to see whether it still is.",
        *(place, str(owner.get("host"))[:100], DEAD_AFTER * BEAT_SECONDS),
    )


def _read(path) -> dict[str, Any]:
    """Returns the owner in a lock file; {} if it names none."""
    try:
        owner = json_files.load(path, _MAX_BYTES)
    except (FileNotFoundError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _same_file(file: int, path: Path) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    here = os.fstat(file)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def is_alive(owner: dict[str, Any]) -> bool:
    """Returns whether the owner, of this machine, is another living process."""
    try:
        process = psutil.Process(owner["pid"])
        return abs(process.create_time() - owner["started"]) < 2 and process.pid != os.getpid()
    except (psutil.Error, LookupError, TypeError, ValueError, OverflowError):
        return False


def machine() -> str:
    """Returns a name of the running kernel: containers share it, hosts of one name do not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
