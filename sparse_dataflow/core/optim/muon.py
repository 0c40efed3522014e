"""Muon: momentum whose matrices are orthogonalised (K. Jordan 2024; arXiv 2502.16982).

The arithmetic is that of `optax.contrib.muon` with `consistent_rms=0.2`, on the last two axes of
any stack: a dense kernel [layers, in, out] as whole matrices, the dense groups of a layout that has
them [layers, groups, in, out] one by one, else each stored block (see `Matrices`). Orthogonalising
the parts of a matrix separately loses no quality (MuonBP, arXiv 2510.16981), unless they are tiny.

Every function takes numpy and jax arrays, so that the relay's optimizer on the host is the same.
optax merges the leading axes into one; here they stay apart, because merging sharded axes gathers
them. So a device orthogonalises the blocks that it holds, without communication.
"""

import dataclasses
import math
from typing import Any

from sparse_dataflow.core.layouts.layout import Groups, LayoutTables

MOMENTUM = 0.95
"""Decay rate of the momentum, which is Nesterov's."""

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Newton-Schulz steps, and their coefficients: singular values end between 0.68 and 1.14 unless
they are below 1/100 of the matrix's norm."""

EPS = 1e-8
RMS = 0.2
"""Root mean square of a matrix's update, in units of the learning rate; that of AdamW (arXiv
2502.16982, section 2.2)."""

FACTORS = ("a_factor", "b_factor")
"""Leaves of a weight that is only a product, [in, r] and [r, out]; see `with_bounded_products`."""

MATRICES = ("kernel", "values", *FACTORS)
"""Leaves that Muon updates: the weights of projections, without their low-rank terms."""

SQUARINGS, TINY = 4, 1e-30
"""Squarings in `spectral_bound`, and what it adds to divisors that may be 0."""


def is_matrix(path: tuple) -> bool:
    """Returns whether Muon updates the leaf at a `jax.tree_util` path."""
    return getattr(path[-1], "key", None) in MATRICES


def without_matrices(tree: Any) -> Any:
    """Returns a tree like the params without the leaves that Muon updates."""
    if isinstance(tree, dict):
        return {k: without_matrices(v) for k, v in tree.items() if k not in MATRICES}
    return tuple(map(without_matrices, tree)) if isinstance(tree, tuple) else tree


@dataclasses.dataclass(frozen=True)
class Matrices:
    """How the stored form of a weight makes up the matrices that Muon orthogonalises.

    Attributes:
      unit: shape of the smallest part of the stored form that has whole matrices: a matrix
        (inputs, outputs), or (blocks, block, block) of one group or more.
      groups: groups of a unit; None if the unit is a matrix.
      in_blocks: input blocks of a unit.
      out_blocks: output blocks of a unit.
    """

    unit: tuple[int, ...]
    groups: Groups | None = None
    in_blocks: int = 0
    out_blocks: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs of a matrix."""
        if self.groups is None:
            return self.unit[0], self.unit[1]
        sides = self.in_blocks // self.groups.in_parts, self.out_blocks // self.groups.out_parts
        return sides[0] * self.unit[-1], sides[1] * self.unit[-1]

    def join(self, stored: Any) -> Any:
        """Returns the matrices [..., inputs, outputs] of a numpy or jax array [..., n, *block].

        The axis of the stored blocks becomes two: units, and the groups of a unit.
        """
        if self.groups is None:
            return stored
        units = stored.reshape(*stored.shape[:-3], -1, *self.unit)
        return self.groups.join(units, self.in_blocks, self.out_blocks)

    def split(self, matrices: Any) -> Any:
        """Returns the stored form of what `join` returned."""
        if self.groups is None:
            return matrices
        units = self.groups.split(matrices, self.in_blocks, self.out_blocks)
        return units.reshape(*units.shape[:-4], -1, *self.unit[1:])


def matrices_of(shape: tuple[int, ...], layout: LayoutTables | None) -> Matrices:
    """Returns the matrices of a weight.

    Args:
      shape: of its stored form: [..., inputs, outputs], or [..., nnz, block, block].
      layout: tables of its layout, as the executor has them; None for a dense weight.  Without
        `groups`, as those of layouts that change, each stored block is a matrix.  If devices share
        the weight, the groups are those of a device.
    """
    if layout is None or layout.groups is None:
        return Matrices(tuple(shape[-2:]))
    groups = layout.groups
    in_blocks, out_blocks = layout.out_index.shape[-2], layout.in_index.shape[-2]
    sides = in_blocks // groups.in_parts, out_blocks // groups.out_parts
    if sides[1] == groups.out_run:  # The blocks of a group follow one another.
        groups, (in_blocks, out_blocks) = Groups(1, *sides), sides
    unit = (groups.count * sides[0] * sides[1], *shape[-2:])
    return Matrices(unit, groups, in_blocks, out_blocks)


def with_gradient(momentum: Any, gradient: Any) -> Any:
    """Returns the momentum after a gradient."""
    return MOMENTUM * momentum + (1 - MOMENTUM) * gradient


def update(momentum: Any, gradient: Any, number: Any) -> Any:
    """Returns the update of a stack of matrices, before learning rate and weight decay.

    The scale of an m x n matrix is RMS sqrt(max(m, n)): an orthogonal one has a root mean square of
    1 / sqrt(max(m, n)). So each stored weight moves as far as under AdamW, whatever the size of its
    block or group, and learning rates, their multipliers and weight decay mean the same. An
    output's change still grows with the inputs that it sums: see `learning_rate_multipliers`.

    Args:
      momentum: float32 [..., m, n] with the gradient in it; see `with_gradient`, `Matrices.join`.
      gradient: float32 [..., m, n].
      number: index of the update, from 1.
    """
    # Nesterov's momentum, each part with its own bias correction, as in optax.
    ahead = momentum * (MOMENTUM / (1 - MOMENTUM ** (number + 1)))
    ahead = ahead + gradient * ((1 - MOMENTUM) / (1 - MOMENTUM**number))
    return orthogonalize(ahead) * (RMS * math.sqrt(max(momentum.shape[-2:])))


def orthogonalize(stack: Any) -> Any:
    """Returns the nearest semi-orthogonal matrix of every [m, n] of [..., m, n], roughly.

    Newton-Schulz: a matrix of zeros stays zero.
    """
    first, second, third = COEFFICIENTS
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.swapaxes(-1, -2) if tall else stack
    x = x / ((x * x).sum((-2, -1), keepdims=True) ** 0.5 + EPS)
    for _ in range(STEPS):
        a = x @ x.swapaxes(-1, -2)
        x = first * x + (second * a + third * (a @ a)) @ x
    return x.swapaxes(-1, -2) if tall else x


def with_bounded_products(updates: Any, params: Any) -> Any:
    """Returns updates whose two factors move their product as far as a dense weight moves.

    Spectron (arXiv 2602.12429, algorithm 1) orthogonalises the momentum of both factors and divides
    the learning rate by |A| + |B| + 1, spectral norms.  A product then changes by dA B + A dB +
    dA dB, whose norm is at most the learning rate if that is at most 1.  Here the learning rate is
    the norm of a dense weight's update, RMS sqrt(max(in, out)) times the rate.  The paper estimates
    the norms by one step of power iteration from a stored vector; `spectral_bound` stores nothing.

    Args:
      updates: a tree like the params, from `update`.
      params: before the update.
    """
    if isinstance(updates, tuple):
        return tuple(map(with_bounded_products, updates, params))
    if not isinstance(updates, dict):
        return updates
    if FACTORS[0] not in updates:
        return {name: with_bounded_products(updates[name], params[name]) for name in updates}
    scales = product_scales(*(params[name] for name in FACTORS))
    scaled = {name: updates[name] * scale for name, scale in zip(FACTORS, scales)}
    return {**updates, **scaled}


def product_scales(first: Any, second: Any) -> tuple[Any, Any]:
    """Returns the factors [..., 1, 1] of the updates of two factors; see `with_bounded_products`.

    Args:
      first: float32 [..., inputs, rank], before the update.
      second: float32 [..., rank, outputs].
    """
    (inputs, rank), outputs = first.shape[-2:], second.shape[-1]
    norms = spectral_bound(first) + spectral_bound(second)
    scale = math.sqrt(max(inputs, outputs)) / (norms + 1)
    return scale / math.sqrt(max(inputs, rank)), scale / math.sqrt(max(rank, outputs))


def spectral_bound(stack: Any) -> Any:
    """Returns an upper bound of the largest singular value of every [m, n] of [..., m, n].

    Returns:
      [..., 1, 1], at most min(m, n)^(1/64) times the singular value: the Frobenius norm of a power
      of the smaller Gram matrix, by SQUARINGS squarings.
    """
    across = stack.swapaxes(-1, -2)
    power = across @ stack if stack.shape[-2] > stack.shape[-1] else stack @ across
    bound: Any = 1.0
    for squaring in range(SQUARINGS + 1):
        if squaring:
            power = power @ power
        size = (power * power).sum((-2, -1), keepdims=True) ** 0.5
        bound = bound * size ** (0.5 ** (squaring + 1))
        power = power / (size + TINY)
    return bound
