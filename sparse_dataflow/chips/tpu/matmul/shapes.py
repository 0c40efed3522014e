"""Tile tables and tile sizes of the block-sparse matmul on a TPU, from its operands."""

import jax
import jax.numpy as jnp

from sparse_dataflow.chips.tpu.matmul import tuning as sizes
from sparse_dataflow.chips.tpu.matmul.tables import TileTables, tile_tables
from sparse_dataflow.chips.tpu.matmul.tuning import Operand, TuningConfig
from sparse_dataflow.core.layouts.layout import LayoutTables
from sparse_dataflow.core.ops.dispatch import Shaped
from sparse_dataflow.files.errors import UserError

WeightTables = tuple[TileTables, TileTables]
"""Tile tables of one weight, by output column and by input row."""


def build_tile_tables(tables: LayoutTables, block: int) -> WeightTables:
    """Return the tile tables of layout tables, for blocks of side `block`."""
    ratio = max(1, sizes.LANES // block)
    in_blocks, out_blocks = len(tables.out_index), len(tables.in_index)
    by_column = tile_tables(tables.in_index, tables.in_slot, in_blocks, ratio)
    return by_column, tile_tables(tables.out_index, tables.out_slot, out_blocks, ratio)


def product_operand(x: Shaped, values: Shaped, lines: WeightTables, transposed: bool) -> Operand:
    """Return the shape of y = xW, or of dx = dy Wᵀ, which determines its tile sizes.

    Args:
      x: [tokens, features]; only tokens and dtype are read.
      values: [nnz, block, block]; only shape is read.
      lines: tile tables of the weight.
      transposed: whether the product is dx.
    """
    line_tables, gathered_tables = lines[::-1] if transposed else lines
    block = values.shape[-1]
    return Operand(
        tokens=len(x),
        features=len(gathered_tables.count) * max(block, sizes.LANES),
        lines=len(line_tables.count),
        entries=line_tables.index.shape[1],
        block=block,
        itemsize=x.dtype.itemsize,
    )


def choose_tuning(
    x: Shaped, values: Shaped, lines: WeightTables, activated: bool
) -> TuningConfig | None:
    """Return the tile sizes of the three products on the target TPU; None if none fit VMEM.

    Args:
      x: [tokens, in_features].
      values: [nnz, block, block].
      lines: tile tables of the weight.
      activated: whether an activation follows y.
    """
    info = sizes.device()
    # Without the fused derivative, whose arrays take VMEM as well, more shapes fit.
    for fuse in (True, False):
        if tiles := _tiles(x, values, lines, activated and fuse):
            break
    else:
        return None
    return TuningConfig(
        **tiles, vmem_bytes=info.vmem_capacity_bytes, cores=info.num_cores, fuse_derivative=fuse
    )


def require_tuning(x: Shaped, values: Shaped, lines: WeightTables, activated: bool) -> TuningConfig:
    """Return `choose_tuning`'s tile sizes.

    Raises:
      UserError: if no tile fits VMEM.
    """
    tuning = choose_tuning(x, values, lines, activated)
    if tuning is None:
        raise UserError("No tile of these shapes fits VMEM; legal: narrower or sharded weights.")
    return tuning


def _tiles(x, values, lines, activated):
    """Returns the tiles of each product by name; None if a product has none that fit VMEM."""
    cores, budget = sizes.device().num_cores, sizes.budget()
    forward, backward = (
        product_operand(x, values, lines, transposed) for transposed in (False, True)
    )
    gradient = backward if gathers_dy(lines, activated) else forward
    tiles = {
        "forward": sizes.product_tiles(forward, 3, budget, cores),
        "input_gradient": sizes.product_tiles(backward, 1, budget, cores),
        "weight_gradient": sizes.gradient_tiles(gradient, activated, budget, cores),
    }
    return None if None in tiles.values() else tiles


def gathers_dy(lines: WeightTables, activated: bool) -> bool:
    """Return whether dW gathers from dy: if it is narrower, and no activation reads it."""
    by_column, by_row = lines
    return not activated and len(by_column.count) < len(by_row.count)


def padded_widths(lines: WeightTables, values: Shaped) -> tuple[int, int]:
    """Return the input and the output features of a weight, padded to whole tiles."""
    by_column, by_row = lines
    return len(by_row.count) * tile_side(values), len(by_column.count) * tile_side(values)


def tile_side(values: Shaped) -> int:
    """Return the side of a weight tile of values [nnz, block, block]."""
    return max(values.shape[-1], sizes.LANES)


def pad_to(array: jax.Array, columns: int, rows: int | None = None) -> jax.Array:
    """Pad a matrix with zeros to `columns` columns and a multiple of `rows` rows.

    `rows` defaults to the rows of the smallest VMEM tile.
    """
    rows = rows or sizes.sublanes(array.dtype.itemsize)
    extra = (-len(array) % rows, columns - array.shape[1])
    return array if extra == (0, 0) else jnp.pad(array, [(0, e) for e in extra])
