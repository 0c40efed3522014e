"""The product with rows in C++; see `kernels`."""

import jax
import numpy as np

from sparse_dataflow.chips.cpu import kernels


def row_matmul_refusal(x, values, inputs, scale) -> str:
    """Return why the product cannot run; empty if it can."""
    return kernels.kernel_refusal(x.dtype, *(() if values.dtype == "int8" else (values.dtype,)))


def run_row_matmul(
    x: jax.Array, values: jax.Array, inputs: jax.Array | None, scale: jax.Array | None
) -> jax.Array:
    """Compute `row_matmul`."""
    groups, _, width = values.shape
    result = jax.ShapeDtypeStruct((len(x), groups * width), x.dtype)
    # A call has a fixed number of operands: empty ones stand for what is not there.
    index = np.empty((0, 0), np.uint16) if inputs is None else inputs
    factors = np.empty(0, np.float32) if scale is None else scale
    return jax.ffi.ffi_call(kernels.symbol("row_matmul"), result)(x, values, index, factors)
