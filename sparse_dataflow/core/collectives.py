"""Host values that the processes of a run exchange, through jax.

Every process calls each function in the same order from its main thread.  With one process,
nothing is sent.
"""

import json
import platform
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

T = TypeVar("T")


def is_first() -> bool:
    """Returns whether this is process 0, which writes the run folder and prints."""
    return jax.process_index() == 0


def count_on_host() -> int:
    """Returns the number of the run's processes on this host, compared by host name."""
    if jax.process_count() == 1:
        return 1
    name = np.uint32(zlib.crc32(platform.node().encode()))
    return int(np.sum(multihost_utils.process_allgather(name) == name))


def minimum(number: int) -> int:
    """Returns the minimum over all processes, in int32."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.int32(number)).min())


def newest(records: np.ndarray) -> np.ndarray:
    """Returns each record of the process in which its first number is the largest.

    A record is whole: its numbers come from one process, the lowest one if several have the first
    number.

    Args:
      records: int32 [..., numbers of a record], of one shape on all processes.
    """
    if jax.process_count() == 1:
        return records
    process_records = np.asarray(multihost_utils.process_allgather(records))
    # argmax takes the first of several, so all processes choose the same one.
    owner = process_records[..., 0].argmax(axis=0)[None, ..., None]
    return np.take_along_axis(process_records, owner, axis=0)[0]


def broadcast(value: T) -> T:
    """Returns process 0's JSON-able value on every process."""
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    # A broadcast needs one shape on all processes, so the length goes first.
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    buffer = text if is_first() else np.zeros(length, np.uint8)
    return json_files.parse(np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes())


def broadcast_arrays(tree: T) -> T:
    """Returns process 0's numpy arrays on every process; their shapes are equal on all."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


def on_first(function: Callable[[], Any]) -> Any:
    """Calls `function` on process 0 alone and returns its JSON-able result on every process.

    Raises:
      UserError: on every process, if `function` raises one.
    """
    if jax.process_count() == 1:
        return function()
    result, error = None, None
    if is_first():
        try:
            result = function()
        except UserError as refusal:
            error = str(refusal)
    # The error too: a process that raised alone would leave the others waiting.
    result, error = broadcast((result, error))
    if error is not None:
        raise UserError(error)
    return result


def any_process(*flags: bool) -> Any:
    """Returns whether the flag is true on any process; a list for several flags."""
    if jax.process_count() > 1:
        flags = tuple(multihost_utils.process_allgather(np.asarray(flags)).any(axis=0).tolist())
    return flags[0] if len(flags) == 1 else list(flags)


def raise_on_all(error: UserError | None) -> None:
    """Raises on every process if any process passes an error.

    Raises:
      UserError: with the message of the lowest process that passes one.
    """
    if jax.process_count() == 1:
        if error is not None:
            raise error
        return
    if (message := first_message(error)) is not None:
        raise UserError(message)


def first_message(message: object | None) -> str | None:
    """Returns the message of the lowest process that has one, up to 1000 bytes; None if none."""
    if jax.process_count() == 1:
        return None if message is None else str(message)
    size = 1000
    # Of a fixed size: all processes send equally many bytes, also those without a message.
    buffer = np.frombuffer(str(message or "").encode()[:size].ljust(size), np.uint8)
    for row in multihost_utils.process_allgather(buffer):
        if text := row.tobytes().decode(errors="replace").strip():
            return text
    return None


def to_host(tree: T) -> T:
    """Returns the leaves as numpy arrays, gathering those that are spread over processes."""

    def fetch(leaf):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_replicated:
            if not leaf.is_fully_addressable:
                return multihost_utils.process_allgather(leaf, tiled=True)
        return jax.device_get(leaf)

    return jax.tree.map(fetch, tree)
