"""Tile sizes of the grouped TPU kernels, and their VMEM bytes."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from sparse_dataflow.chips.tpu.grouped_matmul.windows import Columns
from sparse_dataflow.chips.tpu.matmul.tuning import LANES, budget, device, even
from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import ProductTuning

ENOUGH_TOKENS = 256
"""Tokens of a tile below which narrower feature tiles, which read x again, are better."""

LARGEST_DOT = 2**22
"""Most bytes of dW's dot on the wider side: dots are unrolled, and long programs compile slowly."""

ROWS = 16
"""Tokens are padded to a multiple of a bfloat16 tile's rows, and for dW to at least LANES."""

Tiles = TypeVar("Tiles")


@dataclasses.dataclass(frozen=True)
class GroupedProductTiles:
    """Tiles of `y = xW` or `dx = dy Wᵀ`.

    Attributes:
      tokens: tokens of a step.
      features: result features of a step; x is read once per feature tile of a group.
      rows: tokens of one dot.
    """

    tokens: int
    features: int
    rows: int


@dataclasses.dataclass(frozen=True)
class GroupedGradientTiles:
    """Tiles of dW.

    Attributes:
      tokens: contraction length of one dot.
      features: features of the wider side whose sums are in VMEM; the narrower side is whole.
      chunk: features of the wider side in one dot.
    """

    tokens: int
    features: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class GroupedTuning(ProductTuning[GroupedProductTiles, GroupedGradientTiles]):
    """Tiles of the three products on one device.

    Attributes:
      vmem_bytes: VMEM limit of a kernel.
      cores: TensorCores of one device (2 on v4 and v5p).
    """

    vmem_bytes: int
    cores: int


def choose_tuning(
    tokens: int, sides: tuple[Columns, Columns], itemsize: int
) -> GroupedTuning | None:
    """Return the tiles of the three products on the target TPU; None if a product has none.

    Args:
      tokens: rows of x.
      sides: columns of x and of y.
      itemsize: bytes of an element.
    """
    info = device()
    # The kept schedules were compiled with room for three arrays; the kernel needs one.
    forward = product_tiles(tokens, *sides, itemsize, wide=3)
    input_gradient = product_tiles(tokens, *sides[::-1], itemsize, wide=1)
    weight_gradient = gradient_tiles(tokens, sides, itemsize)
    if forward is None or input_gradient is None or weight_gradient is None:
        return None
    return GroupedTuning(
        forward, input_gradient, weight_gradient, info.vmem_capacity_bytes, info.num_cores
    )


def product_tiles(
    tokens: int, left: Columns, right: Columns, itemsize: int, *, wide: int
) -> GroupedProductTiles | None:
    """Return the tiles of one product; None if none fits VMEM.

    Args:
      tokens: rows of x.
      left: columns of x.
      right: columns of y.
      itemsize: bytes of an element.
      wide: arrays as wide as y that are read or written.
    """
    # Longer dots hide more of the matrix unit's latency, which is most cycles on wide units.
    longest = 512 if device().mxu_column_size > LANES and itemsize == 2 else 256

    def fitting(tile, features):
        if tile > 1024:  # Longer steps save little; those of dW add to all sums.
            return None
        rows = even(tile, longest, ROWS)
        buffers = tile * left.width + wide * tile * features + left.width * features
        # Each buffer twice, as the next is copied while one is in use; then a dot's operand and
        # results.
        need = 2 * buffers * itemsize + rows * (left.width * itemsize + 2 * features * 4)
        return GroupedProductTiles(tile, features, rows) if need <= budget() else None

    return _first_fitting(tokens, right, ROWS, fitting)


def gradient_tiles(
    tokens: int, sides: tuple[Columns, Columns], itemsize: int
) -> GroupedGradientTiles | None:
    """Return the tiles of dW; None if none fits VMEM.  Arguments as in `choose_tuning`."""
    narrow, wide = sides if streams_x(sides) else sides[::-1]

    def fitting(tile, features):
        chunk = _chunk(features)
        if tile * chunk * itemsize > LARGEST_DOT:
            return None
        # Two buffers of each operand.
        inputs = 2 * tile * (narrow.width + features) * itemsize
        # Sums, and two outgoing tiles.
        sums = narrow.width * features * 4 * 3
        temporary = narrow.width * (tile * itemsize + 2 * chunk * 4) + 2 * tile * chunk * 4
        fits = inputs + sums + temporary <= budget()
        return GroupedGradientTiles(tile, features, chunk) if fits else None

    return _first_fitting(max(tokens, LANES), wide, LANES, fitting)


def _chunk(features):
    """Return the features of dW's dot: some 512 that fill the matrix unit's columns, else all."""
    sizes = list(divisors(features))
    full = [size for size in sizes if size <= 640 and size % device().mxu_column_size == 0]
    return full[0] if full else max(size for size in sizes if size <= 2048)


def streams_x(sides: tuple[Columns, Columns]) -> bool:
    """Return whether dW's kernel transposes x: where it is the narrower side."""
    return sides[0].width <= sides[1].width


def _first_fitting(
    tokens: int, columns: Columns, multiple: int, fitting: Callable[[int, int], Tiles | None]
) -> Tiles | None:
    """Return the tiles of the widest features that fit, and then the most tokens.

    All cores should get equally many feature tiles.
    """
    legal = [features for features in divisors(columns.width) if columns.divides(features)]
    tiles_of = lambda features: columns.groups * (columns.width // features)  # noqa: E731
    shared = [features for features in legal if tiles_of(features) % device().num_cores == 0]
    # Long token tiles first, else any that fit.
    for enough in (ENOUGH_TOKENS, 1):
        for features in (*shared, *legal):
            for tile in token_tiles(tokens, 2048, multiple, enough):
                if tiles := fitting(tile, features):
                    return tiles
    return None


def token_tiles(tokens: int, most: int, multiple: int, least: int = 1) -> Iterator[int]:
    """Yield tiles that share the tokens evenly, from `most` down by halves.

    Args:
      tokens: rows to share, at least `multiple`.
      most: most rows of a tile.
      multiple: a tile is a multiple of this, and at most `tokens`; the last tile may overlap.
      least: fewest rows of a tile, unless there are fewer tokens.
    """
    while most >= max(multiple, min(least, tokens)):
        tile = even(tokens, most, multiple)
        yield tile if tile <= tokens else even(tokens, -(-tokens // 2), multiple)
        most //= 2


def divisors(features: int) -> Iterator[int]:
    """Yield the multiples of LANES that divide a width, descending."""
    lanes = features // LANES
    return (n * LANES for n in range(lanes, 0, -1) if lanes % n == 0)
