"""Tile sizes of the TPU kernels, and their VMEM bytes."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jax.experimental.pallas import tpu as pltpu

from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import ProductTuning

LANES = 128
"""Lanes of a TPU vector register, the narrowest tile of a matrix unit."""

ENOUGH_TOKENS = 512
"""Tokens that each weight read from HBM should serve.  Multiply-adds per bfloat16 read (TpuInfo:
FLOP/s over bytes/s): 560 on v6e, 240 on v5e, 230 on v4 and v5p."""


@dataclasses.dataclass(frozen=True)
class StreamTiles:
    """How a weight streams through VMEM.

    Attributes:
      entries: weight tiles of one dot (a chunk), concatenated along the contraction.
      ahead: chunks in VMEM at once, in use or in flight.
    """

    entries: int
    ahead: int


@dataclasses.dataclass(frozen=True)
class ProductTiles:
    """Tiles of `y = xW` or `dx = dy Wᵀ`, whose kernel streams weights past token tiles.

    Attributes:
      tokens: tokens of a tile, whose whole operand rows are in VMEM; each weight is read once per
        token tile.
      buffers: 2 to copy the next token tile during compute, 1 to hold only one in VMEM.
      rows: tokens of one dot.
      lines: tile columns of the result in one grid step.
      stream: of the weight.
    """

    tokens: int
    buffers: int
    rows: int
    lines: int
    stream: StreamTiles


@dataclasses.dataclass(frozen=True)
class GradientTiles:
    """Tiles of dW.

    Attributes:
      tokens: contraction length of one dot.
      lines: lines of weight tiles summed in VMEM in one pass over all tokens; the gathered operand
        is read once per pass.
      entries: weight tiles of one dot.
    """

    tokens: int
    lines: int
    entries: int


@dataclasses.dataclass(frozen=True)
class TuningConfig(ProductTuning[ProductTiles, GradientTiles]):
    """Tiles of the three products on one device.

    Attributes:
      vmem_bytes: VMEM limit of a kernel.
      cores: TensorCores of one device (2 on v4 and v5p).
      fuse_derivative: whether dW's kernel applies the activation's derivative; if VMEM is too small
        for that, XLA applies it first.
    """

    vmem_bytes: int
    cores: int
    fuse_derivative: bool = True


@dataclasses.dataclass(frozen=True)
class Operand:
    """The shape of one product, which determines its tile sizes.

    Attributes:
      tokens: rows of x.
      features: width of the gathered operand, a multiple of `tile`.
      lines: lines of weight tiles on the other side.
      entries: most weight tiles of a line.
      block: side of a stored block.
      itemsize: bytes of an element.
    """

    tokens: int
    features: int
    lines: int
    entries: int
    block: int
    itemsize: int

    @property
    def tile(self) -> int:
        """Side of a weight tile."""
        return max(self.block, LANES)

    @property
    def entry_bytes(self) -> int:
        """VMEM bytes of a tile's blocks; rows are padded to a register's lanes."""
        blocks = (self.tile // self.block) ** 2
        return blocks * self.block * max(self.block, LANES) * self.itemsize


def device() -> pltpu.TpuInfo:
    """Return the target TPU: the abstract mesh's, the default device, else a v4 (the smallest)."""
    try:
        return pltpu.get_tpu_info()
    except ValueError:
        return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V4, 1)


def budget() -> int:
    """Return the VMEM bytes for tiles; 1/16 is left to the compiler's temporaries."""
    return device().vmem_capacity_bytes * 15 // 16


def limits(tuning: Any) -> dict[str, Any]:
    """Return the keyword arguments of a kernel that limit it to a device."""
    return {"vmem_bytes": tuning.vmem_bytes, "cores": tuning.cores}


def sublanes(itemsize: int) -> int:
    """Return the rows of the smallest VMEM tile: 8 for 32-bit, 16 for 16-bit elements."""
    return 32 // itemsize


def largest(
    tokens: int, itemsize: int, cores: int, fitting: Callable[[int, int], ProductTiles | None]
) -> ProductTiles | None:
    """Return the tiles of the largest token tile that fits; None if none fits.

    Two buffers overlap the copy of the next token tile with compute.  If they allow fewer than
    ENOUGH_TOKENS, one buffer with more tokens is faster, because weight traffic dominates.  A tile
    is halved if only then all cores have equally many tiles.

    Args:
      tokens: rows of the operand.
      itemsize: bytes of an element.
      cores: cores that share the tokens.
      fitting: (tokens, buffers) -> tiles, or None if they do not fit.
    """
    best = {}
    for buffers in (1, 2):
        for tile in token_tiles(tokens, itemsize, 1024):
            if tiles := fitting(tile, buffers):
                shared = tile > sublanes(itemsize) and even_tiles(tokens, tile // 2, cores)
                halve = shared and not even_tiles(tokens, tile, cores)
                best[buffers] = fitting(tile // 2, buffers) if halve else tiles
                break
    double, single = best.get(2), best.get(1)
    if double is None or single is None:
        return single
    return double if double.tokens >= min(ENOUGH_TOKENS, single.tokens) else single


def product_tiles(
    operand: Operand, wide_blocks: int, vmem_bytes: int, cores: int
) -> ProductTiles | None:
    """Return the tiles with the largest token tile that fits; None if none fits.

    Args:
      operand: the product's shape.
      wide_blocks: result-wide arrays that are read or written (y, pre-activation, residual).
      vmem_bytes: VMEM budget.
      cores: cores that share the tokens.
    """

    def fits(tiles):
        return product_bytes(operand, tiles, wide_blocks) <= vmem_bytes

    def fitting(tokens, buffers):
        """Return the tiles with the best stream, then the widest result, for these tokens."""
        candidates = (
            ProductTiles(tokens, buffers, min(tokens, 1024), lines, stream)
            for stream in streams(operand)
            for lines in range(min(4, operand.lines), 0, -1)
        )
        return next(filter(fits, candidates), None)

    return largest(operand.tokens, operand.itemsize, cores, fitting)


def streams(operand: Operand) -> Iterator[StreamTiles]:
    """Yield ways to stream a weight, best first: long dots, 4 chunks in flight."""
    longest = _length(operand, 2560)
    for length in (longest, *(step for step in (1024, 512, 256, LANES) if step < longest)):
        # Equal chunks: the last one is not padded more than need be.
        entries = even(operand.entries, max(1, length // operand.tile))
        for ahead in (4, 2):
            yield StreamTiles(entries, ahead)


def _length(operand: Operand, whole: int) -> int:
    """Return the length of a dot: `whole` for tiles that are blocks; short for tiles of small
    blocks, whose number differs between lines, so that unused chunks are skipped."""
    return whole if operand.block >= LANES else 512


def stream_bytes(operand: Operand, stream: StreamTiles) -> int:
    """Return the VMEM bytes of a weight's chunks, and of one assembled chunk."""
    chunk = stream.entries * operand.entry_bytes
    return stream.ahead * chunk + 2 * stream.entries * operand.tile**2 * operand.itemsize


def product_bytes(operand: Operand, tiles: ProductTiles, wide_blocks: int) -> int:
    """Return the VMEM bytes of a product; Pallas double-buffers its own copies."""
    gathered_rows = tiles.buffers * tiles.tokens * operand.features * operand.itemsize
    results = 2 * wide_blocks * tiles.tokens * tiles.lines * operand.tile * operand.itemsize
    dots = dot_bytes(operand, tiles.stream, tiles.tokens, tiles.rows)
    return gathered_rows + results + stream_bytes(operand, tiles.stream) + dots


def dot_bytes(operand: Operand, stream: StreamTiles, tokens: int, rows: int) -> int:
    """Return the VMEM bytes of a line's float32 sums, and of one dot's operand and result."""
    sums = tokens * operand.tile * 4
    return sums + rows * operand.tile * (stream.entries * operand.itemsize + 8)


def gradient_tiles(
    operand: Operand, activated: bool, vmem_bytes: int, cores: int
) -> GradientTiles | None:
    """Return the tiles of dW; None if nothing fits.

    They have at most half the VMEM for sums.  Large sums mean few passes over the gathered operand.
    The contraction is then the longest that fits.

    Args:
      operand: the product's shape.
      activated: whether the kernel applies an activation's derivative.
      vmem_bytes: VMEM budget.
      cores: cores that share the lines.
    """

    def fits(tiles):
        return gradient_bytes(operand, tiles, activated) <= vmem_bytes

    entries = even(operand.entries, max(1, _length(operand, 1024) // operand.tile))
    padded = -(-operand.entries // entries) * entries
    max_lines = max(1, vmem_bytes // 2 // (padded * operand.tile**2 * 4))
    candidates = (
        GradientTiles(tokens, lines, entries)
        for lines in _divided(-(-operand.lines // cores), max_lines)
        for tokens in token_tiles(operand.tokens, operand.itemsize, 512, least=LANES)
    )
    return next(filter(fits, candidates), None)


def gradient_bytes(operand: Operand, tiles: GradientTiles, activated: bool) -> int:
    """Return the VMEM bytes of dW: sums, double-buffered operands, the gathered one transposed."""
    padded = -(-operand.entries // tiles.entries) * tiles.entries
    sums = tiles.lines * padded * operand.tile**2 * 4
    gathered_rows = 3 * tiles.tokens * operand.features * operand.itemsize
    width = tiles.lines * operand.tile
    # Copies of the lined operand: two buffers, and one with its ragged rows zeroed.
    copies = 7 if activated else 3 if operand.tokens % tiles.tokens else 2
    other = copies * tiles.tokens * width * operand.itemsize
    # Two incoming chunks of float32 and two outgoing chunks of results.
    written = 4 * tiles.entries * operand.entry_bytes * 4 // operand.itemsize
    values = tiles.entries * operand.tile * (tiles.tokens * operand.itemsize + operand.tile * 8)
    return sums + gathered_rows + other + written + values


def even_tiles(tokens: int, tile: int, cores: int) -> bool:
    """Return whether all cores get equally many token tiles."""
    return -(-tokens // tile) % cores == 0


def token_tiles(tokens: int, itemsize: int, most: int, least: int | None = None) -> Iterator[int]:
    """Yield powers of two from the largest useful tile down to a register's rows."""
    least = least or sublanes(itemsize)
    tile = least
    while tile < min(most, tokens):
        tile *= 2
    while tile >= least:
        yield tile
        tile //= 2


def even(count: int, most: int, multiple: int = 1) -> int:
    """Return the size of the fewest pieces of at most `most`, rounded up to a multiple."""
    pieces = -(-count // most)
    return -(-count // (pieces * multiple)) * multiple


def _divided(count, most):
    """Return piece sizes of `count`, from the largest that is at most `most`, down to 1."""
    pieces = -(-count // min(most, count))
    sizes: list[int] = []
    while not sizes or sizes[-1] > 1:
        sizes.append(-(-count // pieces))
        pieces *= 2
    return sizes
