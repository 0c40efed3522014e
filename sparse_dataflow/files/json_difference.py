"""Where two JSON values differ, in words for the user."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparse_dataflow.files.errors import UserError

_ABSENT = object()


def differences(saved: Any, wanted: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, saved value, wanted value) where two JSON values differ."""
    if isinstance(saved, dict) and isinstance(wanted, dict):
        for name in sorted(saved.keys() | wanted.keys()):
            there, here = saved.get(name, _ABSENT), wanted.get(name, _ABSENT)
            yield from differences(there, here, f"{key}.{name}" if key else name)
        return
    there, here = (
        "absent" if value is _ABSENT else json.dumps(value, sort_keys=True)
        for value in (saved, wanted)
    )
    if there != here:
        yield key or "it", there, here


def refuse_other(path: Path, what: str, saved: Any, wanted: Any) -> None:
    """Refuses a checkpoint whose JSON-able facts are not those wanted.

    Raises:
      UserError: naming the first differences.
    """
    found = list(differences(saved, wanted))
    if not found:
        return
    shown = "; ".join(f"{key} is {there} there and {here} here" for key, there, here in found[:4])
    more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
    raise UserError(
        f"Checkpoint {path} {what}: {shown}{more}. "
        "Give the values it was made with, or start in a new run folder."
    )
