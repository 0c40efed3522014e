"""Host memory for arrays, in large pages where the system has them.

Memory that is touched for the first time costs a call of the system for each page, and a processor
remembers the places of few pages: a model in pages of 4 KiB loads and decodes more slowly.
"""

import math
import mmap
import threading

import jax
import numpy as np
from numpy.typing import DTypeLike

_LINE, _ARENA = 64, 2**25
"""Bytes to which jax on a CPU wants arrays aligned, so that it needs no copy, and bytes of the
memory that small arrays share."""

_lock = threading.Lock()
_free = memoryview(b"")


def empty(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> np.ndarray:
    """Returns an array that `jax.device_put` takes without a copy on a CPU."""
    global _free
    size = math.prod(shape) * np.dtype(dtype).itemsize
    padded = max(_LINE, -(-size // _LINE) * _LINE)
    with _lock:
        memory = _free
        if padded > len(memory):
            memory = _mapped(max(padded, _ARENA))
        claimed, rest = memory[:padded], memory[padded:]
        # What is left of a mapping serves the next arrays, unless the old rest is larger.
        if len(rest) >= len(_free) or memory is _free:
            _free = rest
    return np.frombuffer(claimed[:size], dtype).reshape(shape)


def _mapped(size):
    mapped = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # A system without large pages.
            pass
    return memoryview(mapped)


def placed(array: jax.Array | np.ndarray) -> jax.Array:
    """Returns a copy of an array, which is of a CPU, in this memory."""
    copy = empty(array.shape, array.dtype)
    copy[...] = np.asarray(array)
    return jax.device_put(copy)
