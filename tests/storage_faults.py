"""File operations of the tests' own process that fail for a moment."""

import contextlib
import os
import sys
from pathlib import Path

OPERATIONS = ("open", "os.listdir", "os.mkdir", "os.rename", "os.scandir")
_watching: list = []


def _hook(event, arguments):
    if _watching and event in OPERATIONS:
        _watching[-1](arguments)


sys.addaudithook(_hook)


@contextlib.contextmanager
def failing(folder: Path, first: int, times: int, number: int):
    """Within it, of the operations on what lies under `folder`, the `times` from number `first` on
    (counted from 0) fail with the error `number`; yields what failed, as paths."""
    inside, seen, failed = str(folder), 0, []

    def watch(arguments):
        nonlocal seen
        named = [str(a) for a in arguments if isinstance(a, str | os.PathLike)]
        if not any(name.startswith(inside) for name in named):
            return
        seen += 1
        if first < seen <= first + times:
            failed.append(named)
            raise OSError(number, os.strerror(number))

    _watching.append(watch)
    try:
        yield failed
    finally:
        _watching.remove(watch)
