"""The `kernel` of a block-sparse layer: a dense array that is made where it is read."""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.layouts.layout import index_tables
from sparse_dataflow.core.ops.block_sparse_matmul.dense_matmul import to_dense
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.block_arrays import cut_blocks


class DenseKernel:
    """The kernel of a layer, [..., in, out], with zeros between its stored blocks.

    Shape, dtype and size cost nothing; all else that an array has, such as `kernel[...]`,
    `kernel.T` and `kernel + 1`, makes the dense kernel.
    Gradients of what is read are those of the stored blocks.  What is written is 0 outside of them.

    Args:
      layer: the block-sparse linear.
    """

    def __init__(self, layer: Any):
        self._layer = layer
        self.shape = (*layer.values.shape[:-3], layer.in_features, layer.out_features)
        self.dtype = layer.values.dtype
        self.ndim, self.size = len(self.shape), math.prod(self.shape)

    def __repr__(self):
        return f"DenseKernel(shape={self.shape}, dtype={self.dtype})"

    def __getattr__(self, name):
        if name.startswith("_"):  # Protocols that this class does not have.
            raise AttributeError(name)
        return getattr(self.__jax_array__(), name)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, index):
        return self.__jax_array__()[index]

    def __setitem__(self, index, value):
        self.set_value(self[...].at[index].set(value))

    @property
    def value(self) -> jax.Array:
        """The dense kernel."""
        return self.__jax_array__()

    def get_value(self) -> jax.Array:
        """Returns the dense kernel."""
        return self.__jax_array__()

    def set_value(self, value: Any) -> None:
        """Writes the stored blocks of a dense kernel, which is 0 elsewhere.

        Raises:
          UserError: the kernel has another shape, or weights that the layer does not store.
        """
        value = jnp.asarray(value)
        if value.shape != self.shape:
            raise UserError(f"The kernel has shape {value.shape}; legal: {self.shape}.")
        leaves = jax.tree.leaves((value, self._layer.stored_layout))
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if traced and (self._layer.evolving or self._layer.layout.density < 1):
            raise UserError(
                "Inside `jit` it is not known whether a kernel has weights that the layer does not "
                "store; legal: to write it outside, or to write `values`."
            )
        layouts = self._layer.layouts()
        blocks = cut_blocks(value, layouts if len(layouts) > 1 else layouts[0])
        if layouts[0].density < 1 and jnp.count_nonzero(value) != jnp.count_nonzero(blocks):
            raise UserError(
                f"The kernel has weights in blocks that a layer of density {layouts[0].density:g} "
                "does not store; legal: zeros there, or `layer.values[...] = "
                "sd.cut_blocks(kernel, layer.layout)`, which drops them."
            )
        self._layer.values.set_value(blocks)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.__jax_array__(), dtype)

    def __jax_array__(self) -> jax.Array:
        values, kernel = self._layer.values[...], to_dense
        for _ in values.shape[:-3]:
            kernel = jax.vmap(kernel, 0 if self._layer.evolving else (0, None))
        kernels = kernel(values, index_tables(self._layer.stored_layout))
        return kernels[..., : self.shape[-2], : self.shape[-1]]


def _on_dense(function, swapped):
    """Returns the method of an operator, on the dense kernel."""

    def method(self, other):
        operands = self.__jax_array__(), other
        return function(*operands[::-1] if swapped else operands)

    return method


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    for _prefix in ("", "r"):
        _method = _on_dense(getattr(operator, _name), bool(_prefix))
        setattr(DenseKernel, f"__{_prefix}{_name}__", _method)
