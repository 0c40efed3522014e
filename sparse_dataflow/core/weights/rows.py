"""Masked weights as rows: the form in which a CPU decodes them, with the stored weights alone."""

import dataclasses
from typing import Any

import jax
import numpy as np

from sparse_dataflow.core.ops.row_matmul.row_matmul_op import row_matmul
from sparse_dataflow.core.weights.kind import Weight
from sparse_dataflow.core.weights.masked import Masked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Rows(Weight):
    """Groups of one input and several neighbouring outputs, such as 1 x 16.

    Each `width` neighbouring outputs have rows of their own, equally many: the values of a group
    with fewer rows end with zeros.

    Attributes:
      values: float [groups, rows, width].
      inputs: uint16 or int32 [groups, rows], the input of each row.
      kernel: float [in, out], where the product of many tokens needs it; None for none.
    """

    values: Any
    inputs: Any
    kernel: Any = None

    def __rmatmul__(self, x):
        kernel = None if self.kernel is None else self.kernel.astype(x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        y = row_matmul(rows, self.values.astype(x.dtype), self.inputs, kernel)
        return y.reshape(*x.shape[:-1], -1)


def rows_of(weight: Masked, width: int, with_kernel: bool) -> Rows | None:
    """Returns a masked weight as rows; None if its mask is not of rows, or if they have no fewer
    bytes than the kernel.

    Args:
      weight: of one layer, with concrete arrays.
      width: outputs of a row; see `Masked.row_width`.
      with_kernel: whether the kernel stays beside them.
    """
    kernel, mask = np.asarray(weight.kernel), np.asarray(weight.mask)
    inputs, outputs = mask.shape
    grouped = mask.reshape(inputs, outputs // width, width)
    stored = grouped[..., 0].T
    if not (grouped == grouped[..., :1]).all():
        return None
    fan_in = stored.sum(1)
    rows = max(1, int(fan_in.max()))
    # Stored rows first, in order.  Groups with fewer rows read others, whose values are zero.
    index = np.argsort(~stored, axis=1, kind="stable")[:, :rows]
    table = index.astype(np.uint16 if inputs <= 2**16 else np.int32)
    if rows * (width * kernel.itemsize + table.itemsize) >= inputs * width * kernel.itemsize:
        return None
    groups = np.arange(len(stored))[:, None]
    values = kernel.reshape(inputs, -1, width)[index, groups]
    values[np.arange(rows) >= fan_in[:, None]] = 0
    masked = weight.as_dense().kernel if with_kernel else None
    return Rows(jax.numpy.asarray(values), jax.numpy.asarray(table), masked)
