"""Arrays of block-sparse layers that are made where they are read, such as the dense `kernel`."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sparse_dataflow.core.layouts.layout import index_tables
from sparse_dataflow.core.ops.block_sparse_matmul.dense_matmul import to_dense
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.block_arrays import cut_blocks


class DerivedArray:
    """An array that is computed where it is read, and written to what it is computed from.

    Shape, dtype and size cost nothing; all else that an array has, such as `kernel[...]`,
    `kernel.T` and `kernel + 1`, computes the array.  Gradients of what is read are those of the
    parameters that it is computed from.

    Args:
      shape: its shape.
      dtype: its dtype.
      read: () -> the array.
      write: writes an array of this shape.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: DTypeLike,
        read: Callable[[], jax.Array],
        write: Callable[[jax.Array], None],
    ):
        self.shape, self.dtype = tuple(shape), dtype
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self._read, self._write = read, write

    def __repr__(self):
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"

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
        """The array."""
        return self.__jax_array__()

    def get_value(self) -> jax.Array:
        """Returns the array."""
        return self.__jax_array__()

    def set_value(self, value: object) -> None:
        """Writes the array.

        Raises:
          UserError: it has another shape, or what it is computed from cannot hold it.
        """
        value = jnp.asarray(value)
        if value.shape != self.shape:
            raise UserError(f"The array has shape {value.shape}; legal: {self.shape}.")
        self._write(value)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.__jax_array__(), dtype)

    def __jax_array__(self) -> jax.Array:
        return self._read()

    def seen_through(
        self,
        shape: Sequence[int],
        read: Callable[[jax.Array], jax.Array],
        write: Callable[[jax.Array], jax.Array],
    ) -> "DerivedArray":
        """Returns the array in another shape.

        Args:
          shape: that shape.
          read: array -> array of that shape.
          write: its inverse.
        """
        return DerivedArray(
            shape,
            self.dtype,
            lambda: read(self.get_value()),
            lambda value: self.set_value(write(value)),
        )


def _on_array(function, swapped):
    """Returns the method of an operator, on the array."""

    def method(self, other):
        operands = self.__jax_array__(), other
        return function(*operands[::-1] if swapped else operands)

    return method


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    for _prefix in ("", "r"):
        _method = _on_array(getattr(operator, _name), bool(_prefix))
        setattr(DerivedArray, f"__{_prefix}{_name}__", _method)


class DenseKernel(DerivedArray):
    """The kernel of a layer, [..., in, out], with zeros between its stored blocks.

    What is written is 0 outside of them.

    Args:
      layer: the block-sparse linear.
    """

    def __init__(self, layer: Any):
        shape = *layer.values.shape[:-3], layer.in_features, layer.out_features
        super().__init__(shape, layer.values.dtype, self._join, self._cut)
        self._layer = layer

    def _join(self):
        layer = self._layer
        layer.check_layout()
        values, kernel = layer.values[...], to_dense
        # Layers of a stack share a static layout; an evolving one has tables for each.
        for _ in values.shape[:-3]:
            kernel = jax.vmap(kernel, 0 if layer.evolving else (0, None))
        kernels = kernel(values, index_tables(layer.stored_layout))
        return layer.unless_foreign(kernels[..., : self.shape[-2], : self.shape[-1]])

    def _cut(self, value):
        leaves = jax.tree.leaves((value, self._layer.stored_layout))
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if traced and (self._layer.evolving or self._layer.layout.density < 1):
            raise UserError(
                "Inside `jit` it is not known whether a kernel has weights that the layer does not "
                "store; legal: to write it outside, or to write `values`."
            )
        layouts = self._layer.layouts()
        blocks = cut_blocks(value, layouts if len(layouts) > 1 else layouts[0])
        # The blocks are parts of the kernel, so equal counts mean that no weight is lost.
        if layouts[0].density < 1 and jnp.count_nonzero(value) != jnp.count_nonzero(blocks):
            raise UserError(
                f"The kernel has weights in blocks that a layer of density {layouts[0].density:g} "
                "does not store; legal: zeros there, or `layer.values[...] = "
                "sd.cut_blocks(kernel, layer.layout)`, which drops them."
            )
        self._layer.values.set_value(blocks)
