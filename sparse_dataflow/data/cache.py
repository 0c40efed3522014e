"""Cached files that are safe against kills and concurrent processes.

Every file is written to a temporary name in the same folder and renamed when complete, under a lock
that the operating system releases when its process dies.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from sparse_dataflow.files import folders, storage
from sparse_dataflow.files.errors import UserError

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "sparse_dataflow"
"""Default cache folder of prepared corpora, tokenizers and tokens."""

_STORAGE_ERRORS = storage.TRANSIENT | {
    errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.ENAMETOOLONG, errno.ENOSPC,
    errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip


_PARTS = {"downloads", "locks", "texts", "tfds", "tokenizers", "tokens"}


def _is_older_cache(folder: Path) -> bool:
    """Whether it is a cache of a version that left no mark: such folders, and nothing else."""
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    return "locks" in names <= _PARTS and len(names) == len(os.listdir(folder))


def resolved(folder: str | os.PathLike) -> Path:
    """Returns a cache folder with `~` expanded.

    Raises:
      UserError: this user has no home folder.
    """
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise UserError(
            "This user has no home folder for the data cache; set XDG_CACHE_HOME."
        ) from None


@contextlib.contextmanager
def exclusive(cache_dir: Path, key: str) -> Iterator[None]:
    """Holds the lock `key` of the cache folder, and creates the folder if needed.

    Raises:
      UserError: the folder holds other files or cannot be written, or its disk is full, at the
        lock or in the block.
    """
    import filelock

    locks = cache_dir / "locks"
    lock = filelock.FileLock(locks / (re.sub(r"[^\w.-]+", "_", key) + ".lock"))

    folders.claim(cache_dir, "data cache", "XDG_CACHE_HOME or cache_dir", accept=_is_older_cache)

    def acquire():
        locks.mkdir(parents=True, exist_ok=True)
        return lock.acquire()

    try:
        acquired_lock = storage.retry(f"Locking {lock.lock_file}", acquire)
    except OSError as error:
        raise _cannot_write(cache_dir, error) from error
    try:
        with acquired_lock:
            yield
    except OSError as error:
        if error.errno not in _STORAGE_ERRORS:
            raise
        raise _cannot_write(cache_dir, error) from error


def _cannot_write(cache_dir: Path, error: OSError) -> UserError:
    return UserError(
        f"The data cache {cache_dir} cannot be written ({error.strerror or error}). "
        "Free disk space, or name a writable folder with XDG_CACHE_HOME."
    )


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary path that replaces `path` if the block succeeds.

    Call it under `exclusive`: it first removes the partial file of a killed process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
