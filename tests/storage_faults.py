"""Transient failures of file operations in the tests' process."""

import contextlib
import errno
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


@contextlib.contextmanager
def lost(folder: Path, first: int):
    """Takes a folder away, as a disk that is lost, before its `first`-th file operation.

    That operation and all later ones in the folder fail while the context is active.

    Yields:
      A list, which then holds the path where the folder is now.
    """
    prefix, count, away, busy = str(folder), 0, [], []

    def watch(arguments):
        nonlocal count
        paths = [str(a) for a in arguments if isinstance(a, str | os.PathLike)]
        if busy or not any(f"{path}/".startswith(f"{prefix}/") for path in paths):
            return
        count += 1
        if count <= first:
            return
        if not away:
            busy.append(True)
            os.rename(folder, folder.with_name(f"{folder.name}.away"))
            away.append(folder.with_name(f"{folder.name}.away"))
            busy.clear()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    _watchers.append(watch)
    try:
        yield away
    finally:
        _watchers.remove(watch)
