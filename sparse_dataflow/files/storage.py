"""Retries of file operations after transient errors.

A restarting file server, a lossy network and a busy disk fail now and work a moment later. A full
disk, a missing file and a missing permission are permanent: the caller gets those at once.
"""

import contextlib
import errno
import logging
import os
import random
import re
import resource
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from sparse_dataflow.files.errors import UserError, escaped

T = TypeVar("T")

LEAST_OPEN_FILES, MOST_OPEN_FILES = 64, 4096

WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each retry. Up to half as much is added at random, so that many processes do not
retry at the same time."""

TRANSIENT = frozenset(
    getattr(errno, name)
    for name in (
        "EAGAIN", "EBUSY", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN",
        "EHOSTUNREACH", "EINTR", "EIO", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENOLCK",
        "ENOTCONN", "EREMOTEIO", "ESTALE", "ETIMEDOUT",
    )
    if hasattr(errno, name)
)  # fmt: skip
"""Error numbers of NFS, FUSE and block devices while a server or a link is down (errno(3))."""

_NO_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""How file systems without an fsync of folders answer."""

_MESSAGES = {os.strerror(number): number for number in TRANSIENT}
_RETRIED = "It was attempted several times."


def error_number(error: BaseException) -> int | None:
    """Returns the errno of an error or of its causes; None if there is none.

    tensorstore and libraries in Rust name it in the text of their errors; array_record's
    RuntimeErrors hold its message.
    """
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno:
            return cause.errno
        if match := re.search(r"os_error_code='(\d+)'|\(os error (\d+)\)", str(cause)):
            return int(match[1] or match[2])
        if isinstance(cause, RuntimeError):
            for message, number in _MESSAGES.items():
                if message in str(cause):
                    return number
    return None


def is_transient(error: BaseException) -> bool:
    """Returns whether the same operation may succeed later."""
    return isinstance(error, TimeoutError) or error_number(error) in TRANSIENT


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, and each one that it was raised from."""
    while error is not None:
        yield error
        # Only what an error was raised from: a `__context__` may be an error that was handled.
        error = error.__cause__


def retry(name: str, operation: Callable[[], T], sleep=time.sleep) -> T:
    """Calls `operation`, again after each transient error, and returns its result.

    An inner retry that gave up is not retried again.

    Args:
      name: for the log, such as "Reading config.json".
      operation: may be called several times; each call starts from the beginning.
      sleep: function that waits for a number of seconds.

    Raises:
      Exception: the error of `operation` if it is permanent, or that of the last attempt.
    """
    attempt = 1
    while True:
        try:
            return operation()
        except Exception as error:
            if not is_transient(error) or _was_retried(error):
                raise
            if attempt > len(WAITS):
                error.add_note(_RETRIED)
                raise
            # Spread, so that processes that failed together do not retry together.
            seconds = WAITS[attempt - 1] * (1 + random.random() / 2)
            number = error_number(error)
            logging.getLogger(__name__).warning(
                "%s failed (%s); attempt %d of %d in %.1f seconds.",
                *(name, os.strerror(number) if number else "timed out"),
                *(attempt + 1, len(WAITS) + 1, seconds),
            )
        attempt += 1
        sleep(seconds)


def _was_retried(error):
    return any(_RETRIED in getattr(cause, "__notes__", ()) for cause in causes(error))


def allow_open_files() -> None:
    """Raises this process's limit of open files as far as the system allows.

    Raises:
      UserError: it stays below `LEAST_OPEN_FILES`, which libraries need without saying so.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MOST_OPEN_FILES if most == resource.RLIM_INFINITY else min(most, MOST_OPEN_FILES)
    if limit != resource.RLIM_INFINITY and limit < target:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, most))
            limit = target
    if limit != resource.RLIM_INFINITY and limit < LEAST_OPEN_FILES:
        raise UserError(
            f"This process may open {limit} files; allow {LEAST_OPEN_FILES} or more (ulimit -n)."
        )


def open_regular(path: str | os.PathLike, mode: str = "rb") -> Any:
    """Opens a file that may be anything: a named pipe or a device is refused and never waited for.

    Raises:
      OSError: it cannot be opened, or is not a regular file.
    """
    return open(path, mode, opener=regular_descriptor)


def regular_descriptor(path: str | os.PathLike, flags: int) -> int:
    """Returns the descriptor of a file that is opened as `open_regular` does."""
    # Opening a named pipe would block until its other end opens.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def regular(path: Path) -> Path:
    """Returns the path of a file that a library opens by its name; raises as `open_regular`."""
    os.close(regular_descriptor(path, os.O_RDONLY))
    return path


@contextlib.contextmanager
def writing(place: object, then: str = "") -> Iterator[None]:
    """Turns what a block raises where `place` cannot be written, by any library, into a UserError.

    Args:
      place: names what is written.
      then: a sentence about what is left, after a space.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        number = error_number(error)
        if number is None and not isinstance(error, OSError):
            raise
        words = os.strerror(number) if number else str(error)
        raise UserError(f"{place} cannot be written: {words}.{then}") from error


def replace_text(path: str | os.PathLike, text: str) -> None:
    """Replaces a text file for readers as `replace` does.

    Secrets are kept out of the text by its author: a file that is read again holds what it says.

    Raises:
      UserError: it cannot be written.
    """
    with writing(path):
        replace(path, text.encode())


def replace(path: str | os.PathLike, content: bytes) -> None:
    """Replaces the file at `path` atomically: writes next to it, flushes and renames.

    Retries transient errors.  Of several writers at once, the last one's file stays.

    Raises:
      OSError: the file cannot be written; the old file stays, unless only its new name could not
        be flushed.
    """
    path = Path(path)
    # A name of its own, as two processes may replace the same file at once.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")

    def write():
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            # Before the rename: a power cut could leave the new name without its content.
            os.fsync(file.fileno())
        os.replace(partial, path)
        flush_folder(path.parent)

    try:
        retry(f"Writing {path}", write)
    # Also when a signal ends the run: no unfinished file stays behind.
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


UNFINISHED = ".new"
"""Ending of a file that `replace` has not renamed, as a killed process leaves it."""


def without_token(name: str) -> str:
    """Returns the name of an unfinished file without what tells writers apart: "a.json.new"."""
    return re.sub(rf"\.[0-9a-f]{{8}}{re.escape(UNFINISHED)}$", UNFINISHED, name)


def flush_folder(folder: Path) -> None:
    """Flushes the file names in `folder` to disk, as far as its file system can (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flushes all files below a folder, and their names, to disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as file:
                os.fsync(file.fileno())
        flush_folder(Path(parent))


def make_folder(folder: Path) -> None:
    """Makes a folder with its parents, as far as they are missing, and flushes their names."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in created:
        flush_folder(path.parent)


SECONDS = 8.0
"""Seconds until the first line; each later one comes after twice the time."""

_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def told(activity: str) -> Iterator[None]:
    """Says what a block does, such as "fetching owner/name", if it takes more than SECONDS."""
    ended, start = threading.Event(), time.monotonic()

    def tell():
        pause = SECONDS
        while not ended.wait(pause):
            _LOG.info("still %s after %.0f s", escaped(activity), time.monotonic() - start)
            pause = time.monotonic() - start

    with contextlib.suppress(RuntimeError):  # No more threads.
        threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
