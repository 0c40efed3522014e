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
from typing import TYPE_CHECKING, Any

from sparse_dataflow.core.layouts.layout import Groups, LayoutTables

if TYPE_CHECKING:
    from sparse_dataflow.core.batch import Array

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

    def join(self, stored: "Array") -> "Array":
        """Returns the matrices [..., inputs, outputs] of a numpy or jax array [..., n, *block].

        The axis of the stored blocks becomes two: units, and the groups of a unit.
        """
        if self.groups is None:
            return stored
        units = stored.reshape(*stored.shape[:-3], -1, *self.unit)
        return self.groups.join(units, self.in_blocks, self.out_blocks)

    def split(self, matrices: "Array") -> "Array":
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
    in_blocks, out_blocks = layout.grid[-2:]
    sides = in_blocks // groups.in_parts, out_blocks // groups.out_parts
    if sides[1] == groups.out_run:  # The blocks of a group follow one another.
        groups, (in_blocks, out_blocks) = Groups(1, *sides), sides
    unit = (groups.count * sides[0] * sides[1], *shape[-2:])
    return Matrices(unit, groups, in_blocks, out_blocks)


def with_gradient(momentum: Any, gradient: Any) -> Any:
    """Returns the momentum after a gradient."""
    return MOMENTUM * momentum + (1 - MOMENTUM) * gradient


def update(momentum: "Array", gradient: "Array", number: "Array | int") -> "Array":
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


def orthogonalize(stack: "Array") -> "Array":
    """Returns the nearest semi-orthogonal matrix of every [m, n] of [..., m, n], roughly.

    Newton-Schulz: a matrix of zeros stays zero.
    """
    first, second, third = COEFFICIENTS
    # x x^T is then the smaller Gram matrix; the transpose is orthogonalised alike.
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.swapaxes(-1, -2) if tall else stack
    # The iteration wants singular values of at most 1, which the Frobenius norm bounds.
    x = x / ((x * x).sum((-2, -1), keepdims=True) ** 0.5 + EPS)
    for _ in range(STEPS):
        a = x @ x.swapaxes(-1, -2)
        # Singular values s become a s + b s^3 + c s^5; singular vectors stay.
        x = first * x + (second * a + third * (a @ a)) @ x
    return x.swapaxes(-1, -2) if tall else x
