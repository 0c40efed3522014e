"""The standard error of a process that must not depend on it."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class BestEffort:
    """A text stream whose errors are ignored: a full disk, a reader that left."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes the text if that is possible; returns its length."""
        # RuntimeError: a signal handler wrote while the interrupted code did.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream if that is possible."""
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._stream.flush()


@contextlib.contextmanager
def best_effort_errors() -> Iterator[None]:
    """Makes writing to `sys.stderr` never fail inside the block.

    A standard stream that is closed is opened on the null device: the next file that is opened
    would take its number, and libraries write to that number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stderr
    sys.stderr = BestEffort(before if before is not None else open(os.devnull, "w"))
    try:
        yield
    finally:
        sys.stderr = before
