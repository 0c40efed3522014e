"""Tile sizes of the Hopper kernels, and what they cost in shared memory."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax

from sparse_dataflow.kernels.tuned import Space

CONSUMERS = 2
"""Warp groups that multiply, in each program."""

SLICE_ROWS = 64
"""Rows of one wgmma, and of a slice of results on its way out."""

SHARED_BYTES = 232448
"""Shared memory that one program may ask for on compute capability 9.0 (CUDA C++ Programming
Guide, "Technical Specifications per Compute Capability": 227 KiB)."""

BARRIER_BYTES = 1024
"""Shared memory kept back for barriers and for what alignment costs."""

CACHE_BYTES = 50 << 20
"""L2 cache of an H100 or H200."""

_MEMORY_RATE = 4.0e12
"""Bytes a second that an elementwise pass reaches on an H200 (4.8e12 at most)."""

_MULTIPLY_RATE = 5.3e12
"""FLOP/s of one multiprocessor at 700 TFLOP/s of 132."""

_LAUNCH_SECONDS = 1e-5
"""Of one more kernel and two elementwise passes."""

_MOST_STAGES = 8

TILE_ROWS = 256
"""Tokens of a full tile."""

_MULTIPLIED_A_CYCLE, _READ_A_CYCLE = 2048, 45
"""Multiply-adds of a multiprocessor's tensor cores (989 TFLOP/s at 1.83 GHz), and bytes that it
reads from the L2 cache (an estimate)."""


@dataclasses.dataclass(frozen=True)
class ProductTiles:
    """Tiles of `y = xW` or `dx = dy Wᵀ`.

    Attributes:
      rows: tokens of one consumer, a multiple of 64.
      columns: width of the result's tile, at most 128; divides the block, or is `lines` blocks.
      depth: features of one stage; divides the block, at most 64.
      stages: stages of the ring.
      cluster: multiprocessors that share each stored block by multicast, 1 or 2.
      group: token tiles (of a cluster) that take a column together.
      slices: slices of a consumer in flight, [64, slice_columns] each.
      lines: adjacent lines whose blocks lie side by side in one tile.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    cluster: int
    group: int
    slices: int = 2
    lines: int = 1

    def slice_columns(self, itemsize: int = 2) -> int:
        """Width of a slice of results of so many bytes: what one swizzled row holds."""
        return min(self.columns // self.lines, 128 // itemsize)


@dataclasses.dataclass(frozen=True)
class GradientTiles:
    """Tiles of dW.

    Attributes:
      side: largest side of the part of a block that one consumer sums, at most 128.
      width: blocks of one column that one consumer sums.
      depth: tokens of one stage, a multiple of 64 (of `side`, where that is less).
      stages: stages of the ring.
      splits: shares of the tokens that the last wave's pairs are summed in.
      slices: slices of a consumer in flight, 64 rows of `slice_bytes` each; at least 2.
      slice_bytes: bytes of a slice's row; what one swizzled row holds.
      lines: adjacent columns whose blocks lie side by side in one sum.
    """

    side: int
    width: int
    depth: int
    stages: int
    splits: int = 1
    slices: int = 2
    slice_bytes: int = 128
    lines: int = 1


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """Tiles of the three products on one device.

    Attributes:
      forward: tiles of y = xW.
      input_gradient: tiles of dx = dy Wᵀ.
      weight_gradient: tiles of dW.
      multiprocessors: programs that run at once.
    """

    forward: ProductTiles
    input_gradient: ProductTiles
    weight_gradient: GradientTiles
    multiprocessors: int


def product_bytes(tiles: ProductTiles, elementwise: bool, itemsize: int = 2) -> int:
    """Shared memory of a product in bytes.

    Args:
      tiles: the tile sizes.
      elementwise: whether a residual or pre-activation is read; then all of a tile's results lie
        in shared memory at once.
      itemsize: bytes of a result.
    """
    stage = (CONSUMERS * tiles.rows + tiles.columns) * tiles.depth * 2
    width = tiles.slice_columns(itemsize)
    slices = tiles.rows * tiles.columns // (SLICE_ROWS * width)
    if not elementwise:
        slices = min(slices, tiles.slices)
    results = CONSUMERS * slices * SLICE_ROWS * width * itemsize
    return tiles.stages * stage + results + BARRIER_BYTES


def gradient_bytes(tiles: GradientTiles, block: int) -> int:
    """Shared memory of dW in bytes."""
    side = min(tiles.side, block)
    columns = tiles.lines * side
    stage = CONSUMERS * (tiles.width * max(side, SLICE_ROWS) + columns) * tiles.depth * 2
    results = CONSUMERS * tiles.slices * SLICE_ROWS * min(tiles.slice_bytes, side * 4)
    return tiles.stages * stage + results + BARRIER_BYTES


def product_tiles(
    tokens: int,
    features: int,
    columns: int,
    block: int,
    lines: int,
    multiprocessors: int,
    bytes_of: Callable[[ProductTiles], int],
) -> ProductTiles:
    """Tiles of a product: few waves of programs, then as many stages as shared memory holds.

    256 tokens a program read each stored block least often; 128 where that leaves too few
    programs.  Two programs share blocks (a cluster) where there are tokens for both.

    Args:
      tokens: rows of the operand.
      features: its width.
      columns: blocks of the result's width.
      block: side of a block.
      lines: lines side by side in a tile.
      multiprocessors: of the device.
      bytes_of: shared memory that tiles take.
    """
    width = min(lines * block, 128)

    def waves(rows):
        tiles = -(-tokens // (CONSUMERS * rows)) * -(-columns * block // width)
        return -(-tiles // multiprocessors)

    # A tile of 128 tokens reads half as much again a multiply-add: worth a quarter fewer rows.
    rows = min((128, 64), key=lambda rows: waves(rows) * rows * (1 if rows == 128 else 1.25))
    pair = tokens > CONSUMERS * rows and multiprocessors % 2 == 0
    cluster = 2 if pair else 1
    rows_of_cluster = CONSUMERS * rows * cluster
    group = max(1, CACHE_BYTES // 2 // (rows_of_cluster * features * 2))
    tiles = ProductTiles(
        rows=rows,
        columns=width,
        depth=min(block, 64),
        stages=_MOST_STAGES,
        cluster=cluster,
        group=min(group, -(-tokens // rows_of_cluster)),
        lines=lines,
    )
    return _fitted(tiles, bytes_of)


def lines_of(fans: Mapping[int, int], block: int) -> int:
    """How many adjacent lines in one tile take the least time.

    The slower of the tensor cores and of the L2 cache counts: merged lines that differ multiply
    zeros, single ones read their tokens' features again.

    Args:
      fans: number of lines in one -> positions of the longest, where that is known.
      block: side of a block.
    """

    def cycles(lines):
        columns = lines * block
        multiplied = TILE_ROWS * block * columns / _MULTIPLIED_A_CYCLE
        read = 2 * block * (TILE_ROWS + columns) / _READ_A_CYCLE
        return fans[lines] * max(multiplied, read) / lines

    return min(fans, key=cycles)


def gradient_tiles(
    tokens: int, stored: int, block: int, lines: int, accumulate: bool, multiprocessors: int
) -> GradientTiles:
    """Tiles of dW: the last wave in as many shares as repay the passes over their sums.

    Of an accumulator, many small slices are under way at once: reading it delays the end.

    Args:
      tokens: rows of both operands.
      stored: number of stored blocks.
      block: side of a block.
      lines: columns side by side in a sum; several are summed whole.
      accumulate: whether an accumulator is read.
      multiprocessors: of the device.
    """
    # More rows at once take more registers for the table than the producer has.
    side, width = min(block, 128), 2 if block < 128 and lines < 4 else 1
    pairs = -(-(stored * (block // side) ** 2) // (width * CONSUMERS))
    flops = 2 * tokens * side * max(side, SLICE_ROWS) * width * CONSUMERS

    last = pairs % multiprocessors

    def seconds(splits):
        """What of the last wave depends on the shares."""
        waves = -(-last * splits // multiprocessors) / splits
        if splits == 1:
            return waves * flops / _MULTIPLY_RATE
        sums = last * CONSUMERS * width * side * max(side, SLICE_ROWS) * 4
        moved = (2 * splits + 1) * sums
        return waves * flops / _MULTIPLY_RATE + moved / _MEMORY_RATE + _LAUNCH_SECONDS

    shares = range(1, 1 + most_splits(tokens, lines))
    tiles = GradientTiles(
        side,
        width,
        depth=64,
        stages=_MOST_STAGES,
        splits=min(shares, key=seconds),
        slices=4 if accumulate else 2,
        slice_bytes=64 if accumulate else 128,
        lines=lines,
    )
    return _fitted(tiles, functools.partial(gradient_bytes, block=block))


def most_splits(tokens: int, lines: int) -> int:
    """Shares of at least 256 tokens; one where columns lie side by side."""
    return max(1, min(16, tokens // 256)) if lines == 1 else 1


def product_space(start: ProductTiles, bytes_of: Callable[[ProductTiles], int]) -> Space:
    """What an autotuner may try of a product, from `start` on.

    Args:
      start: the heuristic's.
      bytes_of: shared memory that tiles take.
    """

    def legal(tiles):
        same = "columns", "depth", "lines"
        fixed = all(getattr(tiles, name) == getattr(start, name) for name in same)
        shares = tiles.cluster == 1 or start.cluster == 2
        some = min(tiles.group, tiles.slices) > 0 and 2 <= tiles.stages <= _MOST_STAGES
        rows = tiles.rows in (64, 128) and tiles.cluster in (1, 2)
        return fixed and shares and some and rows and bytes_of(tiles) <= SHARED_BYTES

    choices = {
        "rows": (64, 128),
        "stages": tuple(range(2, 1 + _MOST_STAGES)),
        "cluster": (1, 2),
        "group": (1, 2, 4, 8, 16, 32, 64),
        "slices": (1, 2, 4),
    }
    return Space(start, choices, legal)


def gradient_space(start: GradientTiles, tokens: int, block: int) -> Space:
    """What an autotuner may try of dW, from `start` on."""

    def legal(tiles):
        same = "side", "width", "lines"
        fixed = all(getattr(tiles, name) == getattr(start, name) for name in same)
        some = tiles.slices >= 2 and 2 <= tiles.stages <= _MOST_STAGES
        shares = 1 <= tiles.splits <= most_splits(tokens, tiles.lines)
        bytes_ = tiles.depth in (64, 128) and tiles.slice_bytes in (64, 128)
        return fixed and some and shares and bytes_ and gradient_bytes(tiles, block) <= SHARED_BYTES

    choices = {
        "depth": (64, 128),
        "stages": tuple(range(2, 1 + _MOST_STAGES)),
        "splits": tuple(range(1, 17)),
        "slices": (2, 4, 8),
        "slice_bytes": (64, 128),
    }
    return Space(start, choices, legal)


def multiprocessors() -> int:
    """Of the GPU compiled for: the abstract mesh's device, the default one, else an H200's 132."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.num_cores or 132
    return getattr(jax.devices()[0], "core_count", None) or 132


def _fitted(tiles, bytes_of):
    """The same with as many stages as fit; two always do."""
    stages = range(tiles.stages, 1, -1)
    deep = (dataclasses.replace(tiles, stages=number) for number in stages)
    return next(tiles for tiles in deep if bytes_of(tiles) <= SHARED_BYTES)
