"""Muon: momentum whose matrices are orthogonalised (K. Jordan 2024; arXiv 2502.16982).

The arithmetic is that of `optax.contrib.muon` with `consistent_rms=0.2`, on the last two axes of
any stack: a dense kernel [layers, in, out] as whole matrices, stored blocks [layers, nnz, block,
block] one by one, a grouped weight [layers, groups, in, out] by group. Orthogonalising the parts of
a matrix separately loses no quality (MuonBP, arXiv 2510.16981).

Every function takes numpy and jax arrays, so that the relay's optimizer on the host is the same.
optax merges the leading axes into one; here they stay apart, because merging sharded axes gathers
them. So a device orthogonalises the blocks that it holds, without communication.
"""

import math
from typing import Any

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

MATRICES = ("kernel", "values")
"""Leaves that Muon updates: the weights of projections, without their low-rank terms."""


def is_matrix(path: tuple) -> bool:
    """Returns whether Muon updates the leaf at a `jax.tree_util` path."""
    return getattr(path[-1], "key", None) in MATRICES


def without_matrices(tree: Any) -> Any:
    """Returns a tree like the params without the leaves that Muon updates."""
    if isinstance(tree, dict):
        return {k: without_matrices(v) for k, v in tree.items() if k not in MATRICES}
    return tuple(map(without_matrices, tree)) if isinstance(tree, tuple) else tree


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
      momentum: float32 [..., m, n] with the gradient in it; see `with_gradient`.
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
