"""The `kernel` of a block-sparse layer: a dense array that is made where it is read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.files.errors import UserError


class DenseKernel:
    """The kernel of a layer, [..., in, out], with zeros between its stored blocks.

    Shape and dtype cost nothing; `kernel[...]` and conversion to an array make the dense kernel.
    Gradients of what is read are those of the stored blocks.  It cannot be written.

    Args:
      layer: the block-sparse linear.
    """

    def __init__(self, layer: Any):
        self._layer = layer
        self.shape = (*layer.values.shape[:-3], layer.in_features, layer.out_features)
        self.dtype = layer.values.dtype
        self.ndim = len(self.shape)

    def __repr__(self):
        return f"DenseKernel(shape={self.shape}, dtype={self.dtype})"

    def __getitem__(self, index):
        return self.__jax_array__()[index]

    def __setitem__(self, index, value):
        raise UserError(
            "The kernel of a block-sparse layer is made where it is read; legal: to change "
            "`values`, or to change a dense model and call sd.sparsify."
        )

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.__jax_array__(), dtype)

    def __jax_array__(self) -> jax.Array:
        values, static = self._layer.values[...], self._layer.static_layout
        tables = self._layer.tables() if static is None else static.tables()
        stack, in_blocks = values.shape[:-3], tables.out_index.shape[-2]

        def kernel(values, in_index, in_slot):
            outputs = np.arange(in_index.shape[0])[:, None]
            stored = jnp.where((in_slot >= 0)[..., None, None], values[in_slot], 0)
            grid = jnp.zeros((in_blocks, len(outputs), *values.shape[1:]), values.dtype)
            grid = grid.at[in_index, outputs].add(stored)  # Unused positions add zeros.
            return grid.swapaxes(1, 2).reshape(in_blocks * values.shape[1], -1)

        axes = (0, None, None) if static is not None else 0
        for _ in stack:
            kernel = jax.vmap(kernel, axes)
        kernels = kernel(values, jnp.asarray(tables.in_index), jnp.asarray(tables.in_slot))
        return kernels[..., : self.shape[-2], : self.shape[-1]]
