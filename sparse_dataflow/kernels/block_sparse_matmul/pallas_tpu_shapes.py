"""From operands of the block-sparse matmul to lines of weight tiles and tile sizes on a TPU."""

import jax
import jax.numpy as jnp

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels import tuned
from sparse_dataflow.kernels.block_sparse_matmul import tuning as sizes
from sparse_dataflow.kernels.block_sparse_matmul.pallas_tpu_tables import TileTables, tile_tables
from sparse_dataflow.kernels.block_sparse_matmul.tuning import Operand, TuningConfig
from sparse_dataflow.kernels.dispatch import Shaped
from sparse_dataflow.kernels.tuned import Case, Space
from sparse_dataflow.sparsity.layout import LayoutTables

Lines = tuple[TileTables, TileTables]
"""Tile tables of one weight, by output column and by input row."""


def lines_of(tables: LayoutTables, block: int) -> Lines:
    """The tile tables of a layout of this block."""
    ratio = max(1, sizes.LANES // block)
    in_blocks, out_blocks = len(tables.out_index), len(tables.in_index)
    by_column = tile_tables(tables.in_index, tables.in_slot, in_blocks, ratio)
    return by_column, tile_tables(tables.out_index, tables.out_slot, out_blocks, ratio)


def operand_of(x: Shaped, values: Shaped, lines: Lines, transposed: bool) -> Operand:
    """What a product's tiles depend on: of y = xW, or of dx = dy Wᵀ.

    Args:
      x: [tokens, features]; only tokens and dtype are read.
      values: [nnz, block, block].
      lines: the weight's.
      transposed: whether it is dx.
    """
    own, other = lines[::-1] if transposed else lines
    block = values.shape[-1]
    return Operand(
        tokens=len(x),
        features=len(other.count) * max(block, sizes.LANES),
        lines=len(own.count),
        entries=own.index.shape[1],
        block=block,
        itemsize=x.dtype.itemsize,
    )


def tuning_of(x: Shaped, values: Shaped, lines: Lines, activated: bool) -> TuningConfig | None:
    """Tile sizes of the three products on the TPU compiled for; None where its VMEM holds none.

    Args:
      x: [tokens, in_features].
      values: [nnz, block, block].
      lines: the weight's.
      activated: whether a GELU follows y.
    """
    info = sizes.device()
    for fuse in (True, False):
        if made := spaces_of(x, values, lines, activated and fuse):
            break
    else:
        return None
    tiles = tuned.fastest("block_sparse_matmul", made)
    if activated:
        # What is measured is the gradient without an activation.
        starts = {case.product: space.start for case, space in made.items()}
        tiles["weight_gradient"] = starts["weight_gradient"]
    return TuningConfig(
        **tiles, vmem_bytes=info.vmem_capacity_bytes, cores=info.num_cores, fuse_derivative=fuse
    )


def needed_tuning(x: Shaped, values: Shaped, lines: Lines, activated: bool) -> TuningConfig:
    """`tuning_of`, for who cannot go on without.

    Raises:
      UserError: VMEM holds no tiles.
    """
    found = tuning_of(x, values, lines, activated)
    if found is None:
        raise UserError("No tile of these shapes fits VMEM; legal: narrower or sharded weights.")
    return found


def spaces_of(x: Shaped, values: Shaped, lines: Lines, activated: bool) -> dict[Case, Space] | None:
    """What an autotuner may try for each product; None where VMEM holds nothing of one.

    Arguments are `tuning_of`'s.
    """
    cores, budget = sizes.device().num_cores, sizes.budget()
    forward, backward = (operand_of(x, values, lines, transposed) for transposed in (False, True))
    gradient = backward if gathers_from_dy(lines, activated) else forward
    made = {
        "forward": sizes.product_space(forward, 3, budget, cores),
        "input_gradient": sizes.product_space(backward, 1, budget, cores),
        "weight_gradient": sizes.gradient_space(gradient, activated, budget, cores),
    }
    fitting = {product: space for product, space in made.items() if space is not None}
    if len(fitting) < len(made):
        return None
    widths = len(lines[1].count) * tile_of(values), len(lines[0].count) * tile_of(values)
    return tuned.by_case("pallas_tpu", x, values, widths, fitting)


def gathers_from_dy(lines: Lines, activated: bool) -> bool:
    """Whether dW gathers from dy: where it is narrower, unless the one pass over dy is needed."""
    by_column, by_row = lines
    return not activated and len(by_column.count) < len(by_row.count)


def tile_of(values: Shaped) -> int:
    """Side of a weight tile of values [nnz, block, block]."""
    return max(values.shape[-1], sizes.LANES)


def pad_to(array: jax.Array, columns: int, rows: int | None = None) -> jax.Array:
    """A matrix padded with zeros up to `columns`, and rows to a multiple of `rows`.

    Itself where nothing is missing.  None for rows means a register's.
    """
    rows = rows or sizes.sublanes(array.dtype.itemsize)
    extra = (-len(array) % rows, columns - array.shape[1])
    return array if extra == (0, 0) else jnp.pad(array, [(0, e) for e in extra])
