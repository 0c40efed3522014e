"""Output folders: files that this project did not write are never replaced or removed.

A program may write to a folder that is missing, empty or marked as its own. The mark is a small
file, made while the folder is empty. A file's name alone is no proof of its author.
"""

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError

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
        others = [name for name in sorted(_listed(folder)) if not _is_mark(name)]
        if is_marked(folder, owner):
            return [name for name in others if names is not None and name not in names]
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
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    marked = False

    def undo():
        with contextlib.suppress(OSError):
            if marked and os.listdir(folder) == [MARK]:
                (folder / MARK).unlink()
            for path in created:
                path.rmdir()

    try:
        storage.retry(f"Making {folder}", lambda: folder.mkdir(parents=True, exist_ok=True))
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
            if error.errno not in _NO_LINKS or os.path.lexists(path):
                raise
            whole.rename(path)
    finally:
        whole.unlink(missing_ok=True)
    return True


def _is_mark(name):
    """Whether a file's name is that of a mark, or of one that a killed process did not finish."""
    return name == MARK or name.startswith(MARK + ".")


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
