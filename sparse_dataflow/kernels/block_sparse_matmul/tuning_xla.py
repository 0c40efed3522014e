"""Tile sizes of the block-sparse product through XLA."""

import dataclasses

import jax

from sparse_dataflow.kernels import tuned
from sparse_dataflow.kernels.tuned import Case, Space
from sparse_dataflow.sparsity.layout import LayoutTables

GATHERED_BYTES = 64 * 2**20
"""Bound of the gathered copy of a tile of tokens.  Untiled is fastest while it fits."""

MOST_GATHERED_BYTES = 2**30
"""Bound of the gathered copy that measured tiles may ask for."""


@dataclasses.dataclass(frozen=True)
class TokenTiles:
    """Tiles of one product.

    Attributes:
      tokens: rows of x that are gathered at once.
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
    """Measured tile sizes of these shapes on the device compiled for, else as many tokens as
    GATHERED_BYTES hold.

    Args:
      x: [tokens, in_features]; only shapes and dtypes are read.
      values: [nnz, block, block].
      tables: layout tables, concrete or traced.
    """
    return TuningConfig(**tuned.fastest("block_sparse_matmul", spaces(x, values, tables)))


def spaces(x: jax.Array, values: jax.Array, tables: LayoutTables) -> dict[Case, Space]:
    """What an autotuner may try of each product; arguments as in `default_tuning`."""
    block = values.shape[-1]
    made = {}
    for product in tuned.PRODUCTS:
        index = tables.out_index if product == "input_gradient" else tables.in_index
        row_bytes = index.size * block * x.dtype.itemsize
        made[product] = _space(len(x), row_bytes)
    widths = len(tables.out_index) * block, len(tables.in_index) * block
    return tuned.by_case("xla", x, values, widths, made)


def _space(rows, row_bytes):
    """Tiles of so many rows whose gathered copies take so many bytes each."""

    def legal(tiles):
        bounded = tiles.tokens == 1 or tiles.tokens * row_bytes <= MOST_GATHERED_BYTES
        return bounded and 1 <= tiles.tokens <= max(1, rows)

    start = TokenTiles(max(1, min(rows, GATHERED_BYTES // row_bytes)))
    return Space(start, {"tokens": (64, 128, 256, 512, 1024, 2048, rows)}, legal)
