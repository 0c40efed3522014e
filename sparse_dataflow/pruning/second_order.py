"""Which groups of weights stay: optimal brain surgeon on groups of any shape, in rounds.

Removing a group costs the squared error that remains after all other weights made up for it, which
follows from the inverse of the inputs' second moments (OBC, arXiv 2208.11580, in groups).  Each
round removes the groups that cost least and updates the weights, so later rounds see what earlier
ones left.  Where it takes little time, the diagonal of the inverse is updated too.
"""

import numpy as np
from scipy import linalg

from sparse_dataflow.pruning.columns import for_each
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.refit import RUN, Problem, descend, runs

STEP = 1e-9
"""Least relative difference of the costs of two rounds, so that they order the groups."""
DESCENT = 4
"""Steps of conjugate gradients after a round."""
EXACT = 4
"""Inputs for each round and output of a group, up to which exact rounds take less time."""


def costs(
    problem: Problem,
    groups: Groups,
    stay: int,
    rounds: int = 1,
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """Returns float [in groups, out groups], what removing each group costs.

    A group that an earlier round removes costs less than all that stay; groups that are not allowed
    cost -inf.

    Args:
      problem: moments of the projection.
      groups: what is kept or removed together.
      stay: groups of each pool that stay.
      rounds: in how many rounds the others go.
      allowed: bool [in groups, out groups] that may stay; None for all.
    """
    shape = problem.products.shape
    grid = groups.grid(shape)
    result = np.full(grid, -np.inf)
    alive = np.ones(grid, bool) if allowed is None else allowed
    # [groups, rows, groups, rows]: entry (n, i, n, k) is of one group.
    squares = problem.inverse.reshape(grid[0], groups.rows, grid[0], groups.rows)
    # The diagonal blocks of the inverse, one for each input group: they alone price a removal.
    diagonal = np.einsum("nink->nik", squares).copy()
    is_exact = shape[0] <= EXACT * rounds * groups.cols
    kind, width = (_Exact, 1) if is_exact else (_Near, max(1, RUN // groups.cols))
    solution = problem.solution if is_exact else problem.single[2]

    def store(columns):
        outputs = slice(columns.start * groups.cols, columns.stop * groups.cols)
        left = kind(problem, outputs, solution, diagonal.copy(), groups.cols)
        result[:, columns] = _costs(left, alive[:, columns], groups, stay, rounds)

    for_each(store, runs(grid[1], width), shape[0])
    return result


def select(costs: np.ndarray, groups: Groups, stay: int) -> np.ndarray:
    """Returns bool [in groups, out groups]: the groups of each pool that cost most to remove."""
    pools = costs.reshape(-1, groups.pool or len(costs), costs.shape[1])
    # The cost of the last group that stays, in each pool and output.
    least = np.partition(pools, -stay, axis=1)[:, -stay, None]
    mask, equal = pools > least, pools == least
    # Equal costs keep the groups of the lowest numbers, on every machine.
    mask |= equal & (np.cumsum(equal, 1) <= stay - mask.sum(1, keepdims=True))
    return mask.reshape(costs.shape) & np.isfinite(costs)


def expanded(mask: np.ndarray, groups: Groups) -> np.ndarray:
    """Returns a mask of groups as a mask of weights."""
    return np.repeat(np.repeat(mask, groups.rows, 0), groups.cols, 1)


class _Near:
    """What is left of some outputs when groups of weights went, by a few steps of gradients.

    The diagonal of the inverse stays that of all inputs: in SmolLM2 this changes the error by less
    than a further round.

    Attributes:
      weights: [in, out], of which those that stay made up for the others.
    """

    def __init__(self, problem, outputs, solution, diagonal, cols):
        self._problem, self._outputs, self._cols = problem, outputs, cols
        self._diagonal, self.weights = diagonal, solution[:, outputs].copy()
        self._mask = np.ones(self.weights.shape, bool)
        self._lifted = np.empty((0, len(solution)))

    def remove(self, going: np.ndarray) -> None:
        """Removes groups, bool [groups, out groups], and lets the others make up for them."""
        rows = self._diagonal.shape[1]
        self._mask &= ~np.repeat(np.repeat(going, rows, 0), self._cols, 1)
        self.weights *= self._mask
        descend(self._problem, self._mask, self.weights, self._outputs, DESCENT)

    def scores(self) -> np.ndarray:
        """Returns [groups, out groups], the squared error that removing each group adds."""
        groups, rows, _ = self._diagonal.shape
        if rows == 1:
            errors = np.square(self.weights) / self._diagonal[:, 0]
        else:
            # Of a group of inputs: wᵀ (its block of the inverse)⁻¹ w (optimal brain surgeon).
            parts = self.weights.reshape(groups, rows, -1)
            errors = np.einsum("nij,nij->nj", parts, np.linalg.solve(self._diagonal, parts))
        return errors.reshape(groups, -1, self._cols).sum(2, dtype=np.float64)


class _Exact(_Near):
    """The same of one group of outputs, exactly.

    The inverse of the other inputs is `inverse - liftedᵀ lifted`, of which later rounds need the
    diagonal and the lines of what goes next.
    """

    def remove(self, going: np.ndarray) -> None:
        """See `_Near`."""
        diagonal, inverse = self._diagonal, self._problem.inverse
        rows = diagonal.shape[1]
        lines = np.flatnonzero(np.repeat(going, rows))
        inverse = inverse[lines] - self._lifted[:, lines].T @ self._lifted
        # Removing lines G subtracts inverse[:, G] inverse[G, G]^-1 inverse[G, :], which is L^T L
        # with L = factor^-1 inverse[G, :].
        factor = linalg.cholesky(inverse[:, lines], lower=True, check_finite=False)
        # Of transposed arrays, which BLAS takes without a copy.
        lifted = linalg.blas.dtrsm(1.0, factor.T, inverse.T, side=1, overwrite_b=True).T
        lost = linalg.solve_triangular(factor, self.weights[lines], lower=True, check_finite=False)
        self.weights -= lifted.T @ lost
        if rows == 1:
            diagonal[:, 0, 0] -= np.einsum("ti,ti->i", lifted, lifted)
        else:
            blocks = lifted.T.reshape(-1, rows, len(lines))
            diagonal -= blocks @ blocks.swapaxes(1, 2)
        diagonal[going[:, 0]] = np.eye(rows)  # Nothing is left there, which would be divided by.
        self._lifted = np.concatenate([self._lifted, lifted])


def _costs(left, alive, groups, stay, rounds):
    """Returns float64 [groups, out groups] of some outputs, of which `alive` may stay."""
    if not alive.all():
        left.remove(~alive)
    shape, pools = alive.shape, (-1, groups.pool or len(alive), alive.shape[1])
    result, last = np.full(shape, -np.inf), np.zeros(())
    # Groups of a pool that are not allowed may leave fewer than stay.
    present = alive.reshape(pools).sum(1).max()
    for number in range(1, rounds + 1):
        # Each round removes the same fraction of what is left, so late rounds remove few groups.
        goal = round(present * (stay / present) ** (number / rounds)) if present > stay else stay
        scores = left.scores()
        staying = alive & select(np.where(alive, scores, -np.inf), groups, goal)
        going = alive & ~staying
        # What goes later costs more than what went from the same pool.
        scores = np.maximum(scores.reshape(pools), last)
        most = scores.max(1, where=going.reshape(pools), initial=0.0, keepdims=True)
        last = np.maximum(last, most * (1 + STEP))
        result = np.where(alive, scores.reshape(shape), result)
        if number < rounds and going.any():
            left.remove(going)
            alive = staying
    above = np.maximum(result.reshape(pools), last).reshape(shape)
    return np.where(staying, above, result)
