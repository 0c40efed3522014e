"""Output folders: what this project did not write is never replaced or removed.

A folder may be written to where it is missing, empty, or marked by the program that writes. The
mark is a small file, made while the folder is empty. A file's name alone proves nothing.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError

MARK = ".sparse_dataflow"
"""Name of the file that names the program whose folder this is."""

_NAMES_SHOWN = 3


def is_marked(folder: Path, owner: str) -> bool:
    """Whether `owner` marked the folder; raises OSError where storage fails for a moment only."""
    path = folder / MARK
    try:
        return not path.is_symlink() and json_files.content(path, 1000) == _text(owner)
    except (OSError, ValueError) as error:
        if storage.passes(error):
            raise
        return False


def refuse_foreign(
    folder: Path,
    owner: str,
    flag: str = "--out",
    names: Collection[str] | None = None,
    known: Callable[[Path], bool] = lambda folder: False,
) -> None:
    """Refuses a folder that holds what `owner` did not write; changes nothing.

    Args:
      folder: to write to.
      owner: the program that writes, such as "planner_truth".
      flag: what names the folder.
      names: of the only files that a marked folder may hold; any where None.
      known: whether a folder without a mark is the owner's own all the same.

    Raises:
      UserError: the folder holds something else, or cannot be read.
    """

    def look():
        others = [name for name in sorted(_listed(folder)) if name != MARK]
        if is_marked(folder, owner):
            return [name for name in others if names is not None and name not in names]
        if os.path.lexists(folder / MARK):
            return others or [MARK]
        return [] if not others or known(folder) else others

    try:
        others = storage.retried(f"Reading {folder}", look)
    except OSError as error:
        raise _unwritable(folder, error, flag) from error
    if not others:
        return
    shown = ", ".join(others[:_NAMES_SHOWN])
    more = f" and {len(others) - _NAMES_SHOWN} more" if len(others) > _NAMES_SHOWN else ""
    raise UserError(
        f"{folder} holds what {owner} may not replace ({shown}{more}); legal: {flag} with a folder "
        "that is missing or empty."
    )


def claim(
    folder: Path,
    owner: str,
    flag: str = "--out",
    names: Collection[str] | None = None,
    known: Callable[[Path], bool] = lambda folder: False,
) -> Callable[[], None]:
    """Makes the folder if it is missing, and marks it as its owner's.

    Takes the arguments of `refuse_foreign`.

    Returns:
      A function that removes what was made here, as far as nothing else is in it.

    Raises:
      UserError: as `refuse_foreign`; or the folder cannot be written.
    """
    refuse_foreign(folder, owner, flag, names, known)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    marked = False

    def undo():
        with contextlib.suppress(OSError):
            if marked and os.listdir(folder) == [MARK]:
                (folder / MARK).unlink()
            for path in created:
                path.rmdir()

    try:
        storage.retried(f"Making {folder}", lambda: folder.mkdir(parents=True, exist_ok=True))
        if not is_marked(folder, owner):
            marked = storage.retried(f"Marking {folder}", lambda: _marked(folder, owner))
    except OSError as error:
        undo()
        raise _unwritable(folder, error, flag) from error
    return undo


@contextlib.contextmanager
def claimed(
    folder: Path, owner: str, flag: str = "--out", names: Collection[str] | None = None
) -> Iterator[Path]:
    """Yields the folder, claimed; a block that fails with nothing written leaves no trace.

    Takes the arguments of `refuse_foreign` and raises as `claim`.
    """
    undo = claim(folder, owner, flag, names)
    try:
        yield folder
    except BaseException:
        undo()
        raise


def _marked(folder, owner) -> bool:
    """Whether the mark was made here; another process of the same owner may be faster."""
    path = folder / MARK
    try:
        file = path.open("xb")
    except FileExistsError:
        if is_marked(folder, owner):
            return False
        raise
    try:
        with file:
            file.write(_text(owner))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
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
