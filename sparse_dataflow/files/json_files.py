"""JSON files from anywhere: bounded, and never more than data."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from sparse_dataflow.files import storage

MOST_BYTES = 256 * 2**20
"""Far above any file that a run writes."""

MALFORMED = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""What may be raised while a value is taken for what it is not."""


def load(path: str | os.PathLike, most: int = MOST_BYTES) -> Any:
    """The value in a UTF-8 file; storage that fails for a moment is waited for.

    Raises:
      OSError: it is missing or may not be read.
      ValueError: it is no ordinary file, larger than `most` bytes, no UTF-8, or no JSON.
    """
    return parse(content(path, most))


def content(path: str | os.PathLike, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file that may be someone else's; raises as `load`."""
    path = Path(path)
    found = storage.retried(f"Reading {path}", lambda: _read(path, most + 1))
    if len(found) > most:
        raise ValueError(f"{path.name} is larger than {most} bytes")
    return found


def _read(path: Path, size: int) -> bytes:
    # Opening a pipe would wait for its other end.
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path.name} is no ordinary file")
    with path.open("rb") as file:
        return file.read(size)


def parse(text: str | bytes) -> Any:
    """The value in a text; raises ValueError where it is no JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
