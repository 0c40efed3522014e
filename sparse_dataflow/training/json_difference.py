"""Where two JSON values differ, in words for the user."""

import json
from collections.abc import Iterator
from typing import Any

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
