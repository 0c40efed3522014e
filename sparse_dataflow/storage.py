"""Errors of a file system that pass: waited for, and the operation made again.

A file server that restarts, a network that drops packets and a disk that is busy refuse now and
serve a moment later.  A full disk, a missing file and a missing right do not pass: they are told at
once, by whoever made the call.
"""

import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable, Sequence
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


def code(error: BaseException) -> int | None:
    """The system's error number in an error, its causes, or tensorstore's text; None for none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return cause.errno
        cause = cause.__cause__
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else None


def passes(error: BaseException) -> bool:
    """Whether the same operation may succeed later."""
    return isinstance(error, TimeoutError) or code(error) in PASSING


def retried(
    what: str, operation: Callable[[], T], waits: Sequence[float] | None = None, sleep=time.sleep
) -> T:
    """What `operation` gives, made again after an error that passes.

    Args:
      what: names it in the log, as in "reading config.json".
      operation: may be called several times: what it made half, it makes anew.
      waits: seconds before each new attempt, of which there are so many; WAITS where None.
      sleep: waits that long.

    Raises:
      Exception: whatever `operation` raises that does not pass, or raised in the last attempt.
    """
    waits = WAITS if waits is None else waits
    for attempt, seconds in enumerate(waits, start=1):
        try:
            return operation()
        except Exception as error:
            if not passes(error):
                raise
            seconds *= 1 + random.random() / 2
            number = code(error)
            logging.getLogger(__name__).warning(
                "%s failed (%s); attempt %d of %d in %.1f seconds.",
                *(what, os.strerror(number) if number else "timed out"),
                *(attempt + 1, len(waits) + 1, seconds),
            )
            sleep(seconds)
    return operation()
