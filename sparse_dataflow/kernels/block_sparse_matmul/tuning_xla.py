"""Tile sizes of the block-sparse matmul in XLA."""

import dataclasses

import jax

from sparse_dataflow.kernels import tuned
from sparse_dataflow.kernels.tuned import Case, SearchSpace
from sparse_dataflow.sparsity.layout import LayoutTables

GATHERED_BYTES = 64 * 2**20
"""Default bound of the gathered copy of a token tile; larger tiles are faster up to this size."""

MOST_GATHERED_BYTES = 2**30
"""Bound of the gathered copy for measured tiles."""


@dataclasses.dataclass(frozen=True)
class TokenTiles:
    """Tile of one product.

    Attributes:
      tokens: rows of x gathered at once.
    """

    tokens: int


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Tiles of the three products on one device.

    Attributes:
      forward: tiles of y = xW.
      input_gradient: tiles of dx = dy Wᵀ.
      weight_gradient: tiles of dW.
    """

    forward: TokenTiles
    input_gradient: TokenTiles
    weight_gradient: TokenTiles


def default_tuning(x: jax.Array, values: jax.Array, tables: LayoutTables) -> TuningConfig:
    """Return measured tile sizes for these shapes, else as many tokens as GATHERED_BYTES hold.

    Args:
      x: [tokens, in_features]; only shapes and dtypes are read.
      values: [nnz, block, block].
      tables: layout tables, concrete or traced.
    """
    return TuningConfig(**tuned.choose_tiles("block_sparse_matmul", spaces(x, values, tables)))


def spaces(x: jax.Array, values: jax.Array, tables: LayoutTables) -> dict[Case, SearchSpace]:
    """Return the search space of each product; arguments as in `default_tuning`."""
    block = values.shape[-1]
    spaces_by_product = {}
    for product in tuned.PRODUCTS:
        index = tables.out_index if product == "input_gradient" else tables.in_index
        row_bytes = index.size * block * x.dtype.itemsize
        spaces_by_product[product] = _space(len(x), row_bytes)
    widths = len(tables.out_index) * block, len(tables.in_index) * block
    return tuned.keyed_by_case("xla", x, values, widths, spaces_by_product)


def _space(rows, row_bytes):
    """Return the token tiles of x [rows, ...] that gather `row_bytes` for each row."""

    def legal(tiles):
        bounded = tiles.tokens == 1 or tiles.tokens * row_bytes <= MOST_GATHERED_BYTES
        return bounded and 1 <= tiles.tokens <= max(1, rows)

    start = TokenTiles(max(1, min(rows, GATHERED_BYTES // row_bytes)))
    return SearchSpace(start, {"tokens": (64, 128, 256, 512, 1024, 2048, rows)}, legal)
