"""Static patterns: a registry of functions that choose the stored blocks.

Patterns are balanced by construction.  On a grid of in_blocks x out_blocks, `ring` is
gcd(in_blocks, out_blocks).  A pattern picks `degree` disjoint permutations of the ring.  Each ring
cell expands to a rectangle of (in_blocks / ring) x (out_blocks / ring) blocks.  Square and
rectangular grids thus follow the same rules, every output block reads degree * in_blocks / ring
input blocks, and the rectangles give wide runs of equal support.

Example of a new pattern:

    @register("every_third")
    def every_third(in_blocks, out_blocks, degree, offset):
        ring = math.gcd(in_blocks, out_blocks)
        return from_permutations([(np.arange(ring) + 3 * k) % ring for k in range(degree)],
                                 in_blocks, out_blocks)
"""

import math
from collections.abc import Callable, Iterable

import numpy as np

from sparse_dataflow.core.config.projections import PATTERN_NAMES
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.files.errors import UserError

Pattern = Callable[..., np.ndarray]
"""(in_blocks, out_blocks, degree, offset) -> bool [in_blocks, out_blocks].

`offset` numbers the weights of a model in order of depth, starting at the model's seed.  A pattern
may use it to vary its blocks from layer to layer, or as a random seed.
"""

PATTERNS: dict[str, Pattern] = {}
BY_ROLE: set[str] = set()
"""Patterns that also take `reads_residual`; see `make_layout`."""


def register(name: str, by_role: bool = False) -> Callable[[Pattern], Pattern]:
    """Returns a decorator that registers a pattern.

    Args:
      by_role: whether the pattern also takes `reads_residual`, bool or None.

    Raises:
      ValueError: `name` is already registered.
    """

    def add(pattern: Pattern) -> Pattern:
        if name in PATTERNS:
            raise ValueError(f"pattern {name!r} is already registered")
        PATTERNS[name] = pattern
        if by_role:
            BY_ROLE.add(name)
        PATTERN_NAMES.append(name)
        return pattern

    return add


def make_layout(
    pattern: str,
    in_features: int,
    out_features: int,
    block: int,
    density: float,
    offset: int = 0,
    reads_residual: bool | None = None,
) -> BlockLayout:
    """Builds the balanced layout of a named pattern.

    Args:
      pattern: name in PATTERNS.
      in_features: rows of the weight, a multiple of block.
      out_features: columns of the weight, a multiple of block.
      block: side of a block, in features.
      density: fraction of blocks stored; see `legal_densities`.
      offset: number of this weight in the model, from 0; see `Pattern`.
      reads_residual: whether the weight reads the residual stream (True), writes to it (False), or
        the shape decides (None): one that widens reads.  Only `monarch` depends on it.

    Raises:
      UserError: the pattern is unknown, the block does not divide the weight, or no balanced layout
        has this density; names the legal values.

    Examples:
        >>> layout = sd.make_layout("monarch", 1024, 4096, block=64, density=0.125)
        >>> layout.nnz, layout.density, layout.balanced
        (128, 0.125, True)
    """
    if pattern not in PATTERNS:
        raise UserError(f"Pattern {pattern!r} is unknown; legal: {', '.join(sorted(PATTERNS))}.")
    if offset < 0:
        raise UserError(f"offset={offset} is not legal: it must be 0 or more.")
    in_blocks, out_blocks = _grid(in_features, out_features, block)
    ring = math.gcd(in_blocks, out_blocks)
    # In a balanced layout all inputs, and all outputs, have equally many blocks.  So the number of
    # blocks is a multiple of both sides: each density is a multiple of 1 / gcd of the sides.
    degree = _degree(density, ring)
    if not degree:
        sides = [
            str(side)
            for side in _legal_blocks(in_features, out_features)
            if _degree(density, math.gcd(in_features, out_features) // side)
        ]
        others = f", or this density with block={' or '.join(sides)}" if sides else ""
        raise UserError(
            f"Density {density:g} has no balanced layout on a grid of {in_blocks} x {out_blocks} "
            f"blocks of {block}; legal: multiples of 1/{ring} ({1 / ring:.4g}) up to 1{others}."
        )
    if degree == ring:
        mask = np.ones((in_blocks, out_blocks), bool)
    else:
        role = {"reads_residual": reads_residual} if pattern in BY_ROLE else {}
        mask = PATTERNS[pattern](in_blocks, out_blocks, degree, offset, **role)
    return BlockLayout.from_mask(mask, block)


def legal_densities(in_features: int, out_features: int, block: int) -> list[float]:
    """Returns the densities that `make_layout` accepts, ascending: the multiples of 1/ring.

    Args:
      in_features: rows of the weight, a multiple of block.
      out_features: columns of the weight, a multiple of block.
      block: side of a block, in features.

    Raises:
      UserError: the block does not divide the weight; names the legal blocks.

    Examples:
        >>> sd.legal_densities(64, 128, block=16)
        [0.25, 0.5, 0.75, 1.0]
    """
    ring = math.gcd(*_grid(in_features, out_features, block))
    return [k / ring for k in range(1, ring + 1)]


def has_layout(in_blocks: int, out_blocks: int, density: float) -> bool:
    """Whether a grid has a balanced layout of the density."""
    return _degree(density, math.gcd(in_blocks, out_blocks)) > 0


def _degree(density, ring):
    """Stored blocks in a ring of the grid at this density; 0 where they are no whole number."""
    # A density of text, such as 0.33333, is taken for the fraction that it means.
    degree = round(density * ring)
    whole = 1 <= degree <= ring and math.isclose(degree, density * ring, rel_tol=1e-6)
    return degree if whole else 0


def _legal_blocks(in_features, out_features):
    """The sides from 8 to 512 that divide both features."""
    width = math.gcd(in_features, out_features)
    return [side for side in range(8, min(width, 512) + 1) if width % side == 0]


def _grid(in_features, out_features, block):
    if block < 1 or in_features % block or out_features % block:
        legal = _legal_blocks(in_features, out_features)
        raise UserError(
            f"Block {block} does not divide a {in_features} x {out_features} weight; "
            f"legal blocks up to 512: {', '.join(map(str, legal)) or 'none from 8 up'}."
        )
    return in_features // block, out_features // block


def from_permutations(
    permutations: Iterable[np.ndarray], in_blocks: int, out_blocks: int
) -> np.ndarray:
    """Returns the mask of a union of ring permutations, each cell expanded to its rectangle.

    Args:
      permutations: int [ring] arrays p; output cell j reads input cell p[j].  Disjoint permutations
        give a balanced mask.
      in_blocks: input blocks of the grid.
      out_blocks: output blocks of the grid.

    Returns:
      bool [in_blocks, out_blocks].
    """
    ring = math.gcd(in_blocks, out_blocks)
    cells = np.zeros((ring, ring), bool)
    for permutation in permutations:
        cells[permutation, np.arange(ring)] = True
    # Each cell of the ring becomes a rectangle of blocks.
    return np.kron(cells, np.ones((in_blocks // ring, out_blocks // ring), bool))


def _butterfly_permutations(ring: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the ring permutations, except the identity, of a generalised block butterfly.

    `ring` is `odd` times `low`, its largest factor that is a power of two.  Cell (m, i) of the
    odd x low grid moves to (m + shift, i xor flip).  All these permutations are disjoint.

    Returns:
      (strides, compound moves).  A stride moves one coordinate by a power of two, as a butterfly
      factor does.  The rest are compound moves.
    """
    # The lowest set bit: 12 = 0b1100 gives 4, so cells form a grid of 3 x 4.  Where a cell goes
    # determines shift and flip, so no two permutations agree on any cell.
    low = ring & -ring
    odd = ring // low
    cell = np.arange(ring)
    major, minor = cell // low, cell % low
    strides: list[np.ndarray] = []
    compound: list[np.ndarray] = []
    for shift in range(odd):
        for flip in range(low):
            if shift == flip == 0:
                continue
            permutation = (major + shift) % odd * low + (minor ^ flip)
            distance = min(shift, odd - shift)
            power_of_two = flip & (flip - 1) == 0 and distance & (distance - 1) == 0
            is_stride = power_of_two and (shift == 0 or flip == 0)
            (strides if is_stride else compound).append(permutation)
    return strides, compound


@register("pixelfly")
def pixelfly(in_blocks: int, out_blocks: int, degree: int, offset: int) -> np.ndarray:
    """Flat block butterfly: the diagonal and the smallest strides (arXiv 2112.00029, section 3.2).

    Equal in every layer; combine it with a low-rank term (`rank`) for global mixing.
    """
    ring = math.gcd(in_blocks, out_blocks)
    strides, compound = _butterfly_permutations(ring)
    return from_permutations([np.arange(ring), *strides, *compound][:degree], in_blocks, out_blocks)


@register("butterfly")
def butterfly(in_blocks: int, out_blocks: int, degree: int, offset: int) -> np.ndarray:
    """Block butterfly factors over depth: the diagonal plus strides that rotate with `offset`.

    Successive weights hold successive factors of a butterfly (arXiv 1903.05895, section 3), so
    that every output block depends on every input block after log2(ring) weights.
    """
    ring = math.gcd(in_blocks, out_blocks)
    strides, compound = _butterfly_permutations(ring)
    # The diagonal takes one of the `degree` places.  So a weight uses degree - 1 strides, and the
    # next weight starts where this one ends.
    start = offset * (degree - 1) % max(1, len(strides))
    rotated = strides[start:] + strides[:start]
    return from_permutations([np.arange(ring), *rotated, *compound][:degree], in_blocks, out_blocks)


@register("monarch", by_role=True)
def monarch(
    in_blocks: int,
    out_blocks: int,
    degree: int,
    offset: int,
    reads_residual: bool | None = None,
) -> np.ndarray:
    """One block diagonal of equal groups behind a permutation of its input blocks.

    A Monarch matrix (arXiv 2204.00595, section 3) is a product of two of these.  All blocks of a
    group are stored, so a group is one dense product (`BlockLayout.groups`), and its output blocks
    are contiguous.  Where a weight reads the residual stream (qkv or q, k and v; mlp_gate, mlp_in),
    the stride of a group's input blocks is the number of groups; where it writes to the residual
    stream (attn_out, mlp_out), they are contiguous.  Groups thus stay apart within attention and
    within the MLP, whose hidden features then never leave a group's device or fast memory, and the
    next half of a block reads from every group, up to its fan-in.  So if a group has at least as
    many residual blocks as there are groups, every output depends on every input after three
    projections, wherever they start.

    Groups that have a single residual block cannot mix there.  Then weights that read the residual
    stream read contiguous inputs and the others read at a stride.

    A weight of unknown role reads the residual stream if it widens.

    Raises:
      UserError: `degree` does not divide the ring.
    """
    groups = _group_count("monarch", in_blocks, out_blocks, degree)
    reads = in_blocks < out_blocks if reads_residual is None else reads_residual
    # Readers are strided and writers contiguous.  With one residual block per group (`>` is False)
    # both are the other way round.  Equal booleans say that in one line.
    strided = reads == ((in_blocks if reads else out_blocks) > groups)
    in_group = np.arange(in_blocks) % groups if strided else _contiguous(in_blocks, groups)
    return in_group[:, None] == _contiguous(out_blocks, groups)


@register("shuffle")
def shuffle(in_blocks: int, out_blocks: int, degree: int, offset: int) -> np.ndarray:
    """Monarch's groups, which every weight mixes (ShuffleNet, arXiv 1707.01083).

    The output blocks of a group are contiguous, and the stride of its input blocks is the number of
    groups.  So a group reads from every group of the weight before, up to its fan-in, within
    attention and the MLP too.  Square weights are a generalised de Bruijn graph: every output
    depends on every input after log_degree(ring) of them.

    A square weight whose groups have a single block is diagonal: it does not mix.

    Raises:
      UserError: `degree` does not divide the ring.
    """
    groups = _group_count("shuffle", in_blocks, out_blocks, degree)
    return (np.arange(in_blocks) % groups)[:, None] == _contiguous(out_blocks, groups)


def _group_count(pattern, in_blocks, out_blocks, degree):
    """Returns the number of equal groups; raises UserError where `degree` does not divide."""
    ring = math.gcd(in_blocks, out_blocks)
    if ring % degree:
        legal = [f"{k}/{ring}" for k in range(1, ring + 1) if ring % k == 0]
        raise UserError(
            f"Pattern {pattern!r} has no density of {degree}/{ring} on a grid of {in_blocks} x "
            f"{out_blocks} blocks; legal: {', '.join(legal)}."
        )
    return ring // degree


def _contiguous(blocks, groups):
    """Returns the group of each block, int [blocks], where groups are equal runs."""
    return np.arange(blocks) // (blocks // groups)


@register("cyclic")
def cyclic(in_blocks: int, out_blocks: int, degree: int, offset: int) -> np.ndarray:
    """Power-of-two strides around the ring, rotated with `offset`; balanced for any grid."""
    ring = math.gcd(in_blocks, out_blocks)
    # A stride 2^k reaches every cell of the ring in few weights, as in a butterfly, but on rings of
    # any size.
    powers = [1 << k for k in range((ring - 1).bit_length())]
    # As in `butterfly`: stride 0 takes one place, and each weight goes on where the last one ended.
    start = offset * (degree - 1) % max(1, len(powers))
    rest = [stride for stride in range(1, ring) if stride not in powers]
    strides = [0, *powers[start:], *powers[:start], *rest][:degree]
    cell = np.arange(ring)
    return from_permutations([(cell + stride) % ring for stride in strides], in_blocks, out_blocks)


@register("banded")
def banded(in_blocks: int, out_blocks: int, degree: int, offset: int) -> np.ndarray:
    """A band around the diagonal that wraps around the ring."""
    ring = math.gcd(in_blocks, out_blocks)
    cell = np.arange(ring)
    shifts = range(-((degree - 1) // 2), degree // 2 + 1)
    return from_permutations([(cell + shift) % ring for shift in shifts], in_blocks, out_blocks)


@register("random")
def random(in_blocks: int, out_blocks: int, degree: int, offset: int) -> np.ndarray:
    """A random balanced mask, seeded by `offset`: degree-preserving swaps of a shuffled band."""
    # The grid is part of the seed: projections with equal offsets in other models must not have
    # related masks.
    rng = np.random.default_rng([offset, in_blocks, out_blocks, degree])
    mask = banded(in_blocks, out_blocks, degree, offset)
    mask = mask[rng.permutation(in_blocks)][:, rng.permutation(out_blocks)]
    rows, cols = np.nonzero(mask)
    for _ in range(30):
        # A pair of blocks (r1, c1), (r2, c2) becomes (r1, c2), (r2, c1): no row or column changes
        # its count.  All pairs swap at once.  So a cell that two pairs would fill, or that is
        # stored, is left out, and no two blocks meet.
        order = rng.permutation(len(rows) // 2 * 2).reshape(2, -1)
        (r1, r2), (c1, c2) = rows[order], cols[order]
        new = np.concatenate([r1 * out_blocks + c2, r2 * out_blocks + c1])
        _, inverse, counts = np.unique(new, return_inverse=True, return_counts=True)
        unique = (counts[inverse] == 1).reshape(2, -1).all(0)
        swap = unique & ~mask[r1, c2] & ~mask[r2, c1]
        first, second = order[:, swap]
        mask[rows[first], cols[first]] = mask[rows[second], cols[second]] = False
        cols[first], cols[second] = cols[second].copy(), cols[first].copy()
        mask[rows[first], cols[first]] = mask[rows[second], cols[second]] = True
    return mask


@register("dense")
def dense(in_blocks: int, out_blocks: int, degree: int, offset: int) -> np.ndarray:
    """Every block.

    Raises:
      UserError: always, because `make_layout` builds density 1, the only legal one.
    """
    raise UserError("Pattern 'dense' stores every block; legal density: 1.")
