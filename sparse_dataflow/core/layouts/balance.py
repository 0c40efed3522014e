"""Balanced masks of highest score: maximum-weight b-matchings of input and output blocks."""

import numpy as np

from sparse_dataflow.files.errors import UserError

TOLERANCE = 1e-9
"""Tolerance of the total score, relative to the largest score."""


def balanced_top(
    scores: np.ndarray, fan_in: int, fan_out: int, forbidden: np.ndarray | None = None
) -> np.ndarray:
    """Returns the mask of highest total score with constant fan-in and fan-out.

    This is a linear program over the transportation polytope with unit capacities.  Its matrix is
    totally unimodular, so its vertices are integral (Schrijver, Combinatorial Optimization, section
    21.2).  Column generation solves it: it starts from the best blocks of each row and column, and
    adds blocks of positive reduced profit until none is left, so the result is optimal over all
    blocks.

    Args:
      scores: finite float [in_blocks, out_blocks].
      fan_in: True blocks of every column (output block).
      fan_out: True blocks of every row (input block).
      forbidden: bool [in_blocks, out_blocks]; blocks that must be False.  None for none.

    Returns:
      bool [in_blocks, out_blocks]; deterministic.

    Raises:
      UserError: no such mask exists, or `scores` is not a finite matrix.
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 2 or not np.all(np.isfinite(scores)):
        raise UserError("Block scores are not legal; legal: a matrix of finite numbers.")
    free = np.ones(scores.shape, bool) if forbidden is None else ~np.asarray(forbidden, bool)
    row_need, col_need = (np.full(n, fan) for n, fan in zip(scores.shape, (fan_out, fan_in)))
    feasible = _any_completion(free, row_need, col_need)
    if feasible is None:
        raise UserError(
            f"No layout on a grid of {scores.shape[0]} x {scores.shape[1]} blocks has fan-in "
            f"{fan_in} and fan-out {fan_out} with {(~free).sum()} blocks forbidden."
        )
    if not feasible.any():
        return feasible
    # Scores may be of any size, as norms of gradients are; the search compares sums with
    # tolerances.
    scale = np.abs(scores[free]).max() or 1.0
    return _best_completion(scores / scale, free, row_need, col_need, feasible)


def _any_completion(allowed, row_need, col_need):
    """Returns a mask of allowed blocks that meets all row and column needs, by maximum flow.

    None if there is no such mask.
    """
    total = int(row_need.sum())
    if min(row_need.min(), col_need.min()) < 0 or total != int(col_need.sum()):
        return None
    mask = np.zeros(allowed.shape, bool)
    if total == 0:
        return mask
    from scipy import sparse  # Imported here, because fixed layouts do not need scipy.

    rows, cols = np.nonzero(allowed)
    in_blocks, out_blocks = allowed.shape
    source, sink = in_blocks + out_blocks, in_blocks + out_blocks + 1
    # Edges from the source to each row, of the capacity of its need; from rows to columns, one for
    # each allowed block, of capacity 1; and from each column to the sink.
    tails = np.r_[np.full(in_blocks, source), rows, in_blocks + np.arange(out_blocks)]
    heads = np.r_[np.arange(in_blocks), in_blocks + cols, np.full(out_blocks, sink)]
    capacity = np.r_[row_need, np.ones(len(rows), int), col_need].astype(np.int32)
    graph = sparse.csr_array((capacity, (tails, heads)), shape=(sink + 1, sink + 1))
    flow = sparse.csgraph.maximum_flow(graph, source, sink)
    if flow.flow_value != total:
        return None
    used = flow.flow[:in_blocks, in_blocks:source].tocoo()
    mask[used.row[used.data > 0], used.col[used.data > 0]] = True
    return mask


def _best_completion(scores, allowed, row_need, col_need, feasible):
    """Returns the mask of allowed blocks of highest score that meets all row and column needs.

    `feasible` is any such mask.
    """
    candidates = feasible | (allowed & _line_tops(scores, allowed, row_need, col_need))
    while True:
        chosen, row_price, col_price = _solve(scores, candidates, row_need, col_need)
        # Reduced profit: what a block adds beyond the prices of its row and its column.
        gain = scores - row_price[:, None] - col_price
        profitable = allowed & ~candidates & (gain > TOLERANCE)
        if not profitable.any():
            return chosen
        candidates |= profitable


def _line_tops(scores, allowed, row_need, col_need):
    """Returns a mask of the best 2 * need + 4 blocks of each row and column."""
    ranked = np.where(allowed, scores, -np.inf)
    # argsort of an argsort gives ranks.
    by_row = np.argsort(np.argsort(-ranked, axis=1, kind="stable"), axis=1, kind="stable")
    by_col = np.argsort(np.argsort(-ranked, axis=0, kind="stable"), axis=0, kind="stable")
    return (by_row < 2 * row_need[:, None] + 4) | (by_col < 2 * col_need + 4)


def _solve(scores, candidates, row_need, col_need):
    """Solves the program over candidates; returns (mask, prices of the rows, of the columns)."""
    from scipy import optimize, sparse

    rows, cols = np.nonzero(candidates)
    count, lines = len(rows), len(row_need) + len(col_need)
    matrix = sparse.csr_array(
        (np.ones(2 * count), (np.r_[rows, len(row_need) + cols], np.tile(np.arange(count), 2))),
        shape=(lines, count),
    )
    solution = optimize.linprog(
        -scores[rows, cols],
        A_eq=matrix,
        b_eq=np.r_[row_need, col_need],
        bounds=(0, 1),
        method="highs-ds",
        options={"dual_feasibility_tolerance": 1e-10, "primal_feasibility_tolerance": 1e-10},
    )
    if solution.status != 0:
        raise RuntimeError(f"The linear program was not solved: {solution.message}")
    chosen = np.zeros(candidates.shape, bool)
    # The dual simplex ends in a vertex, which has only zeros and ones up to rounding.  An interior
    # point method could end between equally good masks, where a bound of 0.5 gives wrong counts.
    chosen[rows, cols] = solution.x > 0.5
    # The program minimises the negative score, so prices have the other sign.
    prices = -solution.eqlin.marginals
    return chosen, prices[: len(row_need)], prices[len(row_need) :]
