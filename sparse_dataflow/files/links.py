"""Folders from someone else: nothing in them leads out of them."""

import os
from pathlib import Path

from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError


def refuse_leaving(folder: Path) -> None:
    """Refuses a folder with a link, at any depth, to a place outside it.

    The folder itself may be reached through links.

    Raises:
      UserError: naming the link.
    """
    try:
        storage.retried(f"Reading {folder}", lambda: _refuse_leaving(folder.resolve()))
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror or error}.") from error


def _refuse_leaving(inside):
    def refuse(error: OSError):
        raise error

    for parent, folders, files in os.walk(inside, onerror=refuse):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                raise UserError(
                    f"{path} is a link that leaves the run folder, to {path.resolve()}; put the "
                    "file itself there. A folder elsewhere can be mounted, or named with --out."
                )
