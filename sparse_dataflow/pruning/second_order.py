"""Which groups of weights stay: optimal brain surgeon on groups of any shape, in rounds.

Removing a group costs the squared error that remains after all other weights made up for it, which
follows from the inverse of the inputs' second moments (OBC, arXiv 2208.11580, in groups).  Each
round removes the groups that cost least and updates the weights and the inverse, so later rounds
see what earlier ones left.
"""

import numpy as np
from scipy import linalg

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
    for column in range(grid[1]):
        outputs = problem.products[:, column * groups.cols : (column + 1) * groups.cols]
        free = np.ones(grid[0], bool) if allowed is None else allowed[:, column]
        start = inverse, inverse @ outputs, np.arange(grid[0])
        if not free.all():
            start = _without(*start, ~free, groups.rows)
        result[:, column] = _column_costs(*start, groups, grid[0], stay, rounds)
    return result


def select(costs: np.ndarray, groups: Groups, stay: int) -> np.ndarray:
    """Returns bool [in groups, out groups]: the groups of each pool that cost most to remove."""
    pools = costs.reshape(-1, groups.pool or len(costs), costs.shape[1])
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


def _column_costs(inverse, weights, alive, groups, total, stay, rounds):
    """Returns float [total] of the groups of one column, of which `alive` are left."""
    pool, rows = groups.pool or total, groups.rows
    result, last = np.full(total, -np.inf), 0.0
    # Groups of a pool that are not allowed may leave fewer than stay.
    present = max(np.bincount(alive // pool, minlength=total // pool).tolist())
    for number in range(1, rounds + 1):
        goal = round(present * (stay / present) ** (number / rounds)) if present > stay else stay
        scores = np.maximum(_scores(inverse, weights, rows), last)
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
        inverse, weights, alive = _without(inverse, weights, alive, going, rows)
    return result


def _scores(inverse, weights, rows):
    """Returns float [groups], the squared error that removing each adds."""
    if rows == 1:
        return np.square(weights).sum(1) / np.diag(inverse)
    count = len(weights) // rows
    diagonal = np.einsum("nink->nik", inverse.reshape(count, rows, count, rows))
    parts = weights.reshape(count, rows, -1)
    return np.einsum("nij,nij->n", parts, np.linalg.solve(diagonal, parts))


def _cheapest(scores, pools, goal):
    """Returns bool [groups]: those that cost least, so that each pool has `goal` left."""
    order = np.lexsort((-scores, pools))  # By pool, dearest first.
    starts = np.searchsorted(pools[order], pools[order])
    going = np.zeros(len(scores), bool)
    going[order] = np.arange(len(scores)) - starts >= goal
    return going


def _without(inverse, weights, alive, going, rows):
    """Returns (inverse, weights, groups) after some groups went and the others made up for them."""
    gone, left = (np.flatnonzero(np.repeat(each, rows)) for each in (going, ~going))
    factor = linalg.cho_factor(inverse[np.ix_(gone, gone)], check_finite=False)
    gain = linalg.cho_solve(factor, inverse[np.ix_(gone, left)], check_finite=False)
    weights = weights[left] - gain.T @ weights[gone]
    inverse = inverse[np.ix_(left, left)] - inverse[np.ix_(left, gone)] @ gain
    return inverse, weights, alive[~going]
