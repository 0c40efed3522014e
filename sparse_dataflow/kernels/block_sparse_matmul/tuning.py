"""Tile sizes of the TPU kernels, and what they cost in VMEM."""

import dataclasses

from jax.experimental.pallas import tpu as pltpu

LANES = 128
"""Lanes of a TPU vector register, the least width of a matrix unit's tile."""


@dataclasses.dataclass(frozen=True)
class ProductTiles:
    """Tiles of `y = xW` or `dx = dy Wᵀ`.

    Attributes:
      tokens: tokens whose whole rows of the operand lie in VMEM at once; each weight is read
        once for so many tokens.
      rows: tokens of one dot.
      lines: tile columns of the result in one grid step.
      entries: weight tiles of one dot, side by side along the contraction.
    """

    tokens: int
    rows: int
    lines: int
    entries: int


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
    """

    forward: ProductTiles
    input_gradient: ProductTiles
    weight_gradient: GradientTiles
    vmem_bytes: int
    cores: int


@dataclasses.dataclass(frozen=True)
class Operand:
    """What the tile sizes of one product depend on.

    Attributes:
      tokens: rows of x.
      features: width of the operand that VMEM keeps whole, a multiple of tile.
      lines: tile lines of the other side.
      entries: weight tiles of a line, at most.
      blocks: stored blocks of a line, at most.
      block: side of a stored block.
      itemsize: bytes of an element.
    """

    tokens: int
    features: int
    lines: int
    entries: int
    blocks: int
    block: int
    itemsize: int

    @property
    def tile(self) -> int:
        """Side of a weight tile."""
        return max(self.block, LANES)

    @property
    def line_bytes(self) -> int:
        """VMEM bytes of a line's stored blocks; rows narrower than a register are padded."""
        return self.blocks * self.block * max(self.block, LANES) * self.itemsize


def device() -> pltpu.TpuInfo:
    """The TPU compiled for: the abstract mesh's device, the default one, else a v4 (the least)."""
    try:
        return pltpu.get_tpu_info()
    except ValueError:
        return pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V4, 1)


def sublanes(itemsize: int) -> int:
    """Rows of the smallest tile of a VMEM array: 8 of 32-bit, 16 of 16-bit elements."""
    return 32 // itemsize


def product_tiles(operand: Operand, wide_blocks: int, vmem_bytes: int) -> ProductTiles | None:
    """The largest token tile that fits; None where none does.

    Args:
      operand: the kept operand and the weight's lines.
      wide_blocks: token tiles of the result's width that are read or written (y, the
        pre-activation, the residual).
      vmem_bytes: what may be used.
    """
    entries = _even(operand.entries, 1024 // operand.tile)
    for tokens in _token_tiles(operand, 1024):
        for lines in range(min(4, operand.lines), 0, -1):
            tiles = ProductTiles(tokens, min(tokens, 512), lines, entries)
            if product_bytes(operand, tiles, wide_blocks) <= vmem_bytes:
                return tiles
    return None


def product_bytes(operand: Operand, tiles: ProductTiles, wide_blocks: int) -> int:
    """VMEM bytes of a product: everything that is copied twice over, as it is double-buffered."""
    kept = 2 * tiles.tokens * operand.features * operand.itemsize
    weights = 2 * tiles.lines * operand.line_bytes
    weights += 2 * tiles.entries * operand.tile**2 * operand.itemsize
    results = 2 * wide_blocks * tiles.tokens * tiles.lines * operand.tile * operand.itemsize
    sums = tiles.tokens * operand.tile * 4
    values = tiles.rows * operand.tile * (tiles.entries * operand.itemsize + 8)
    return kept + weights + results + sums + values


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
    entries = _even(operand.entries, 512 // operand.tile)
    padded = -(-operand.entries // entries) * entries
    most = max(1, vmem_bytes // 2 // (padded * operand.tile**2 * 4))
    for lines in _divided(-(-operand.lines // cores), most):
        for tokens in _token_tiles(operand, 512, least=LANES):
            tiles = GradientTiles(tokens, lines, entries)
            if gradient_bytes(operand, tiles, activated) <= vmem_bytes:
                return tiles
    return None


def gradient_bytes(operand: Operand, tiles: GradientTiles, activated: bool) -> int:
    """VMEM bytes of dW: the sums, both operands double-buffered, the kept one transposed too."""
    padded = -(-operand.entries // tiles.entries) * tiles.entries
    sums = tiles.lines * padded * operand.tile**2 * 4
    kept = 3 * tiles.tokens * operand.features * operand.itemsize
    width = tiles.lines * operand.tile
    other = (7 if activated else 3) * tiles.tokens * width * operand.itemsize
    written = 4 * operand.line_bytes * 4 // operand.itemsize
    values = tiles.entries * operand.tile * (tiles.tokens * operand.itemsize + operand.tile * 8)
    return sums + kept + other + written + values


def _even(count, most):
    """The least part of `count` that needs no more parts than `most` does."""
    parts = -(-count // max(1, min(most, count)))
    return -(-count // parts)


def _divided(count, most):
    """Parts of `count`, from the largest that is at most `most`, to 1."""
    parts = -(-count // min(most, count))
    sizes = []
    while not sizes or sizes[-1] > 1:
        sizes.append(-(-count // parts))
        parts *= 2
    return sizes


def _token_tiles(operand, most, least=None):
    """Powers of two from the largest useful to the least that a register holds."""
    least = least or sublanes(operand.itemsize)
    tile = least
    while tile < min(most, operand.tokens):
        tile *= 2
    while tile >= least:
        yield tile
        tile //= 2
