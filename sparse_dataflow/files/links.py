"""Folders from untrusted sources: no link in them may lead out of them."""

import os
from pathlib import Path

from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError


def refuse_outside_links(folder: Path) -> None:
    """Refuses a folder with a link, at any depth, to a path outside it.

    The folder itself may be reached through links.

    Raises:
      UserError: naming the link.
    """
    try:
        storage.retry(f"Reading {folder}", lambda: _refuse_outside_links(folder.resolve()))
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror or error}.") from error


def _refuse_outside_links(root):
    def refuse(error: OSError):
        raise error

    for parent, folders, files in os.walk(root, onerror=refuse):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise UserError(
                    f"{path} is a link to {path.resolve()}, outside the run folder; put the file "
                    "itself there. A folder elsewhere can be mounted, or named with --out."
                )
