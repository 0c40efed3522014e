"""Tile sizes of the Hopper kernels, and their shared memory."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax

from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import ProductTuning

CONSUMERS = 2
"""Consumer warp groups of each program, which multiply."""

SLICE_ROWS = 64
"""Rows of one wgmma, and of a slice of outgoing results."""

SHARED_BYTES = 232448
"""Shared memory limit of a program on compute capability 9.0: 227 KiB (CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability")."""

BARRIER_BYTES = 1024
"""Shared memory reserved for barriers and alignment."""

CACHE_BYTES = 50 << 20
"""L2 cache of an H100 or H200."""

_MEMORY_RATE = 4.0e12
"""Bytes/s of an elementwise pass on an H200 (peak 4.8e12)."""

_MULTIPLY_RATE = 5.3e12
"""FLOP/s of one multiprocessor at 700 TFLOP/s of 132."""

_LAUNCH_SECONDS = 1e-5
"""Launch overhead of one more kernel and two elementwise passes."""

_MAX_STAGES = 8

TILE_ROWS = 256
"""Tokens of a full tile."""

_MULTIPLY_ADDS_PER_CYCLE, _L2_BYTES_PER_CYCLE = 2048, 45
"""Multiply-adds of a multiprocessor's tensor cores (989 TFLOP/s at 1.83 GHz), and bytes that it
reads from the L2 cache (an estimate)."""


@dataclasses.dataclass(frozen=True)
class ProductTiles:
    """Tiles of `y = xW` or `dx = dy Wᵀ`.

    Attributes:
      rows: tokens of one consumer, a multiple of 64.
      columns: width of a result tile, at most 128; divides the block, or is `lines` blocks.
      depth: features of one stage, at most 64; divides the block.
      stages: stages of the ring.
      cluster: multiprocessors that share each stored block by multicast, 1 or 2.
      group: token tiles (of a cluster) computed before the next column.
      slices: slices of a consumer in flight, [64, slice_columns] each.
      lines: adjacent lines merged in one tile.
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
        """Return the width of a slice of results: at most one swizzled row of 128 bytes."""
        return min(self.columns // self.lines, 128 // itemsize)


@dataclasses.dataclass(frozen=True)
class GradientTiles:
    """Tiles of dW.

    Attributes:
      side: largest side of the tile of a block that one consumer sums, at most 128.
      width: blocks of one column that one consumer sums.
      depth: tokens of one stage, a multiple of 64 (of `side` if that is less).
      stages: stages of the ring.
      splits: splits of the tokens in the last wave, summed separately.
      slices: slices of a consumer in flight, 64 rows of `slice_bytes` each; at least 2.
      slice_bytes: bytes of a slice's swizzled row.
      lines: adjacent columns merged in one sum.
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
class TuningConfig(ProductTuning[ProductTiles, GradientTiles]):
    """Tiles of the three products on one device.

    Attributes:
      multiprocessors: number of multiprocessors, the programs that run concurrently.
    """

    multiprocessors: int


def product_bytes(tiles: ProductTiles, elementwise: bool, itemsize: int = 2) -> int:
    """Return the shared memory of a product in bytes.

    Args:
      tiles: the tile sizes.
      elementwise: whether a pre-activation is read, which puts all slices of a tile in
        shared memory at once.
      itemsize: bytes of a result element.
    """
    # bfloat16: the tokens of each consumer, and a block that they share.
    stage = (CONSUMERS * tiles.rows + tiles.columns) * tiles.depth * 2
    width = tiles.slice_columns(itemsize)
    slices = tiles.rows * tiles.columns // (SLICE_ROWS * width)
    if not elementwise:
        slices = min(slices, tiles.slices)
    results = CONSUMERS * slices * SLICE_ROWS * width * itemsize
    return tiles.stages * stage + results + BARRIER_BYTES


def gradient_bytes(tiles: GradientTiles, block: int) -> int:
    """Return the shared memory of dW in bytes."""
    side = min(tiles.side, block)
    columns = tiles.lines * side
    # bfloat16: both operands of each consumer. A wgmma has 64 rows, also for blocks of 32.
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
    """Return a product's tiles: few waves of programs, then as many stages as fit shared memory.

    A program takes 256 tokens, which reads each stored block least often, or 128 if there would be
    too few programs.  Two programs form a cluster, which shares blocks, if both have tokens.

    Args:
      tokens: rows of the operand.
      features: width of the operand.
      columns: blocks along the result's width.
      block: side of a block.
      lines: merged lines of a tile.
      multiprocessors: number of multiprocessors of the device.
      bytes_of: maps tiles to their shared memory in bytes.
    """
    width = min(lines * block, 128)

    def waves(rows):
        tiles = -(-tokens // (CONSUMERS * rows)) * -(-columns * block // width)
        return -(-tiles // multiprocessors)

    # A tile of 128 tokens reads 1.5 times the bytes per multiply-add: a handicap of 1.25.
    rows = min((128, 64), key=lambda rows: waves(rows) * rows * (1 if rows == 128 else 1.25))
    pair = tokens > CONSUMERS * rows and multiprocessors % 2 == 0
    cluster = 2 if pair else 1
    rows_of_cluster = CONSUMERS * rows * cluster
    # Features of the token tiles take half of the L2 cache; blocks and results pass through the
    # rest.
    group = max(1, CACHE_BYTES // 2 // (rows_of_cluster * features * 2))
    tiles = ProductTiles(
        rows=rows,
        columns=width,
        depth=min(block, 64),
        stages=_MAX_STAGES,
        cluster=cluster,
        group=min(group, -(-tokens // rows_of_cluster)),
        lines=lines,
    )
    return _fitted(tiles, bytes_of)


def choose_merged_lines(fans: Mapping[int, int], block: int) -> int:
    """Return the number of adjacent lines to merge in one tile, for the least time.

    The slower of tensor cores and L2 cache determines the time.  Merged lines with different
    supports multiply zeros; single lines read their tokens' features more often.

    Args:
      fans: number of merged lines -> positions of the longest line; only the legal choices.
      block: side of a block.
    """

    def cycles(lines):
        columns = lines * block
        compute = TILE_ROWS * block * columns / _MULTIPLY_ADDS_PER_CYCLE
        read = 2 * block * (TILE_ROWS + columns) / _L2_BYTES_PER_CYCLE
        return fans[lines] * max(compute, read) / lines

    return min(fans, key=cycles)


def gradient_tiles(
    tokens: int, stored: int, block: int, lines: int, multiprocessors: int
) -> GradientTiles:
    """Return the tiles of dW; the last wave's tokens are split if that saves time.

    Args:
      tokens: rows of both operands.
      stored: number of stored blocks.
      block: side of a block.
      lines: merged columns of a sum; sums of several are not split.
      multiprocessors: number of multiprocessors of the device.
    """
    # More blocks would need more registers for the table than the producer has.
    side, width = min(block, 128), 2 if block < 128 and lines < 4 else 1
    pairs = -(-(stored * (block // side) ** 2) // (width * CONSUMERS))
    # A wgmma computes 64 rows, also of a block of 32.
    flops = 2 * tokens * side * max(side, SLICE_ROWS) * width * CONSUMERS

    last = pairs % multiprocessors

    def seconds(splits):
        """Return the last wave's time, as far as it depends on the splits."""
        waves = -(-last * splits // multiprocessors) / splits
        if splits == 1:
            return waves * flops / _MULTIPLY_RATE
        sums = last * CONSUMERS * width * side * max(side, SLICE_ROWS) * 4
        # Each partial sum is written and read, and the result is written.
        moved = (2 * splits + 1) * sums
        return waves * flops / _MULTIPLY_RATE + moved / _MEMORY_RATE + _LAUNCH_SECONDS

    candidates = range(1, 1 + max_splits(tokens, lines))
    tiles = GradientTiles(
        side,
        width,
        depth=64,
        stages=_MAX_STAGES,
        splits=min(candidates, key=seconds),
        lines=lines,
    )
    return _fitted(tiles, functools.partial(gradient_bytes, block=block))


def max_splits(tokens: int, lines: int) -> int:
    """Return the most splits, each of at least 256 tokens; 1 for merged columns."""
    return max(1, min(16, tokens // 256)) if lines == 1 else 1


def multiprocessors() -> int:
    """Return the target GPU's multiprocessors: the abstract mesh's, the default device's, else 132.

    132 is an H200's number.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.num_cores or 132
    return getattr(jax.devices()[0], "core_count", None) or 132


def _fitted(tiles, bytes_of):
    """Return the tiles with as many stages as fit shared memory; two always fit."""
    candidates = (dataclasses.replace(tiles, stages=n) for n in range(tiles.stages, 1, -1))
    return next(candidate for candidate in candidates if bytes_of(candidate) <= SHARED_BYTES)
