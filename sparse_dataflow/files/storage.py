"""Errors of a file system that pass: waited for, and the operation made again.

A file server that restarts, a network that drops packets and a disk that is busy refuse now and
serve a moment later.  A full disk, a missing file and a missing right do not pass: they are told at
once, by whoever made the call.
"""

import contextlib
import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each new attempt, doubling; up to half as much is added at random, so that many
processes do not ask a server again in the same instant."""

PASSING = frozenset(
    getattr(errno, name)
    for name in (
        "EAGAIN", "EBUSY", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN",
        "EHOSTUNREACH", "EINTR", "EIO", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENOLCK",
        "ENOTCONN", "EREMOTEIO", "ESTALE", "ETIMEDOUT",
    )
    if hasattr(errno, name)
)  # fmt: skip
"""What NFS, FUSE and block devices answer while a server or a link is away (errno(3))."""


_WORDS = {os.strerror(number): number for number in PASSING}
_GIVEN_UP = "It was attempted several times."


def code(error: BaseException) -> int | None:
    """The system's error number in an error or its causes; None for none.

    tensorstore's errors name it in their text, array_record's RuntimeErrors say it in words.
    """
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno:
            return cause.errno
        if found := re.search(r"os_error_code='(\d+)'", str(cause)):
            return int(found[1])
        if isinstance(cause, RuntimeError):
            for words, number in _WORDS.items():
                if words in str(cause):
                    return number
    return None


def passes(error: BaseException) -> bool:
    """Whether the same operation may succeed later."""
    return isinstance(error, TimeoutError) or code(error) in PASSING


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def retried(
    what: str, operation: Callable[[], T], waits: Sequence[float] | None = None, sleep=time.sleep
) -> T:
    """What `operation` gives, made again after an error that passes.

    Where `operation` waits for a part of itself in this way, and in vain, it is not made again.

    Args:
      what: names it in the log, as in "reading config.json".
      operation: may be called several times: what it made half, it makes anew.
      waits: seconds before each new attempt, of which there are so many; WAITS where None.
      sleep: waits that long.

    Raises:
      Exception: whatever `operation` raises that does not pass, or raised in the last attempt.
    """
    waits, attempt = WAITS if waits is None else waits, 1
    while True:
        try:
            return operation()
        except Exception as error:
            if not passes(error) or _given_up(error):
                raise
            if attempt > len(waits):
                error.add_note(_GIVEN_UP)
                raise
            seconds = waits[attempt - 1] * (1 + random.random() / 2)
            number = code(error)
            logging.getLogger(__name__).warning(
                "%s failed (%s); attempt %d of %d in %.1f seconds.",
                *(what, os.strerror(number) if number else "timed out"),
                *(attempt + 1, len(waits) + 1, seconds),
            )
        attempt += 1
        sleep(seconds)


def _given_up(error):
    return any(_GIVEN_UP in getattr(cause, "__notes__", ()) for cause in _causes(error))


def replace(path: str | os.PathLike, content: bytes) -> None:
    """Puts `content` at `path`, whole or not at all: beside it, flushed to disk, then renamed.

    Errors that pass are waited for.

    Raises:
      OSError: the storage refuses; what lay at `path` still does.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.new")

    def write():
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    try:
        retried(f"Writing {path}", write)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
