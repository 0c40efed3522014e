"""The balanced layout of highest score: a maximum-weight b-matching of input and output blocks."""

import numpy as np

from sparse_dataflow.files.errors import UserError

TOLERANCE = 1e-9
"""How far from the highest a result may lie, relative to the largest score."""


def balanced_top(
    scores: np.ndarray,
    fan_in: int,
    fan_out: int,
    kept: np.ndarray | None = None,
    forbidden: np.ndarray | None = None,
) -> np.ndarray:
    """The mask of highest total score in which fan-in and fan-out are constant.

    A linear program over the transportation polytope with capacities of 1, whose corners are whole
    numbers (its matrix is totally unimodular: Schrijver, Combinatorial Optimization, section 21.2).
    It is solved over the best blocks of each line first; blocks that its prices call profitable
    join until there are none, so the result is that of the whole program.

    Args:
      scores: finite float [in_blocks, out_blocks].
      fan_in: True blocks of every column (output block).
      fan_out: True blocks of every row (input block).
      kept: bool [in_blocks, out_blocks]; blocks that must be True.  None for none.
      forbidden: bool [in_blocks, out_blocks]; blocks that must be False.  None for none.

    Returns:
      bool [in_blocks, out_blocks], the same for the same arguments.

    Raises:
      UserError: no such mask exists.
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 2 or not np.all(np.isfinite(scores)):
        raise UserError("Scores of blocks are a matrix of finite numbers.")
    kept = np.zeros(scores.shape, bool) if kept is None else np.asarray(kept, bool)
    closed = kept if forbidden is None else kept | np.asarray(forbidden, bool)
    contradiction = forbidden is not None and bool(np.any(kept & np.asarray(forbidden, bool)))
    row_need, col_need = fan_out - kept.sum(axis=1), fan_in - kept.sum(axis=0)
    seed = _any_completion(~closed, row_need, col_need)
    if seed is None or contradiction:
        raise UserError(
            f"No layout on a grid of {scores.shape[0]} x {scores.shape[1]} blocks has fan-in "
            f"{fan_in} and fan-out {fan_out} with {int(kept.sum())} blocks kept and "
            f"{int((closed & ~kept).sum())} forbidden."
        )
    if not seed.any():
        return kept.copy()
    scale = np.abs(scores[~closed]).max() or 1.0
    chosen = _best_completion(scores / scale, ~closed, row_need, col_need, seed)
    return kept | chosen


def _any_completion(allowed, row_need, col_need):
    """Allowed blocks that meet every line's need, found as a maximum flow; None without any."""
    total = int(row_need.sum())
    if min(row_need.min(), col_need.min()) < 0 or total != int(col_need.sum()):
        return None
    mask = np.zeros(allowed.shape, bool)
    if total == 0:
        return mask
    from scipy import sparse  # A third of a second with optimize; a fixed layout needs neither.

    rows, cols = np.nonzero(allowed)
    in_blocks, out_blocks = allowed.shape
    source, sink = in_blocks + out_blocks, in_blocks + out_blocks + 1
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


def _best_completion(scores, allowed, row_need, col_need, seed):
    """The allowed blocks of highest score that meet every line's need, as `seed` does."""
    candidates = seed | (allowed & _line_tops(scores, allowed, row_need, col_need))
    while True:
        chosen, row_price, col_price = _solve(scores, candidates, row_need, col_need)
        gain = scores - row_price[:, None] - col_price
        profitable = allowed & ~candidates & (gain > TOLERANCE)
        if not profitable.any():
            return chosen
        candidates |= profitable


def _line_tops(scores, allowed, row_need, col_need):
    """The best blocks of each row and column: twice as many as it needs, and four."""
    ranked = np.where(allowed, scores, -np.inf)
    by_row = np.argsort(np.argsort(-ranked, axis=1, kind="stable"), axis=1, kind="stable")
    by_col = np.argsort(np.argsort(-ranked, axis=0, kind="stable"), axis=0, kind="stable")
    return (by_row < 2 * row_need[:, None] + 4) | (by_col < 2 * col_need + 4)


def _solve(scores, candidates, row_need, col_need):
    """(chosen mask, price of a block more in each row, in each column)."""
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
        raise RuntimeError(f"the balancing program was not solved: {solution.message}")
    chosen = np.zeros(candidates.shape, bool)
    chosen[rows, cols] = solution.x > 0.5
    prices = -solution.eqlin.marginals
    return chosen, prices[: len(row_need)], prices[len(row_need) :]
