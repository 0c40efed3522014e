"""Tile sizes of the sparse MLP's TPU kernels, and whether fusing saves HBM traffic."""

import dataclasses

from sparse_dataflow.chips.tpu.matmul import tuning as products
from sparse_dataflow.chips.tpu.matmul.tuning import (
    GradientTiles,
    Operand,
    ProductTiles,
    StreamTiles,
    TuningConfig,
)


@dataclasses.dataclass(frozen=True)
class MlpTiles(products.RowTiles):
    """Tiles of one fused kernel, and of the weights' streams in order of use."""

    streams: tuple[StreamTiles, ...]


@dataclasses.dataclass(frozen=True)
class MlpTuning:
    """Tiles of the sparse MLP on one device.

    Attributes:
      forward: tiles of the fused forward pass; None for two products.
      backward: tiles of the fused backward pass; None for single products.
      product_in: tiles of W_in's three products.
      product_out: tiles of W_out's three products.
      gradient_in: tiles of dW_in from the pre-activation's gradient.
    """

    forward: MlpTiles | None
    backward: MlpTiles | None
    product_in: TuningConfig
    product_out: TuningConfig
    gradient_in: GradientTiles


@dataclasses.dataclass(frozen=True)
class MlpShape:
    """The shapes of the MLP's products, which determine its tile sizes.

    Attributes:
      by_hidden: hidden = x W_in: gathers x, one line per hidden tile.
      by_result: y = hidden W_out: gathers hidden, one line per result tile.
      by_hidden_row: dhidden = dy W_outᵀ.
      by_input_row: dx = dz W_inᵀ.
      bytes_in: HBM bytes of W_in's stored blocks, rows padded to a register's lanes.
      bytes_out: HBM bytes of W_out's stored blocks, rows padded too.
    """

    by_hidden: Operand
    by_result: Operand
    by_hidden_row: Operand
    by_input_row: Operand
    bytes_in: int
    bytes_out: int

    @property
    def tokens(self) -> int:
        """Rows of x."""
        return self.by_hidden.tokens

    @property
    def forward(self) -> tuple[Operand, ...]:
        """Products of the forward pass, in the order of `MlpTiles.streams`."""
        return self.by_hidden, self.by_result

    @property
    def backward(self) -> tuple[Operand, ...]:
        """Products of the backward pass, in the order of `MlpTiles.streams`."""
        return self.by_hidden, self.by_hidden_row, self.by_input_row

    @property
    def row_bytes(self) -> tuple[int, int, int]:
        """Bytes of a token's x, hidden activations and result."""
        itemsize = self.by_hidden.itemsize
        return (
            self.by_hidden.features * itemsize,
            self.by_result.features * itemsize,
            self.by_hidden_row.features * itemsize,
        )


def fused_tuning(unfused: MlpTuning, shape: MlpShape, vmem_bytes: int) -> MlpTuning:
    """Fuse the passes that fit VMEM and move fewer HBM bytes than single products.

    A token tile with all hidden activations is smaller than a single product's tile, so the weights
    are read more often.  If VMEM is small, that costs more than fusing saves.

    Args:
      unfused: tiles of the single products.
      vmem_bytes: VMEM budget.
    """
    first, second = unfused.product_in, unfused.product_out
    forward = _largest(shape, shape.forward, forward_bytes, vmem_bytes, first.cores)
    backward = _largest(shape, shape.backward, backward_bytes, vmem_bytes, first.cores)
    pair = pair_traffic(shape, first.forward, second.forward)
    if forward and forward_traffic(shape, forward) > pair:
        forward = None
    single = first.forward, second.input_gradient, first.input_gradient
    if backward and backward_traffic(shape, backward) > recomputing_traffic(shape, *single):
        backward = None
    return dataclasses.replace(unfused, forward=forward, backward=backward)


def forward_bytes(shape: MlpShape, tiles: MlpTiles) -> int:
    """Return the forward kernel's VMEM bytes: x, hidden, bias, results, streams and dots."""
    x, hidden, _ = shape.row_bytes
    rows = tiles.tokens * (tiles.buffers * x + hidden)
    results = 2 * tiles.tokens * tiles.lines * shape.by_hidden.tile * shape.by_hidden.itemsize
    bias = 2 * 4 * shape.by_result.features
    return rows + results + bias + _dots(tiles, shape.forward)


def backward_bytes(shape: MlpShape, tiles: MlpTiles) -> int:
    """Return the backward kernel's VMEM bytes: x, dy, dz, results, streams and dots."""
    x, hidden, dy = shape.row_bytes
    rows = tiles.tokens * (tiles.buffers * (x + dy) + hidden)
    tile, itemsize = shape.by_hidden.tile, shape.by_hidden.itemsize
    results = 2 * 3 * tiles.tokens * tiles.lines * tile * itemsize
    preactivation = tiles.tokens * tile * 4
    return rows + results + preactivation + _dots(tiles, shape.backward)


def _dots(tiles, operands):
    """Return the VMEM bytes of all streams, and of the dots of one product at a time."""
    each = list(zip(operands, tiles.streams, strict=True))
    return sum(products.stream_bytes(operand, stream) for operand, stream in each) + max(
        products.dot_bytes(operand, stream, tiles.tokens, tiles.rows) for operand, stream in each
    )


def _largest(shape, operands, need, vmem_bytes, cores):
    """Return the tiles of a pass with the largest token tile that fits VMEM; None if none fits."""

    def fitting(tokens, buffers):
        for streams in zip(*map(products.streams, operands)):
            for lines in (4, 2, 1):
                tiles = MlpTiles(tokens, buffers, min(tokens, 512), lines, streams)
                if need(shape, tiles) <= vmem_bytes:
                    return tiles
        return None

    return products.largest(shape.tokens, shape.by_hidden.itemsize, cores, fitting)


def forward_traffic(shape: MlpShape, tiles: MlpTiles) -> int:
    """Return the fused forward pass's HBM bytes: x and y once, weights once per token tile."""
    x, _, y = shape.row_bytes
    return shape.tokens * (x + y) + _times(shape, tiles) * (shape.bytes_in + shape.bytes_out)


def pair_traffic(shape: MlpShape, first: ProductTiles, second: ProductTiles) -> int:
    """Return two products' HBM bytes: hidden written and read, the pre-activation written."""
    x, hidden, y = shape.row_bytes
    weights = _times(shape, first) * shape.bytes_in + _times(shape, second) * shape.bytes_out
    return shape.tokens * (x + 3 * hidden + y) + weights


def backward_traffic(shape: MlpShape, tiles: MlpTiles) -> int:
    """Return the fused backward pass's HBM bytes, without dW's kernels, which both forms run."""
    x, hidden, y = shape.row_bytes
    weights = _times(shape, tiles) * (2 * shape.bytes_in + shape.bytes_out)
    return shape.tokens * (2 * x + 2 * hidden + y) + weights


def recomputing_traffic(
    shape: MlpShape, recompute: ProductTiles, dhidden: ProductTiles, dx: ProductTiles
) -> int:
    """Return the HBM bytes of `backward_traffic`'s work as single products.

    These recompute the pre-activation and hidden, then compute dhidden and dx.  Unlike the fused
    pass, they write and read the pre-activation and dhidden.
    """
    x, hidden, y = shape.row_bytes
    weights = (_times(shape, recompute) + _times(shape, dx)) * shape.bytes_in
    weights += _times(shape, dhidden) * shape.bytes_out
    return shape.tokens * (2 * x + 7 * hidden + y) + weights


def _times(shape, tiles):
    """Return how often the weights are read."""
    return -(-shape.tokens // tiles.tokens)
