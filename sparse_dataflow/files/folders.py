"""Output folders: one running process owns each, and files of others are never replaced or removed.

A program may write to a folder that is missing, empty or marked as its own. The mark is a small
file, made while the folder is empty. A file's name alone is no proof of its author.

The owner holds an exclusive flock on a small file, which the operating system releases when the
process dies. The file names the owner in JSON. A file system may keep flocks on each machine for
itself, as mounts of object stores do. So the owner also counts up in the file, and a process on
another machine takes over a lock only if the count stands still. Where a file system has no flock,
the owner is the process that created the file.

No link in a folder from an untrusted source may lead out of it.
"""

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import stat
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import psutil

from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.json_files import JsonObject

MARK = ".sparse_dataflow"
"""Name of the mark: a file that names the program that owns the folder."""

_NAMES_SHOWN = 3

_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
"""How file systems without hard links answer."""


def is_marked(folder: Path, owner: str) -> bool:
    """Returns whether `owner` marked the folder; raises OSError on a transient storage error."""
    path = folder / MARK
    try:
        return not path.is_symlink() and json_files.read_bytes(path, 1000) == _text(owner)
    except (OSError, ValueError) as error:
        if storage.is_transient(error):
            raise
        return False


def refuse_foreign(
    folder: Path,
    owner: str,
    flag: str = "--out",
    names: Collection[str] | None = None,
    accept: Callable[[Path], bool] = lambda folder: False,
) -> None:
    """Refuses a folder that holds files that `owner` did not write; changes nothing.

    Args:
      folder: output folder.
      owner: name of the program that writes, such as "planner_truth".
      flag: flag that names the folder, for the message.
      names: files that a marked folder may hold; any file if None.
      accept: returns whether an unmarked folder belongs to the owner all the same.

    Raises:
      UserError: the folder holds other files, or cannot be read.
    """

    def look():
        names_there = sorted(_listed(folder))
        # A killed process may leave an unfinished mark, which has one more ending.
        others = [n for n in names_there if n != MARK and not n.startswith(f"{MARK}.")]
        if is_marked(folder, owner):
            legal = lambda name: names is None or storage.without_token(name) in names  # noqa: E731
            return [name for name in others if not legal(name)]
        # The mark of another program: a folder with nothing else is not ours either.
        if os.path.lexists(folder / MARK):
            return others or [MARK]
        return [] if not others or accept(folder) else others

    try:
        others = storage.retry(f"Reading {folder}", look)
    except OSError as error:
        raise _unwritable(folder, error, flag) from error
    if not others:
        return
    shown = ", ".join(others[:_NAMES_SHOWN])
    more = f" and {len(others) - _NAMES_SHOWN} more" if len(others) > _NAMES_SHOWN else ""
    raise UserError(
        f"{folder} holds files that {owner} may not replace ({shown}{more}); legal: {flag} with a "
        "missing or empty folder."
    )


def refuse_unwritable(folder: Path, flag: str = "--out") -> None:
    """Refuses a folder that this process cannot make or write; changes nothing.

    Raises:
      UserError: naming the flag.
    """
    # The folder may not exist yet: the nearest existing one decides whether it can be made.
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise _unwritable(folder, NotADirectoryError(errno.ENOTDIR, "Not a directory"), flag)
    if not os.access(place, os.W_OK | os.X_OK):
        raise _unwritable(folder, PermissionError(errno.EACCES, "Permission denied"), flag)


def claim(
    folder: Path,
    owner: str,
    flag: str = "--out",
    names: Collection[str] | None = None,
    accept: Callable[[Path], bool] = lambda folder: False,
) -> Callable[[], None]:
    """Creates the folder if it is missing, and marks it for its owner.

    Takes the arguments of `refuse_foreign`.

    Returns:
      A function that removes the created folders and the mark, as far as nothing else is in them.

    Raises:
      UserError: as in `refuse_foreign`, or the folder cannot be written.
    """
    refuse_foreign(folder, owner, flag, names, accept)
    # Noted before the folders are made, so that `undo` removes none that was there.
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    marked = False

    def undo():
        with contextlib.suppress(OSError):
            # Only a mark of this call: a process of the same owner may have made it first.
            if marked and os.listdir(folder) == [MARK]:
                (folder / MARK).unlink()
            for path in created:
                path.rmdir()

    try:
        storage.retry(f"Making {folder}", lambda: storage.make_folder(folder))
        if not is_marked(folder, owner):
            marked = storage.retry(f"Marking {folder}", lambda: _marked(folder, owner))
    except OSError as error:
        undo()
        raise _unwritable(folder, error, flag) from error
    return undo


@contextlib.contextmanager
def claimed(folder: Path, owner: str) -> Iterator[Path]:
    """Claims the folder for a block; a block that fails before it writes leaves no trace.

    Yields the folder, and raises as `claim`.
    """
    undo = claim(folder, owner)
    try:
        yield folder
    except BaseException:
        undo()
        raise


def _marked(folder, owner) -> bool:
    """Returns whether this call made the mark: a process of the same owner may be faster.

    The mark appears whole, by a link to a file that is complete, so that nobody reads half of it.
    """
    path, whole = folder / MARK, folder / f"{MARK}.{uuid.uuid4().hex}"
    try:
        whole.write_bytes(_text(owner))
        try:
            os.link(whole, path)
        except FileExistsError:
            if is_marked(folder, owner):
                return False
            raise
        except OSError as error:
            # Without links a rename makes the mark whole too, but it would replace another's.
            if error.errno not in _NO_LINKS or os.path.lexists(path):
                raise
            whole.rename(path)
    finally:
        whole.unlink(missing_ok=True)
    return True


def _listed(folder):
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _text(owner: str) -> bytes:
    return f"written by sparse_dataflow, {owner}\n".encode()


def _unwritable(folder, error, flag):
    return UserError(
        f"{folder} cannot be written: {error.strerror or error}; name another with {flag}."
    )


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
        self._owner, self._lost = this_process(), False
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
            mine = _same_file(self._file, self._path) and not self._lost
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
                if _same_file(self._file, self._path) and not self._lost:
                    self._path.unlink()
            os.close(self._file)

    def _acquire(self) -> int:
        while True:
            file, created = self._opened()
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise UserError(f"{self._path} is not a regular file; remove it.")
                if self._flocked(file):
                    owner = _read(self._path)
                    # A mount may keep flocks on each machine for itself: an owner elsewhere shows
                    # in the file alone.
                    if owner and owner.get("machine") != self._owner["machine"]:
                        await_another_machine(self._folder, owner, lambda: _read(self._path))
                    # Another process may have released, and so removed, the file meanwhile.
                    owned = _same_file(file, self._path)
                else:
                    owned = created
                    if not created:
                        self._remove_dead(self._path)
                if owned:
                    self._write(file)
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def _opened(self) -> tuple[int, bool]:
        """Returns the lock file, and whether this call created it."""
        # Neither a link nor a named pipe is followed, or waited for.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        while True:
            with contextlib.suppress(FileExistsError):
                return os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
            with contextlib.suppress(FileNotFoundError):  # It was released meanwhile.
                return os.open(self._path, flags), False

    def _flocked(self, file) -> bool:
        """Takes the flock; returns False if the file system has none, and refuses its owner."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise in_use(self._folder, _read(self._path)) from None
            if error.errno not in _NO_FLOCK:
                raise
            return False
        return True

    def _created(self, path) -> int:
        """Creates a file with this owner, for file systems without flock, where only the process
        that creates a file owns it; refuses a living owner and removes the file of a dead one."""
        while True:
            with contextlib.suppress(FileExistsError):
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o666)
                self._write(file)
                return file
            self._remove_dead(path)

    def _remove_dead(self, path) -> None:
        """Removes the file of a dead owner; refuses a living one.

        Of several processes that find the owner dead, the one that creates a file named after it
        removes it. Otherwise a slow one could remove the file of its successor.
        """
        # Before the owner is read: a file with another inode is a successor's.
        try:
            before = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return
        owner = _await_owner(path)
        if owner and any(owner.get(name) != self._owner[name] for name in ("machine", "host")):
            # Containers share a machine and not its process ids.
            await_another_machine(self._folder, owner, lambda: _read(path))
        elif is_alive(owner):
            raise in_use(self._folder, owner)
        owner = _read(path)
        # The name is of this very owner and file: a successor's lock has another, which nobody here
        # may remove.
        digest = hashlib.sha256(json.dumps([before.st_ino, owner], sort_keys=True).encode())
        right = path.with_name(f"{NAME}.{digest.hexdigest()[:16]}")
        file = self._created(right)
        try:
            with contextlib.suppress(FileNotFoundError):
                now = os.stat(path, follow_symlinks=False)
                if now.st_ino == before.st_ino and _read(path) == owner:
                    path.unlink()
        finally:
            right.unlink(missing_ok=True)
            os.close(file)

    def _write(self, file) -> None:
        text = json.dumps(self._owner).encode()
        # Written first and cut afterwards: an empty file would name no owner to a process that
        # reads now.
        os.ftruncate(file, os.pwrite(file, text, 0))
        os.fsync(file)

    def _count_up(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            self._owner["count"] += 1
            # Once it is closed, the file's number may be that of another file.
            with self._writing, contextlib.suppress(OSError):
                if self._released.is_set():
                    return
                if (owner := _read(self._path)) and owner.get("id") != self._owner["id"]:
                    # Where machines do not see each other's locks, the one that wrote last stays.
                    self._lost = True
                    return
                self._write(self._file)


def this_process() -> JsonObject:
    """Returns what a lock says of its owner, with a count of 0."""
    return {
        "host": platform.node(),
        "machine": machine(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "count": 0,
        "id": uuid.uuid4().hex,
    }


def in_use(place: object, owner: JsonObject) -> UserError:
    """Returns the refusal of a place that another process owns."""
    who = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "another process"
    since = f" since {owner.get('since')}" if owner else ""
    return UserError(
        f"{place} is in use by {who}{since}"[:400] + "; wait for its end, or name another folder."
    )


def await_another_machine(place: object, owner: JsonObject, read: Callable[[], JsonObject]) -> None:
    """Returns once the owner of a place counts up no more, or has released it.

    Args:
      read: returns the owner now, {} for none.

    Raises:
      UserError: the owner, or another process, counts up.
    """
    seconds = DEAD_AFTER * BEAT_SECONDS
    logging.getLogger(__name__).info(
        "%s was in use on %s; waiting up to %.0f seconds to see whether it still is.",
        *(place, str(owner.get("host"))[:100], seconds),
    )
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(1.0, BEAT_SECONDS))
        now = read()
        if not now:
            return
        if now != owner:
            raise in_use(place, now)


def _await_owner(path) -> JsonObject:
    """Returns the owner in a lock file, which its creator may be about to write; {} if the file is
    gone, or names none for as long as a living owner could take."""
    end = time.monotonic() + DEAD_AFTER * BEAT_SECONDS
    while not (owner := _read(path)) and os.path.lexists(path) and time.monotonic() < end:
        time.sleep(min(0.05, BEAT_SECONDS))
    return owner


def _read(path) -> JsonObject:
    """Returns the owner in a lock file; {} if it names none."""
    try:
        owner = json_files.load(path, _MAX_BYTES)
    except (FileNotFoundError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _same_file(file: int, path: Path) -> bool:
    try:
        by_path = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    by_handle = os.fstat(file)
    return (by_handle.st_dev, by_handle.st_ino) == (by_path.st_dev, by_path.st_ino)


def is_alive(owner: JsonObject) -> bool:
    """Returns whether the owner, of this machine, is another living process."""
    try:
        # Process ids are used again, so the start counts too.
        return owner["pid"] != os.getpid() and _started(owner["pid"]) == owner["started"]
    except (psutil.Error, OSError, LookupError, TypeError, ValueError, OverflowError):
        return False


def _started(pid: int) -> float:
    """Returns when a process started: in ticks since the boot, which setting the clock does not
    move, or where the system has no /proc, as psutil says."""
    # The number comes from a file: a text such as "../1" would lead to another path.
    if not isinstance(pid, int):
        raise TypeError("a process id is a whole number")
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except FileNotFoundError:
        return psutil.Process(pid).create_time()
    return int(status.rpartition(")")[2].split()[19])  # Field 22; the name may hold spaces.


def machine() -> str:
    """Returns a name of the running kernel: containers share it, hosts of one name do not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _root(folder: Path) -> Path:
    """Returns where links of an untrusted folder may lead to.

    That is the folder, which itself may be reached through links. A snapshot in the cache of the
    Hugging Face hub, REPOSITORY/snapshots/REVISION, has links into REPOSITORY/blobs.
    """
    folder = folder.resolve()
    for path in (folder, *folder.parents):
        if path.parent.name == "snapshots" and (path.parents[1] / "blobs").is_dir():
            return path.parents[1]
    return folder


def leads_out(folder: Path, path: Path) -> bool:
    """Returns whether a path in an untrusted folder leads to a place outside of it."""
    return not path.resolve().is_relative_to(_root(folder))


def refuse_outside_links(folder: Path) -> None:
    """Refuses an untrusted folder with a link, at any depth, to a path outside it.

    The folder itself may be reached through links.

    Raises:
      UserError: naming the link.
    """
    try:
        storage.retry(f"Reading {folder}", lambda: _refuse_outside_links(folder.resolve()))
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror or error}.") from error


def _refuse_outside_links(folder):
    def refuse(error: OSError):
        raise error

    for parent, folders, files in os.walk(folder, onerror=refuse):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and leads_out(folder, path):
                raise outside(folder, path)


def outside(folder: Path, path: Path) -> UserError:
    """Returns the error of a link that leads out of an untrusted folder."""
    return UserError(
        f"{path} is a link to {path.resolve()}, outside of the folder {folder}; put the file "
        "itself there, or name a folder that has both."
    )
