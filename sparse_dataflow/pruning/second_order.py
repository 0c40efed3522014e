"""Which groups of weights stay: optimal brain surgeon on groups of any shape, in rounds.

Removing a group costs the squared error that remains after all other weights made up for it, which
follows from the inverse of the inputs' second moments (OBC, arXiv 2208.11580, in groups).  Each
round removes the groups that cost least and updates the weights and the diagonal of the inverse, so
later rounds see what earlier ones left.
"""

import numpy as np
from scipy import linalg

from sparse_dataflow.pruning.columns import for_each
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.refit import Problem

STEP = 1e-9
"""Least relative difference of the costs of two rounds, so that they order the groups."""


def costs(
    problem: Problem,
    groups: Groups,
    stay: int,
    rounds: int = 1,
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """Returns float64 [in groups, out groups], what removing each group costs.

    A group that an earlier round removes costs less than all that stay; groups that are not allowed
    cost -inf.

    Args:
      problem: moments of the projection.
      groups: what is kept or removed together.
      stay: groups of each pool that stay.
      rounds: in how many rounds the others go.
      allowed: bool [in groups, out groups] that may stay; None for all.
    """
    grid = groups.grid(problem.products.shape)
    result = np.full(grid, -np.inf)
    inverse = problem.inverse
    solution = inverse @ problem.products
    squares = inverse.reshape(grid[0], groups.rows, grid[0], groups.rows)
    # The diagonal blocks of the inverse, one for each input group: they alone price a removal.
    diagonal = np.einsum("nink->nik", squares).copy()

    def store(column):
        outputs = solution[:, column * groups.cols : (column + 1) * groups.cols]
        left = _Left(inverse, outputs.copy(), diagonal.copy())
        alive = np.arange(grid[0])
        if allowed is not None and not allowed[:, column].all():
            left.remove(np.flatnonzero(~allowed[:, column]))
            alive = np.flatnonzero(allowed[:, column])
        result[:, column] = _column_costs(left, alive, groups, grid[0], stay, rounds)

    for_each(store, range(grid[1]), len(inverse))
    return result


def select(costs: np.ndarray, groups: Groups, stay: int) -> np.ndarray:
    """Returns bool [in groups, out groups]: the groups of each pool that cost most to remove."""
    pools = costs.reshape(-1, groups.pool or len(costs), costs.shape[1])
    # Stable: equal costs keep the groups of the lowest numbers, on every machine.
    order = np.argsort(-pools, axis=1, kind="stable")[:, :stay]
    mask = np.zeros(pools.shape, bool)
    np.put_along_axis(mask, order, True, axis=1)
    return mask.reshape(costs.shape) & np.isfinite(costs)


def expanded(mask: np.ndarray, groups: Groups) -> np.ndarray:
    """Returns a mask of groups as a mask of weights."""
    return np.repeat(np.repeat(mask, groups.rows, 0), groups.cols, 1)


def by_columns(
    problem: Problem, groups: Groups, stay: int, lines: int = 128, equal: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Prunes single weights in the order of SparseGPT (arXiv 2301.00774, algorithm 1).

    Inputs go one by one; what each loses is made up for by those that follow.  One inverse serves
    all outputs, so it costs in³ + in² out.

    Args:
      problem: moments of the projection; the dense solution is what is pruned.
      groups: of single weights.
      stay: weights of each pool that stay.
      lines: inputs of a run, in which the weights of an output are compared with each other; of
        N of M a run is a pool.
      equal: whether equally many weights of each output stay.  As published, those of a run do not
        differ by outputs.

    Returns:
      float64 [in, out] weights, and bool [in, out] those that stay.
    """
    inverse = problem.inverse
    weights = inverse @ problem.products
    # Row i of the factor is, up to a scale, the row of the inverse that the inputs from i on have
    # by themselves.  So one factor serves all steps (GPTQ, arXiv 2210.17323, step 3).
    upper = linalg.cholesky(inverse, check_finite=False)
    size, outputs = weights.shape
    lines = groups.pool or lines
    mask = np.zeros(weights.shape, bool)
    for start in range(0, size, lines):
        run = slice(start, min(start + lines, size))
        left = stay if groups.pool else round(stay * run.stop / size) - round(stay * start / size)
        scores = np.square(weights[run] / np.diag(upper)[run, None])
        if equal:
            best = np.argsort(-scores, axis=0, kind="stable")[:left]
            np.put_along_axis(mask[run], best, True, axis=0)
        else:
            best = np.argsort(-scores, axis=None, kind="stable")[: left * outputs]
            mask[run].flat[best] = True
        lost = np.zeros((run.stop - start, outputs))
        for line in range(start, run.stop):
            lost[line - start] = np.where(mask[line], 0, weights[line]) / upper[line, line]
            weights[line : run.stop] -= np.outer(upper[line, line : run.stop], lost[line - start])
        weights[run.stop :] -= upper[run, run.stop :].T @ lost
    return np.where(mask, weights, 0), mask


class _Left:
    """What is left of a group of outputs when some groups of weights went.

    The inverse of the other inputs is `inverse - liftedᵀ lifted`, of which later rounds need the
    diagonal and the lines of what goes next.

    Attributes:
      weights: float64 [in, cols], of which those that stay made up for the others.
      diagonal: float64 [groups, rows, rows], the squares of each group in the inverse.
    """

    def __init__(self, inverse: np.ndarray, weights: np.ndarray, diagonal: np.ndarray):
        self._inverse, self.weights, self.diagonal = inverse, weights, diagonal
        self._lifted = np.empty((0, len(inverse)))

    def remove(self, going: np.ndarray) -> None:
        """Removes groups, and lets the others make up for them."""
        rows = self.diagonal.shape[1]
        lines = (going[:, None] * rows + np.arange(rows)).ravel()
        inverse = self._inverse[lines] - self._lifted[:, lines].T @ self._lifted
        factor = linalg.cholesky(inverse[:, lines], lower=True, check_finite=False)
        # Of transposed arrays, which BLAS takes without a copy.
        lifted = linalg.blas.dtrsm(1.0, factor.T, inverse.T, side=1, overwrite_b=True).T
        lost = linalg.solve_triangular(factor, self.weights[lines], lower=True, check_finite=False)
        self.weights -= lifted.T @ lost
        if rows == 1:
            self.diagonal[:, 0, 0] -= np.einsum("ti,ti->i", lifted, lifted)
        else:
            blocks = lifted.T.reshape(-1, rows, len(lines))
            self.diagonal -= blocks @ blocks.swapaxes(1, 2)
        self._lifted = np.concatenate([self._lifted, lifted])

    def scores(self, alive: np.ndarray) -> np.ndarray:
        """Returns float [alive], the squared error that removing each group adds."""
        diagonal = self.diagonal[alive]
        parts = self.weights.reshape(len(self.diagonal), diagonal.shape[1], -1)[alive]
        if diagonal.shape[1] == 1:
            return np.square(parts).sum((1, 2)) / diagonal[:, 0, 0]
        # Of a group of inputs: wᵀ (its block of the inverse)⁻¹ w (optimal brain surgeon).
        return np.einsum("nij,nij->n", parts, np.linalg.solve(diagonal, parts))


def _column_costs(left, alive, groups, total, stay, rounds):
    """Returns float [total] of the groups of one column, of which `alive` are left."""
    pool = groups.pool or total
    result, last = np.full(total, -np.inf), 0.0
    # Groups of a pool that are not allowed may leave fewer than stay.
    present = max(np.bincount(alive // pool, minlength=total // pool).tolist())
    for number in range(1, rounds + 1):
        goal = round(present * (stay / present) ** (number / rounds)) if present > stay else stay
        scores = np.maximum(left.scores(alive), last)
        going = _cheapest(scores, alive // pool, goal)
        if number == rounds or not going.any():
            result[alive] = scores
            result[alive[~going]] = np.maximum(
                scores[~going], scores[going].max(initial=0.0) * (1 + STEP)
            )
            if number == rounds:
                break
            continue
        result[alive[going]] = scores[going]
        last = float(scores[going].max()) * (1 + STEP)
        left.remove(alive[going])
        alive = alive[~going]
    return result


def _cheapest(scores, pools, goal):
    """Returns bool [groups]: those that cost least, so that each pool has `goal` left."""
    order = np.lexsort((-scores, pools))  # By pool, dearest first.
    starts = np.searchsorted(pools[order], pools[order])
    going = np.zeros(len(scores), bool)
    going[order] = np.arange(len(scores)) - starts >= goal
    return going
