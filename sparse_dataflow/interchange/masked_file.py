"""Masked weights in a file: the entries under the mask, and one bit a block."""

from collections.abc import Callable, Mapping

import numpy as np

from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.training.transitions import KERNEL, MASK


def packed(arrays: Mapping[str, object], spec: LinearSpec) -> dict[str, object]:
    """Returns the arrays of a layer's projection as a file has them.

    The kernel is [out, inputs of each], the mask uint8 [in_blocks, out_blocks / 8] as of
    `numpy.packbits`.
    """
    mask = np.asarray(arrays[MASK])
    # By output, with ascending inputs: each output stores equally many.
    values = np.asarray(arrays[KERNEL]).T[mask.T].reshape(mask.shape[1], -1)
    return {
        **arrays,
        KERNEL: values,
        MASK: np.packbits(spec.weight.block_mask(mask, spec), axis=1),
    }


def unpacked(
    read: Callable[..., np.ndarray], shape: tuple[int, int], spec: LinearSpec
) -> dict[str, np.ndarray]:
    """Returns the kernel and the mask of a layer's projection; the inverse of `packed`.

    Args:
      read: (name, shape, dtype) -> array; no dtype means floats.
      shape: [in, out] of the weight.

    Raises:
      ValueError: the mask does not fit the spec.
    """
    rows, columns = spec.weight.grid(spec, shape)
    bits = read(MASK, (rows, -(-columns // 8)), "uint8")
    mask = spec.weight.entry_mask(np.unpackbits(bits, axis=1, count=columns).astype(bool), spec)
    span, count = spec.weight.per_span(spec, rows)
    stored = count * (rows // span) * spec.block
    if (mask.sum(0) != stored).any():
        raise ValueError(f"its mask does not store {stored} inputs of each output")
    kernel = np.zeros(shape, np.float32)
    kernel.T[mask.T] = read(KERNEL, (shape[1], stored)).ravel()
    return {KERNEL: kernel, MASK: mask}
