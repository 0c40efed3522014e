"""Tile sizes of the block-sparse matmul in XLA."""

import dataclasses

import jax

from sparse_dataflow.core.layouts.layout import LayoutTables
from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import ProductTuning

GATHERED_BYTES = {"cpu": 4 * 2**20, "gpu": 64 * 2**20, "tpu": 64 * 2**20}
"""Default bound of the gathered copy of a token tile, by platform.

On a CPU the copy should stay in its caches: 4 MiB was the fastest from 512x2048 to 4096x1024, 64
MiB took twice the time (AMD EPYC, 2 cores).  An accelerator needs tiles that fill it; not measured.
"""

LONGER_SUM = 4
"""Factor of the bound for dW on an accelerator, whose float32 sum is read and written per tile."""

TOKENS = 128
"""Tiles of many rows are a multiple of this, so that matrix units are full."""


@dataclasses.dataclass(frozen=True)
class TokenTiles:
    """Tile of one product.

    Attributes:
      tokens: rows of x gathered at once.
    """

    tokens: int


TuningConfig = ProductTuning[TokenTiles, TokenTiles]


def default_tuning(x: jax.Array, values: jax.Array, tables: LayoutTables) -> TuningConfig:
    """Return tiles of as many tokens as GATHERED_BYTES hold, for each product."""
    bound = GATHERED_BYTES[dispatch.platform()]
    longer = bound if dispatch.on(platforms.HOST) else LONGER_SUM * bound

    def tiles(index, most_bytes):
        row_bytes = index.size * values.shape[-1] * x.dtype.itemsize
        rows = x.shape[0]
        return TokenTiles(_even_tile(rows, max(1, min(rows, most_bytes // row_bytes))))

    forward, backward = tiles(tables.in_index, bound), tiles(tables.out_index, bound)
    return TuningConfig(forward, backward, tiles(tables.in_index, longer))


def _even_tile(rows, most):
    """Return a tile of `most` rows, or of at least half as many that divides the rows."""
    if most == rows:
        return rows
    whole = most // TOKENS * TOKENS
    divisors = [tile for tile in range(TOKENS, whole + 1, TOKENS) if rows % tile == 0]
    # A divisor leaves no shorter last tile, but may be much smaller.
    return divisors[-1] if divisors and 2 * divisors[-1] >= most else whole or most
