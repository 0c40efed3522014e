"""Tile sizes of the TPU kernels, and what they cost in VMEM."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jax.experimental.pallas import tpu as pltpu

from sparse_dataflow.kernels.tuned import Space

LANES = 128
"""Lanes of a TPU vector register, the least width of a matrix unit's tile."""

ENOUGH_TOKENS = 512
"""Tokens that a weight read from HBM should serve: v6e multiplies 560 times while it reads one
bfloat16, v5e 240, v4 and v5p 230 (TpuInfo: FLOP/s over bytes/s)."""


@dataclasses.dataclass(frozen=True)
class StreamTiles:
    """How a weight streams through VMEM.

    Attributes:
      entries: weight tiles of one dot, side by side along the contraction.
      ahead: chunks of so many tiles that VMEM holds at once, in use or on their way.
    """

    entries: int
    ahead: int


@dataclasses.dataclass(frozen=True)
class ProductTiles:
    """Tiles of `y = xW` or `dx = dy Wᵀ`.

    Attributes:
      tokens: tokens whose whole rows of the operand lie in VMEM at once; each weight is read
        once for so many tokens.
      buffers: 2 where the next token tile is copied meanwhile, 1 where VMEM holds only one.
      rows: tokens of one dot.
      lines: tile columns of the result in one grid step.
      stream: the weight's.
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
      lines: lines of weight tiles that are summed in VMEM while all tokens pass; the operand
        that is kept whole is read once for so many lines.
      entries: weight tiles of one dot.
    """

    tokens: int
    lines: int
    entries: int


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Tiles of the three products on one device.

    Attributes:
      forward: tiles of y = xW.
      input_gradient: tiles of dx = dy Wᵀ.
      weight_gradient: tiles of dW.
      vmem_bytes: VMEM that a kernel may use.
      cores: TensorCores that share one device (2 on v4 and v5p).
      fuse_derivative: whether dW's kernel applies an activation's derivative; else XLA does
        before it, where VMEM does not hold what fusing needs.
    """

    forward: ProductTiles
    input_gradient: ProductTiles
    weight_gradient: GradientTiles
    vmem_bytes: int
    cores: int
    fuse_derivative: bool = True


@dataclasses.dataclass(frozen=True)
class Operand:
    """What the tile sizes of one product depend on.

    Attributes:
      tokens: rows of x.
      features: width of the operand that VMEM keeps whole, a multiple of tile.
      lines: tile lines of the other side.
      entries: weight tiles of a line, at most.
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
        """VMEM bytes of a tile's blocks; rows narrower than a register are padded."""
        blocks = (self.tile // self.block) ** 2
        return blocks * self.block * max(self.block, LANES) * self.itemsize


def device() -> pltpu.TpuInfo:
    """The TPU compiled for: the abstract mesh's device, the default one, else a v4 (the least)."""
    try:
        return pltpu.get_tpu_info()
    except ValueError:
        return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V4, 1)


def budget() -> int:
    """VMEM bytes to plan with: a sixteenth is left to the compiler's own temporaries."""
    return device().vmem_capacity_bytes * 15 // 16


def sublanes(itemsize: int) -> int:
    """Rows of the smallest tile of a VMEM array: 8 of 32-bit, 16 of 16-bit elements."""
    return 32 // itemsize


def product_tiles(
    operand: Operand, wide_blocks: int, vmem_bytes: int, cores: int
) -> ProductTiles | None:
    """The largest token tile that fits; None where none does.

    Args:
      operand: the kept operand and the weight's lines.
      wide_blocks: token tiles of the result's width that are read or written (y, the
        pre-activation, the residual).
      vmem_bytes: what may be used.
      cores: cores that share the tokens.
    """
    return largest(
        operand.tokens,
        operand.itemsize,
        cores,
        lambda tokens, buffers: _widest(operand, tokens, buffers, wide_blocks, vmem_bytes),
    )


def largest(tokens: int, itemsize: int, cores: int, fitting: Callable[[int, int], Any]) -> Any:
    """The tiles of the largest token tile that fits; None where none does.

    Two buffers hide the copy of the next token tile.  Where they leave less than ENOUGH_TOKENS,
    one buffer for more tokens is faster: the weights' traffic outweighs the operand's.  Half the
    tokens are better where only so all cores have equally many tiles.

    Args:
      tokens: rows of the operand.
      itemsize: bytes of an element.
      cores: cores that share the tokens.
      fitting: (tokens, buffers) -> tiles, or None where they do not fit.
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


def product_space(operand: Operand, wide_blocks: int, vmem_bytes: int, cores: int) -> Space | None:
    """What an autotuner may try, from `product_tiles` on; None where nothing fits."""
    start = product_tiles(operand, wide_blocks, vmem_bytes, cores)

    def legal(tiles):
        whole = tiles.rows > 0 and tiles.tokens % tiles.rows == 0
        in_order = tiles.tokens % sublanes(operand.itemsize) == 0 < tiles.tokens
        streamed = min(tiles.stream.entries, tiles.lines) > 0 and tiles.stream.ahead > 1
        fits = streamed and product_bytes(operand, tiles, wide_blocks) <= vmem_bytes
        return whole and in_order and tiles.buffers in (1, 2) and fits

    choices = {
        "tokens": tuple(token_tiles(operand.tokens, operand.itemsize, 2048)),
        "buffers": (1, 2),
        "rows": (128, 256, 512, 1024),
        "lines": tuple(range(1, 1 + min(8, operand.lines))),
        "stream": tuple(dict.fromkeys(streams(operand))),
    }
    return None if start is None else Space(start, choices, legal)


def _widest(operand, tokens, buffers, wide_blocks, vmem_bytes):
    """The best stream, then the widest result, for these tokens."""
    for stream in streams(operand):
        for lines in range(min(4, operand.lines), 0, -1):
            tiles = ProductTiles(tokens, buffers, min(tokens, 512), lines, stream)
            if product_bytes(operand, tiles, wide_blocks) <= vmem_bytes:
                return tiles
    return None


def streams(operand: Operand) -> Iterator[StreamTiles]:
    """Ways to stream a weight, the best first: dots of 1024, and 4 chunks in flight."""
    for length in (1024, 512, 256, LANES):
        entries = even(operand.entries, max(1, length // operand.tile))
        for ahead in (4, 2):
            yield StreamTiles(entries, ahead)


def stream_bytes(operand: Operand, stream: StreamTiles) -> int:
    """VMEM bytes of a weight's chunks, and of one put together for a dot."""
    chunk = stream.entries * operand.entry_bytes
    return stream.ahead * chunk + 2 * stream.entries * operand.tile**2 * operand.itemsize


def product_bytes(operand: Operand, tiles: ProductTiles, wide_blocks: int) -> int:
    """VMEM bytes of a product; Pallas double-buffers what it copies."""
    kept = tiles.buffers * tiles.tokens * operand.features * operand.itemsize
    results = 2 * wide_blocks * tiles.tokens * tiles.lines * operand.tile * operand.itemsize
    dots = dot_bytes(operand, tiles.stream, tiles.tokens, tiles.rows)
    return kept + results + stream_bytes(operand, tiles.stream) + dots


def dot_bytes(operand: Operand, stream: StreamTiles, tokens: int, rows: int) -> int:
    """VMEM bytes of a line's float32 sums, and of one dot's gathered operand and result."""
    sums = tokens * operand.tile * 4
    return sums + rows * operand.tile * (stream.entries * operand.itemsize + 8)


def gradient_tiles(
    operand: Operand, activated: bool, vmem_bytes: int, cores: int
) -> GradientTiles | None:
    """Half the VMEM for sums, for few passes over the kept operand, then the longest contraction.

    Args:
      operand: the kept operand and the weight's lines.
      activated: whether the derivative of an activation is applied on the way.
      vmem_bytes: what may be used.
      cores: cores that share the lines.
    """
    entries = even(operand.entries, max(1, 512 // operand.tile))
    padded = -(-operand.entries // entries) * entries
    most = max(1, vmem_bytes // 2 // (padded * operand.tile**2 * 4))
    for lines in _divided(-(-operand.lines // cores), most):
        for tokens in token_tiles(operand.tokens, operand.itemsize, 512, least=LANES):
            tiles = GradientTiles(tokens, lines, entries)
            if gradient_bytes(operand, tiles, activated) <= vmem_bytes:
                return tiles
    return None


def gradient_space(operand: Operand, activated: bool, vmem_bytes: int, cores: int) -> Space | None:
    """What an autotuner may try, from `gradient_tiles` on; None where nothing fits."""
    start = gradient_tiles(operand, activated, vmem_bytes, cores)

    def legal(tiles):
        in_order = tiles.tokens % LANES == 0 < tiles.tokens and min(tiles.lines, tiles.entries) > 0
        return in_order and gradient_bytes(operand, tiles, activated) <= vmem_bytes

    choices = {
        "tokens": tuple(token_tiles(operand.tokens, operand.itemsize, 1024, least=LANES)),
        "lines": tuple(_divided(operand.lines, operand.lines)),
        "entries": tuple(dict.fromkeys(even(operand.entries, most) for most in (1, 2, 4, 8, 16))),
    }
    return None if start is None else Space(start, choices, legal)


def gradient_bytes(operand: Operand, tiles: GradientTiles, activated: bool) -> int:
    """VMEM bytes of dW: the sums, both operands double-buffered, the kept one transposed too."""
    padded = -(-operand.entries // tiles.entries) * tiles.entries
    sums = tiles.lines * padded * operand.tile**2 * 4
    kept = 3 * tiles.tokens * operand.features * operand.itemsize
    width = tiles.lines * operand.tile
    other = (7 if activated else 3) * tiles.tokens * width * operand.itemsize
    # Two chunks of float32 on their way in, two of results on their way out.
    written = 4 * tiles.entries * operand.entry_bytes * 4 // operand.itemsize
    values = tiles.entries * operand.tile * (tiles.tokens * operand.itemsize + operand.tile * 8)
    return sums + kept + other + written + values


def even_tiles(tokens: int, tile: int, cores: int) -> bool:
    """Whether so many cores get equally many tiles."""
    return -(-tokens // tile) % cores == 0


def token_tiles(tokens: int, itemsize: int, most: int, least: int | None = None) -> Iterator[int]:
    """Powers of two from the largest useful to the least that a register holds."""
    least = least or sublanes(itemsize)
    tile = least
    while tile < min(most, tokens):
        tile *= 2
    while tile >= least:
        yield tile
        tile //= 2


def even(count: int, most: int) -> int:
    """The least part of `count` that needs no more parts than `most` does."""
    parts = -(-count // max(1, min(most, count)))
    return -(-count // parts)


def _divided(count, most):
    """Parts of `count`, from the largest that is at most `most`, to 1."""
    parts = -(-count // min(most, count))
    sizes: list[int] = []
    while not sizes or sizes[-1] > 1:
        sizes.append(-(-count // parts))
        parts *= 2
    return sizes
