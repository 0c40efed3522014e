"""Transient failures of file operations in the tests' process."""

import contextlib
import os
import sys
from pathlib import Path

OPERATIONS = ("open", "os.listdir", "os.mkdir", "os.rename", "os.scandir")
_watchers: list = []


def _hook(event, arguments):
    if _watchers and event in OPERATIONS:
        _watchers[-1](arguments)


sys.addaudithook(_hook)


@contextlib.contextmanager
def failing(folder: Path, first: int, times: int, number: int):
    """Makes file operations under a folder fail while the context is active.

    Args:
      folder: folder whose operations count.
      first: index of the first operation that fails, from 0.
      times: number of successive failures.
      number: errno of the failures.

    Yields:
      A list of the paths of each failed operation, which grows with the failures.
    """
    prefix, count, failed = str(folder), 0, []

    def watch(arguments):
        nonlocal count
        paths = [str(a) for a in arguments if isinstance(a, str | os.PathLike)]
        if not any(path.startswith(prefix) for path in paths):
            return
        count += 1
        if first < count <= first + times:
            failed.append(paths)
            raise OSError(number, os.strerror(number))

    _watchers.append(watch)
    try:
        yield failed
    finally:
        _watchers.remove(watch)
