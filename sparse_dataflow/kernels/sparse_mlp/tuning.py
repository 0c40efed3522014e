"""Tile sizes of the sparse MLP's TPU kernels, and whether fusing pays on a chip."""

import dataclasses

from sparse_dataflow.kernels.block_sparse_matmul import tuning as products
from sparse_dataflow.kernels.block_sparse_matmul.tuning import (
    GradientTiles,
    Operand,
    ProductTiles,
    StreamTiles,
    TuningConfig,
)
from sparse_dataflow.kernels.tuned import Space


@dataclasses.dataclass(frozen=True)
class MlpTiles:
    """Tiles of one fused kernel.

    Attributes:
      tokens: tokens whose hidden activations lie in VMEM at once; each weight is read once for so
        many tokens.
      buffers: 2 where the next token tile is copied meanwhile, else 1.
      rows: tokens of one dot.
      lines: tile columns of a result in one grid step.
      streams: the weights' streams in the order of their use.
    """

    tokens: int
    buffers: int
    rows: int
    lines: int
    streams: tuple[StreamTiles, ...]


@dataclasses.dataclass(frozen=True)
class MlpTuning:
    """Tiles of the sparse MLP on one device.

    Attributes:
      forward: tiles of the fused forward pass; None for two products.
      backward: tiles of the fused backward pass; None for single products.
      product_in: tiles of W_in's three products.
      product_out: tiles of W_out's.
      gradient_in: tiles of dW_in where the pre-activation's gradient is known.
    """

    forward: MlpTiles | None
    backward: MlpTiles | None
    product_in: TuningConfig
    product_out: TuningConfig
    gradient_in: GradientTiles


@dataclasses.dataclass(frozen=True)
class MlpShape:
    """What the tile sizes depend on.

    Attributes:
      by_hidden: W_in as y = xW reads it: x kept, a line for each hidden tile.
      by_result: W_out as y = hW reads it: h kept, a line for each result tile.
      by_hidden_row: W_out as dh = dy Wᵀ reads it.
      by_input_row: W_in as dx = dpre Wᵀ reads it.
      bytes_in: HBM bytes of W_in's stored blocks, rows padded to a register's lanes.
      bytes_out: those of W_out.
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
    def row_bytes(self) -> tuple[int, int, int]:
        """Bytes of a token's x, hidden activations and result."""
        itemsize = self.by_hidden.itemsize
        return (
            self.by_hidden.features * itemsize,
            self.by_result.features * itemsize,
            self.by_hidden_row.features * itemsize,
        )


def fused_tuning(unfused: MlpTuning, shape: MlpShape, vmem_bytes: int) -> MlpTuning:
    """Fused passes where VMEM holds them and they read and write less of HBM than single products.

    A token tile that keeps all hidden activations is smaller than one of a product alone, so the
    weights are read more often: where VMEM is small that can cost more than fusing saves.

    Args:
      unfused: tiles of the single products.
      shape: the MLP's.
      vmem_bytes: what may be used.
    """
    first, second = unfused.product_in, unfused.product_out
    forward = forward_tiles(shape, vmem_bytes, first.cores)
    backward = backward_tiles(shape, vmem_bytes, first.cores)
    pair = pair_traffic(shape, first.forward, second.forward)
    if forward and forward_traffic(shape, forward) > pair:
        forward = None
    single = first.forward, second.input_gradient, first.input_gradient
    if backward and backward_traffic(shape, backward) > recomputing_traffic(shape, *single):
        backward = None
    return dataclasses.replace(unfused, forward=forward, backward=backward)


def spaces(shape: MlpShape, vmem_bytes: int, cores: int) -> dict[str, Space]:
    """What an autotuner may try of each fused pass that fits VMEM at all."""
    by_pass = {
        "forward": (forward_tiles, forward_bytes, (shape.by_hidden, shape.by_result)),
        "backward": (
            backward_tiles,
            backward_bytes,
            (shape.by_hidden, shape.by_hidden_row, shape.by_input_row),
        ),
    }
    made = {}
    for name, (first, bytes_of, operands) in by_pass.items():
        if start := first(shape, vmem_bytes, cores):
            made[name] = _space(start, shape, operands, bytes_of, vmem_bytes)
    return made


def _space(start, shape, operands, bytes_of, vmem_bytes):
    itemsize = shape.by_hidden.itemsize

    def legal(tiles):
        streamed = len(tiles.streams) == len(operands) and all(
            stream.entries > 0 and stream.ahead > 1 for stream in tiles.streams
        )
        whole = tiles.rows > 0 and tiles.tokens % tiles.rows == 0
        in_order = tiles.tokens % products.sublanes(itemsize) == 0 < tiles.tokens
        some = tiles.lines > 0 and tiles.buffers in (1, 2)
        return streamed and whole and in_order and some and bytes_of(shape, tiles) <= vmem_bytes

    choices = {
        "tokens": tuple(products.token_tiles(shape.tokens, itemsize, 1024)),
        "buffers": (1, 2),
        "rows": (128, 256, 512, 1024),
        "lines": (1, 2, 4, 8),
        "streams": tuple(dict.fromkeys(zip(*map(products.streams, operands)))),
    }
    return Space(start, choices, legal)


def forward_tiles(shape: MlpShape, vmem_bytes: int, cores: int) -> MlpTiles | None:
    """The largest token tile that fits; None where none does."""
    return _largest(shape, (shape.by_hidden, shape.by_result), forward_bytes, vmem_bytes, cores)


def backward_tiles(shape: MlpShape, vmem_bytes: int, cores: int) -> MlpTiles | None:
    """The largest token tile that fits; None where none does."""
    operands = (shape.by_hidden, shape.by_hidden_row, shape.by_input_row)
    return _largest(shape, operands, backward_bytes, vmem_bytes, cores)


def forward_bytes(shape: MlpShape, tiles: MlpTiles) -> int:
    """VMEM bytes of the forward kernel: x, all hidden activations, the bias, some results."""
    x, hidden, _ = shape.row_bytes
    rows = tiles.tokens * (tiles.buffers * x + hidden)
    results = 2 * tiles.tokens * tiles.lines * shape.by_hidden.tile * shape.by_hidden.itemsize
    bias = 2 * 4 * shape.by_result.features
    return rows + results + bias + _dots(tiles, shape.by_hidden, shape.by_result)


def backward_bytes(shape: MlpShape, tiles: MlpTiles) -> int:
    """VMEM bytes of the backward kernel: x, dy, the pre-activation's gradient, some results."""
    x, hidden, dy = shape.row_bytes
    rows = tiles.tokens * (tiles.buffers * (x + dy) + hidden)
    tile, itemsize = shape.by_hidden.tile, shape.by_hidden.itemsize
    results = 2 * 3 * tiles.tokens * tiles.lines * tile * itemsize
    before = tiles.tokens * tile * 4
    operands = (shape.by_hidden, shape.by_hidden_row, shape.by_input_row)
    return rows + results + before + _dots(tiles, *operands)


def _dots(tiles, *operands):
    """The streams, and the dots of one at a time."""
    each = list(zip(operands, tiles.streams, strict=True))
    return sum(products.stream_bytes(operand, stream) for operand, stream in each) + max(
        products.dot_bytes(operand, stream, tiles.tokens, tiles.rows) for operand, stream in each
    )


def _largest(shape, operands, need, vmem_bytes, cores):
    def fitting(tokens, buffers):
        for streams in zip(*map(products.streams, operands)):
            for lines in (4, 2, 1):
                tiles = MlpTiles(tokens, buffers, min(tokens, 512), lines, streams)
                if need(shape, tiles) <= vmem_bytes:
                    return tiles
        return None

    return products.largest(shape.tokens, shape.by_hidden.itemsize, cores, fitting)


def forward_traffic(shape: MlpShape, tiles: MlpTiles) -> int:
    """HBM bytes of the fused forward pass: x and y once, both weights once a token tile."""
    x, _, y = shape.row_bytes
    return shape.tokens * (x + y) + _times(shape, tiles) * (shape.bytes_in + shape.bytes_out)


def pair_traffic(shape: MlpShape, first: ProductTiles, second: ProductTiles) -> int:
    """HBM bytes of two products: the hidden layer written and read, its pre-activation written."""
    x, hidden, y = shape.row_bytes
    weights = _times(shape, first) * shape.bytes_in + _times(shape, second) * shape.bytes_out
    return shape.tokens * (x + 3 * hidden + y) + weights


def backward_traffic(shape: MlpShape, tiles: MlpTiles) -> int:
    """HBM bytes of the fused backward pass but for dW's kernels, which both forms have."""
    x, hidden, y = shape.row_bytes
    weights = _times(shape, tiles) * (2 * shape.bytes_in + shape.bytes_out)
    return shape.tokens * (2 * x + 2 * hidden + y) + weights


def recomputing_traffic(
    shape: MlpShape, again: ProductTiles, down: ProductTiles, last: ProductTiles
) -> int:
    """HBM bytes of the same in single products: pre-activation and hidden made again, dh, dx.

    Beyond what `backward_traffic` counts the pre-activation and dh are written and read.
    """
    x, hidden, y = shape.row_bytes
    weights = (_times(shape, again) + _times(shape, last)) * shape.bytes_in
    weights += _times(shape, down) * shape.bytes_out
    return shape.tokens * (2 * x + 7 * hidden + y) + weights


def _times(shape, tiles):
    """How often the weights are read."""
    return -(-shape.tokens // tiles.tokens)
