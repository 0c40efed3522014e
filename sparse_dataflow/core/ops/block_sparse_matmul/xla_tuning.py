"""Tile sizes of the block-sparse matmul in XLA."""

import dataclasses

import jax

from sparse_dataflow.core.layouts.layout import LayoutTables
from sparse_dataflow.core.ops import dispatch, tuned
from sparse_dataflow.core.ops.tuned import Case, ProductTuning, SearchSpace

GATHERED_BYTES = {"cpu": 4 * 2**20, "gpu": 64 * 2**20, "tpu": 64 * 2**20}
"""Default bound of the gathered copy of a token tile, by platform.

On a CPU the copy should stay in its caches: 4 MiB was the fastest from 512x2048 to 4096x1024, 64
MiB took twice the time (AMD EPYC, 2 cores).  An accelerator needs tiles that fill it; not measured.
"""

LONGER_SUM = 4
"""Factor of the bound for dW on an accelerator, whose float32 sum is read and written per tile."""

TOKENS = 128
"""Tiles of many rows are a multiple of this, so that matrix units are full."""

MOST_GATHERED_BYTES = 2**30
"""Bound of the gathered copy for measured tiles."""


@dataclasses.dataclass(frozen=True)
class TokenTiles:
    """Tile of one product.

    Attributes:
      tokens: rows of x gathered at once.
    """

    tokens: int


TuningConfig = ProductTuning[TokenTiles, TokenTiles]


def default_tuning(x: jax.Array, values: jax.Array, tables: LayoutTables) -> TuningConfig:
    """Return measured tile sizes for these shapes, else as many tokens as GATHERED_BYTES hold."""
    return TuningConfig(**tuned.choose_tiles(spaces(x, values, tables)))


def spaces(x: jax.Array, values: jax.Array, tables: LayoutTables) -> dict[Case, SearchSpace]:
    """Return the search space of each product; arguments as in `default_tuning`."""
    block = values.shape[-1]
    spaces_by_product = {}
    for product in tuned.PRODUCTS:
        bound = GATHERED_BYTES[dispatch.platform()]
        if product == "weight_gradient" and dispatch.platform() != "cpu":
            bound *= LONGER_SUM
        index = tables.out_index if product == "input_gradient" else tables.in_index
        row_bytes = index.size * block * x.dtype.itemsize
        spaces_by_product[product] = _space(x.shape[0], row_bytes, bound)
    widths = len(tables.out_index) * block, len(tables.in_index) * block
    return tuned.keyed_by_case("xla", x, values, widths, spaces_by_product)


def _space(rows, row_bytes, bound):
    """Return the token tiles of x [rows, ...] that gather `row_bytes` for each row.

    The search starts at the largest that gathers `bound` bytes.
    """

    def legal(tiles):
        bounded = tiles.tokens == 1 or tiles.tokens * row_bytes <= MOST_GATHERED_BYTES
        return bounded and 1 <= tiles.tokens <= max(1, rows)

    start = TokenTiles(_even_tile(rows, max(1, min(rows, bound // row_bytes))))
    return SearchSpace(start, {"tokens": (64, 128, 256, 512, 1024, 2048, rows)}, legal)


def _even_tile(rows, most):
    """Return a tile of `most` rows, or of at least half as many that divides the rows."""
    if most == rows:
        return rows
    whole = most // TOKENS * TOKENS
    divisors = [tile for tile in range(TOKENS, whole + 1, TOKENS) if rows % tile == 0]
    return divisors[-1] if divisors and 2 * divisors[-1] >= most else whole or most
