"""Differences between two JSON values, for messages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparse_dataflow.files.errors import UserError

_ABSENT = object()


def differences(saved: Any, expected: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields (dotted key, saved value, expected value) where two JSON values differ; 1 is 1.0."""
    if isinstance(saved, dict) and isinstance(expected, dict):
        for name in sorted(saved.keys() | expected.keys()):
            pair = saved.get(name, _ABSENT), expected.get(name, _ABSENT)
            yield from differences(*pair, f"{key}.{name}" if key else name)
        return
    if saved == expected and {type(saved), type(expected)} == {int, float}:
        return
    old, new = (
        "absent" if value is _ABSENT else json.dumps(value, sort_keys=True)
        for value in (saved, expected)
    )
    if old != new:
        yield key or "the value", old, new


def refuse_difference(path: Path, problem: str, saved: Any, expected: Any) -> None:
    """Refuses a checkpoint whose saved JSON value differs from the expected one.

    Args:
      path: the checkpoint.
      problem: verb phrase for the message, such as "was made under another config".
      saved: JSON value of the checkpoint.
      expected: JSON value of this run.

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
