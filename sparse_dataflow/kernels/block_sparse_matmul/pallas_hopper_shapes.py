"""From operands of the block-sparse matmul to lines of blocks and tile sizes on a Hopper GPU."""

import functools
from typing import Any, NamedTuple

import numpy as np

from sparse_dataflow.kernels import tuned
from sparse_dataflow.kernels.block_sparse_matmul import pallas_hopper_tables
from sparse_dataflow.kernels.block_sparse_matmul import tuning_hopper as sizes
from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper_tables import (
    LineTables,
    side_by_side,
)
from sparse_dataflow.kernels.block_sparse_matmul.tuning_hopper import TuningConfig
from sparse_dataflow.kernels.dispatch import Shaped
from sparse_dataflow.kernels.tuned import Case, Space
from sparse_dataflow.sparsity.layout import LayoutTables


class Lines(NamedTuple):
    """Tables of one weight, as each product's tiles want them side by side.

    Attributes:
      forward: by output column.
      input_gradient: by input row.
      weight_gradient: by output column.
    """

    forward: LineTables
    input_gradient: LineTables
    weight_gradient: LineTables


def lines_of(tables: LayoutTables, stored: int, tuning: TuningConfig) -> Lines:
    """The tables of each product; numpy ones of numpy tables."""
    sides = _sides(tables, stored)
    return Lines(
        sides["forward"](tuning.forward.lines),
        sides["input_gradient"](tuning.input_gradient.lines),
        sides["weight_gradient"](tuning.weight_gradient.lines),
    )


def _sides(tables, stored):
    """product -> function of the lines side by side."""
    by_column = tables.in_index, tables.in_slot, len(tables.out_index)
    by_row = tables.out_index, tables.out_slot, len(tables.in_index)

    def merged(index, slot, others):
        return lambda width: side_by_side(index, slot, width, others, stored)

    columns = merged(*by_column)
    return {
        "forward": columns,
        "input_gradient": merged(*by_row),
        "weight_gradient": columns,
    }


def spaces_of(
    x: Shaped,
    values: Shaped,
    tables: LayoutTables,
    *,
    residual: bool = False,
    derivative: bool = False,
    accumulate: bool = False,
) -> dict[Case, Space]:
    """What an autotuner may try for each product; arguments as in `default_tuning`."""
    stored, block = values.shape[:2]
    blocks = len(tables.out_index), len(tables.in_index)
    widths = blocks[0] * block, blocks[1] * block
    programs = sizes.multiprocessors()
    wide = x.dtype == np.float32
    parts, terms = (pallas_hopper_tables.PARTS, len(pallas_hopper_tables.TERMS)) if wide else (1, 1)
    chosen = {
        product: sizes.lines_of(_fans(merged, block), block)
        for product, merged in _sides(tables, stored).items()
    }

    def product_space(product, features, columns, elementwise):
        bytes_of = functools.partial(
            # Of float32 XLA does what follows the product.
            sizes.product_bytes,
            elementwise=elementwise and not wide,
            itemsize=x.dtype.itemsize,
        )
        start = sizes.product_tiles(
            len(x), parts * features, columns, block, chosen[product], programs, bytes_of
        )
        return sizes.product_space(start, bytes_of)

    tokens = terms * len(x)
    gradient = sizes.gradient_tiles(
        tokens, stored, block, chosen["weight_gradient"], accumulate, programs
    )
    made = {
        "forward": product_space("forward", widths[0], blocks[1], residual),
        "input_gradient": product_space("input_gradient", widths[1], blocks[0], derivative),
        "weight_gradient": sizes.gradient_space(gradient, tokens, block),
    }
    return tuned.by_case("pallas_hopper", x, values, widths, made)


def _fans(merged: Any, block: int) -> dict[int, int]:
    """Lines in one -> positions of the longest; of traced tables only the most lines, which cost a
    fifth where supports differ and save two fifths where they are alike."""
    widths = [width for width in (1, 2, 4) if width == 1 or width * block <= 128]
    fans = {width: merged(width).index for width in widths[-1:]}
    if all(isinstance(index, np.ndarray) for index in fans.values()):
        fans = {width: merged(width).index for width in widths}
    return {width: index.shape[1] for width, index in fans.items()}
