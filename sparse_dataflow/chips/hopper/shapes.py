"""Line tables and tile sizes of the block-sparse matmul on a Hopper GPU, from its operands."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sparse_dataflow.chips.hopper import tuning as sizes
from sparse_dataflow.chips.hopper.tables import COMPONENTS, TERMS, LineTables, merge_lines
from sparse_dataflow.chips.hopper.tuning import TuningConfig
from sparse_dataflow.core.layouts.layout import LayoutTables
from sparse_dataflow.core.ops.dispatch import Shaped


class WeightTables(NamedTuple):
    """Tables of one weight, merged for each product's tiles.

    Attributes:
      forward: lines are output columns.
      input_gradient: lines are input rows.
      weight_gradient: lines are output columns.
    """

    forward: LineTables
    input_gradient: LineTables
    weight_gradient: LineTables


def build_line_tables(tables: LayoutTables, stored: int, tuning: TuningConfig) -> WeightTables:
    """Return the tables of each product; numpy tables stay numpy."""
    mergers = _mergers(tables, stored)
    return WeightTables(
        mergers["forward"](tuning.forward.lines),
        mergers["input_gradient"](tuning.input_gradient.lines),
        mergers["weight_gradient"](tuning.weight_gradient.lines),
    )


def _mergers(tables, stored):
    """Return product -> (number of lines to merge -> tables)."""

    def merger(index, slot, others):
        return lambda width: merge_lines(index, slot, width, others, stored)

    columns = merger(tables.in_index, tables.in_slot, len(tables.out_index))
    rows = merger(tables.out_index, tables.out_slot, len(tables.in_index))
    return {"forward": columns, "input_gradient": rows, "weight_gradient": columns}


def default_tuning(
    x: Shaped, values: Shaped, tables: LayoutTables, *, derivative: bool = False
) -> TuningConfig:
    """Return the tile sizes for these shapes on the target GPU.

    `derivative` says whether dx is multiplied by an activation's derivative.
    """
    stored, block = values.shape[:2]
    blocks = len(tables.out_index), len(tables.in_index)
    widths = blocks[0] * block, blocks[1] * block
    programs = sizes.multiprocessors()
    wide = x.dtype == np.float32
    components, terms = (COMPONENTS, len(TERMS)) if wide else (1, 1)
    merged_lines = {
        product: sizes.choose_merged_lines(_fans(merger, block), block)
        for product, merger in _mergers(tables, stored).items()
    }

    def product_tiles(product, features, columns, elementwise):
        bytes_of = functools.partial(
            # XLA computes the epilogue of float32 products.
            sizes.product_bytes,
            elementwise=elementwise and not wide,
            itemsize=x.dtype.itemsize,
        )
        return sizes.product_tiles(
            len(x), components * features, columns, block, merged_lines[product], programs, bytes_of
        )

    return TuningConfig(
        product_tiles("forward", widths[0], blocks[1], False),
        product_tiles("input_gradient", widths[1], blocks[0], derivative),
        sizes.gradient_tiles(
            terms * len(x), stored, block, merged_lines["weight_gradient"], programs
        ),
        multiprocessors=programs,
    )


def _fans(merger: Callable[[int], LineTables], block: int) -> dict[int, int]:
    """Return number of merged lines -> positions of the longest line.

    The supports of traced tables are unknown, so these always merge as many lines as fit a tile.
    """
    # Merged lines have at most the 128 columns of a tile.
    widths = [width for width in (1, 2, 4) if width == 1 or width * block <= 128]
    widest = merger(widths[-1]).index
    if not isinstance(widest, np.ndarray):
        return {widths[-1]: widest.shape[1]}
    return {width: merger(width).index.shape[1] for width in widths}
