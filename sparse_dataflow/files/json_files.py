"""JSON from untrusted sources, bounded in size and depth: every JSON from outside is read here."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from sparse_dataflow.files import storage

MAX_BYTES = 64 * 2**20
"""Default size limit in bytes, far above any file that a run writes."""

MAX_DEPTH = 100
"""Most lists and objects inside each other: what reads a value may then recurse on it."""

_CONTAINERS = (dict, list)

MALFORMED = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""Exceptions that code may raise while it reads a value of unexpected structure."""


def load(path: str | os.PathLike, max_bytes: int = MAX_BYTES) -> Any:
    """Returns the value in a UTF-8 JSON file; retries transient storage errors.

    Raises:
      OSError: the file is missing or cannot be read.
      ValueError: not a regular file, larger than `max_bytes`, not UTF-8 or not JSON.
    """
    return parse(read_bytes(path, max_bytes))


def read_bytes(path: str | os.PathLike, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the content of an untrusted file; raises as `load`."""
    path = Path(path)
    content = storage.retry(f"Reading {path}", lambda: _read(path, max_bytes + 1))
    if len(content) > max_bytes:
        raise ValueError(f"{path.name} is larger than {max_bytes} bytes")
    return content


def _read(path: Path, size: int) -> bytes:
    # Opening a named pipe would block until its other end opens.
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path.name} is not a regular file")
    with path.open("rb") as file:
        return file.read(size)


def parse(text: str | bytes) -> Any:
    """Returns the value of a JSON text; raises ValueError if invalid or deeper than MAX_DEPTH."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(MAX_DEPTH):
        if not level:
            return value
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) in _CONTAINERS
        ]
    if not level:
        return value
    raise ValueError("it is nested too deeply")
