"""Weights as rows, the form in which a CPU decodes: of blocks and masks the stored ones alone.

They are in large pages, from which a processor reads faster.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.ops.row_matmul.row_matmul_op import row_matmul
from sparse_dataflow.core.weights.block_sparse import BlockSparse
from sparse_dataflow.core.weights.dense import Quantised
from sparse_dataflow.core.weights.kind import METADATA, Weight
from sparse_dataflow.core.weights.masked import Masked
from sparse_dataflow.hardware import large_pages

WIDTH = 16
"""Outputs of a row of a whole matrix."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Rows(Weight):
    """Groups of one input and several neighbouring outputs, such as 1 x 16.

    Each `width` neighbouring outputs have rows of their own, equally many: the values of a group
    with fewer rows end with zeros.

    Attributes:
      values: float or int8 [groups, rows, width].
      outputs: of the matrix; those of the last group may be padding.
      inputs: uint16 [groups, rows], the input of each row; None if each group has all inputs.
      scale: float32 [groups * width], of int8 values; None for none.
    """

    values: jax.Array
    outputs: int = dataclasses.field(metadata=METADATA)
    inputs: jax.Array | None = None
    scale: jax.Array | None = None

    def __rmatmul__(self, x):
        y = row_matmul(x.reshape(-1, x.shape[-1]), self.values, self.inputs, self.scale)
        return y[:, : self.outputs].reshape(*x.shape[:-1], self.outputs)

    def columns(self, outputs: jax.Array) -> jax.Array:
        """Returns the weights of some outputs, [len(outputs), in], of a matrix with all rows."""
        width = self.values.shape[2]
        columns = self.values[outputs // width, :, outputs % width]
        return columns if self.scale is None else columns * self.scale[outputs, None]

    def in_int8(self) -> "Rows":
        """Returns the rows with values in int8 and a scale for each output."""
        arrays = Quantised.arrays_of_dense({"kernel": self.values})
        scale = arrays["kernel_scale"].reshape(-1)
        values = large_pages.placed(arrays["kernel"])
        return dataclasses.replace(self, values=values, scale=scale)


def all_rows(kernel: jax.Array, scale: jax.Array | None = None, in_int8: bool = False) -> Rows:
    """Returns a whole matrix [in, out] as rows.

    Args:
      kernel: concrete.
      scale: float32 [out], of a matrix of int8.
      in_int8: whether the values become int8.
    """
    matrix = np.asarray(kernel)
    inputs, outputs = matrix.shape
    whole, rest = divmod(outputs, WIDTH)
    values = large_pages.empty((whole + (rest > 0), inputs, WIDTH), matrix.dtype)
    values[:whole] = matrix[:, : outputs - rest].reshape(inputs, whole, WIDTH).swapaxes(0, 1)
    values[whole:] = np.pad(matrix[:, outputs - rest :], [(0, 0), (0, WIDTH - rest)])
    scale = None if scale is None else jnp.pad(scale, [(0, -outputs % WIDTH)])
    rows = Rows(jax.device_put(values), outputs, scale=scale)
    return rows.in_int8() if in_int8 else rows


def rows_of(weight: Masked, width: int) -> Rows | None:
    """Returns a masked weight as rows; None if its mask is not of rows, or if they have no fewer
    bytes than the kernel.

    Args:
      weight: of one layer, with concrete arrays.
      width: outputs of a row; see `Masked.row_width`.
    """
    kernel, mask = np.asarray(weight.kernel), np.asarray(weight.mask)
    inputs, outputs = mask.shape
    grouped = mask.reshape(inputs, outputs // width, width)
    stored = grouped[..., 0].T
    if inputs > 2**16 or not (grouped == grouped[..., :1]).all():
        return None
    fan_in = stored.sum(1)
    rows = max(1, int(fan_in.max()))
    # Stored rows first, in order.  Groups with fewer rows read others, whose values are zero.
    table = np.argsort(~stored, axis=1, kind="stable")[:, :rows].astype(np.uint16)
    if rows * (width * kernel.itemsize + table.itemsize) >= inputs * width * kernel.itemsize:
        return None
    groups = np.arange(len(stored))[:, None]
    # [groups, rows, width].
    values = kernel.reshape(inputs, -1, width)[table, groups]
    values[np.arange(rows) >= fan_in[:, None]] = 0
    return Rows(large_pages.placed(values), outputs, large_pages.placed(table))


def rows_of_blocks(weight: BlockSparse, width: int) -> Rows | None:
    """Returns a block-sparse weight as rows; None if it has more inputs than an index can name, or
    if rows that are padding would be a third of all.

    Args:
      weight: of one layer, with concrete arrays.
      width: outputs of a row; see `BlockSparse.row_width`.
    """
    blocks, layout = np.asarray(weight.values), weight.concrete_layout()
    size, columns, fan_in = layout.block, layout.out_blocks, layout.fan_in
    most = max(1, int(fan_in.max()))
    if layout.in_features > 2**16 or columns * most > 1.5 * layout.nnz:
        return None
    # Columns of fewer blocks read the first inputs too, times zeros.
    # Blocks are sorted by column: the place of each in its column is its number less those before.
    place = np.arange(layout.nnz) - np.repeat(np.cumsum(fan_in) - fan_in, fan_in)
    first = np.zeros((columns, most), np.uint16)
    first[layout.cols, place] = np.asarray(layout.rows) * size
    # [columns, blocks, features of a block]: the input of each row.
    table = (first[..., None] + np.arange(size, dtype=np.uint16)).reshape(columns, -1)
    if (fan_in == most).all():
        values = blocks
    else:
        values = np.zeros((columns, most, size, size), blocks.dtype)
        values[layout.cols, place] = blocks
    # [columns, inputs, groups, width] -> [columns, groups, inputs, width]: a block of columns is
    # several groups, which read the same inputs.
    values = values.reshape(columns, most * size, size // width, width).swapaxes(1, 2)
    return Rows(
        large_pages.placed(values.reshape(-1, most * size, width)),
        layout.out_features,
        large_pages.placed(table.repeat(size // width, axis=0)),
    )
