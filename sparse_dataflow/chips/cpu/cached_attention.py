"""Attention to a cache in C++; see `kernels`."""

from collections.abc import Sequence

import jax
import numpy as np

from sparse_dataflow.chips.cpu import kernels


def cached_attention_refusal(
    q, k, v, keys, values, positions, window, cap, has_room, layout=None
) -> str:
    """Return why the kernel cannot run; empty if it can."""
    if layout is not None:
        return "it has no layout of blocks."
    if not has_room:  # As in exported programs, which run where no kernel is.
        return "new tokens may have no place."
    if len({array.dtype for array in (q, k, v, keys, values)}) > 1:
        return "queries and cache have several dtypes."
    return kernels.kernel_refusal(q.dtype)


def run_cached_attention(
    q, k, v, keys, values, positions, window: int, cap: float, has_room: bool, layout: object = None
) -> Sequence[jax.Array]:
    """Compute `cached_attention`."""
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (q, keys, values)]
    symbol = kernels.symbol("cached_attention")
    # The caches are updated in place.
    attend = jax.ffi.ffi_call(symbol, results, input_output_aliases={3: 1, 4: 2})
    return attend(q, k, v, keys, values, positions, np.array([window, cap], np.float32))
