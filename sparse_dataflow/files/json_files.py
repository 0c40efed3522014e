"""JSON from untrusted sources, bounded in size and depth: every JSON from outside is read here."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError

MAX_BYTES = 64 * 2**20
"""Default size limit in bytes, far above any file that a run writes."""

MAX_DEPTH = 100
"""Most lists and objects inside each other: what reads a value may then recurse on it."""

MOST_CONTAINERS = 2**22
"""Most lists and objects: two characters of text become 70 bytes of memory."""

JsonObject = dict[str, Any]
"""An object of JSON.  JSON has no static types, so what reads a field checks its value."""

_CONTAINERS = (dict, list)

MALFORMED = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""Exceptions that code may raise while it reads a value of unexpected structure."""


def load(path: str | os.PathLike, max_bytes: int = MAX_BYTES) -> Any:
    """Returns the value in a UTF-8 JSON file; retries transient storage errors.

    Raises:
      OSError: the file is missing, cannot be read, or is not a regular file.
      ValueError: larger than `max_bytes`, not UTF-8 or not JSON.
    """
    return parse(read_bytes(path, max_bytes))


def read_bytes(path: str | os.PathLike, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the content of an untrusted file; raises as `load`."""
    path = Path(path)
    # One byte more than is legal: so a file that is too large is known without reading it whole.
    content = storage.retry(f"Reading {path}", lambda: _read(path, max_bytes + 1))
    if len(content) > max_bytes:
        raise ValueError(f"{path.name} is larger than {max_bytes} bytes")
    return content


def _read(path: Path, size: int) -> bytes:
    with storage.open_regular(path) as file:
        return file.read(size)


def parse(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
      ValueError: it is invalid, deeper than MAX_DEPTH, or may have more than MOST_CONTAINERS.
    """
    signs = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    # Before parsing, as the values take many times the memory of their text.
    if sum(map(text.count, signs)) > MOST_CONTAINERS:  # type: ignore[arg-type]
        raise ValueError(f"it has more than {MOST_CONTAINERS:,} lists and objects")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value] if type(value) in _CONTAINERS else []
    # By levels: recursion over a hostile text would overflow the stack.
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


_ABSENT = object()


def differences(saved: object, expected: object, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields (dotted key, saved value, expected value) where two JSON values differ; 1 is 1.0."""
    if isinstance(saved, dict) and isinstance(expected, dict):
        for name in sorted(saved.keys() | expected.keys()):
            pair = saved.get(name, _ABSENT), expected.get(name, _ABSENT)
            yield from differences(*pair, f"{key}.{name}" if key else name)
        return
    # Another writer may have 1 where this one has 1.0.  A bool is neither type.
    if saved == expected and {type(saved), type(expected)} == {int, float}:
        return
    old, new = (
        "absent" if value is _ABSENT else json.dumps(value, sort_keys=True)
        for value in (saved, expected)
    )
    if old != new:
        yield key or "the value", old, new


def refuse_difference(path: Path, problem: str, saved: object, expected: object) -> None:
    """Refuses a checkpoint whose saved JSON value differs from the expected one.

    Args:
      problem: verb phrase for the message, such as "was made under another config".

    Raises:
      UserError: naming the first four differences.
    """
    changes = list(differences(saved, expected))
    if not changes:
        return
    shown = "; ".join(f"{key} is {old} there and {new} here" for key, old, new in changes[:4])
    more = f"; and {len(changes) - 4} more" if len(changes) > 4 else ""
    raise UserError(
        f"Checkpoint {path} {problem}: {shown}{more}. "
        "Give the values it was made with, or start in a new run folder."
    )
