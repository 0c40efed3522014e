"""What the processes of a run tell each other; with one process, nothing is said.

All are called by every process, in the same order, from the main thread.
"""

import json
import platform
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from sparse_dataflow.files.errors import UserError


def first() -> bool:
    """Whether this is the process that writes the run folder and speaks."""
    return jax.process_index() == 0


def on_this_machine() -> int:
    """How many processes of the run this machine has, by its name."""
    if jax.process_count() == 1:
        return 1
    mine = np.uint32(zlib.crc32(platform.node().encode()))
    return int(np.sum(multihost_utils.process_allgather(mine) == mine))


def least(number: int) -> int:
    """The least of what the processes have, in int32."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.int32(number)).min())


def told(value: Any) -> Any:
    """What the first process has, on all: JSON-able; the others' own is not looked at."""
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    mine = text if first() else np.zeros(length, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(mine)).tobytes())


def from_first(function: Callable[[], Any]) -> Any:
    """What `function` gives on the first process, JSON-able; the others do not call it.

    Raises:
      UserError: on all, where it does on the first.
    """
    if jax.process_count() == 1:
        return function()
    result, error = None, None
    if first():
        try:
            result = function()
        except UserError as refusal:
            error = str(refusal)
    result, error = told((result, error))
    if error is not None:
        raise UserError(error)
    return result


def anywhere(*flags: bool) -> Any:
    """Whether any process has it; of several flags, a list."""
    if jax.process_count() > 1:
        flags = tuple(multihost_utils.process_allgather(np.asarray(flags)).any(axis=0).tolist())
    return flags[0] if len(flags) == 1 else list(flags)


def refused_together(error: UserError | None) -> None:
    """Raises on all, where any process has an error, that of the lowest one.

    Raises:
      UserError: as said.
    """
    if jax.process_count() == 1:
        if error is not None:
            raise error
        return
    if (words := anyones(error)) is not None:
        raise UserError(words)


def anyones(words: object | None) -> str | None:
    """The words of the lowest process that has some, up to 1000 bytes; None where none has."""
    if jax.process_count() == 1:
        return None if words is None else str(words)
    most = 1000
    text = np.frombuffer(str(words or "").encode()[:most].ljust(most), np.uint8)
    for each in multihost_utils.process_allgather(text):
        found = each.tobytes().decode(errors="replace").strip()
        if found:
            return found
    return None


def to_host(tree: Any) -> Any:
    """Numpy arrays of all leaves, those that are spread over processes brought together."""

    def one(leaf):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_replicated:
            if not leaf.is_fully_addressable:
                return multihost_utils.process_allgather(leaf, tiled=True)
        return jax.device_get(leaf)

    return jax.tree.map(one, tree)
