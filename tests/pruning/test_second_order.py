"""Selection and refit of one projection, against numpy and other orders of the same arithmetic."""

import numpy as np
import pytest

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.pruning import refit, second_order
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.moments import Moments
from sparse_dataflow.pruning.refit import Problem


def drawn(seed, tokens=400, ins=24, outs=16, rank=None):
    """Correlated inputs, a kernel, and its outputs."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((rank or ins, ins)) / np.sqrt(np.arange(1, ins + 1))
    x = rng.standard_normal((tokens, rank or ins)) @ mixing + 0.3
    kernel = rng.standard_normal((ins, outs))
    return x, kernel, x @ kernel


def exact_problem(x, y, kernel, damping=0.0):
    return Problem.of(Moments.of(x, y), kernel, damping)


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_moments_of_batches_are_those_of_all_tokens(parts):
    x, kernel, y = drawn(parts)
    moments = sum(
        (Moments.of(*each) for each in zip(np.array_split(x, parts), np.array_split(y, parts))),
        start=Moments.of(x[:0], y[:0]),
    )
    other = kernel + 0.1
    expected = np.square(x @ other - y).sum() / np.square(y).sum()
    np.testing.assert_allclose(moments.error(other), expected, rtol=1e-9)
    centred = x - x.mean(0), y - y.mean(0)
    expected = np.square(centred[0] @ other - centred[1]).sum() / np.square(centred[1]).sum()
    centred = moments.about(x.mean(0), y.mean(0))
    np.testing.assert_allclose(centred.error(other), expected, rtol=1e-9)


@pytest.mark.parametrize("shape", ["1", "1x8", "4", "6x2", "2:4"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_refit_is_least_squares_on_its_support(shape, seed):
    x, kernel, y = drawn(seed)
    y = y + np.random.default_rng(seed).standard_normal(y.shape)
    groups, problem = Groups.parse(shape), exact_problem(x, y, kernel)
    stay = groups.count(kernel.shape, 0.5)
    chosen = second_order.select(second_order.costs(problem, groups, stay, rounds=3), groups, stay)
    mask = second_order.expanded(chosen, groups)
    weights = refit.refit(problem, mask, groups.cols)
    for column in range(y.shape[1]):
        support = mask[:, column]
        best, *_ = np.linalg.lstsq(x[:, support], y[:, column], rcond=None)
        np.testing.assert_allclose(weights[support, column], best, rtol=1e-6, atol=1e-9)
        assert not weights[~support, column].any()


@pytest.mark.parametrize("shape", ["1", "1x4", "4x4", "6x2"])
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_groups_go_in_the_order_of_the_error_that_each_adds(shape, seed):
    """Greedy by brute force: every candidate is fitted anew by numpy."""
    x, kernel, y = drawn(seed, ins=12, outs=4)
    groups, problem = Groups.parse(shape), exact_problem(x, y, kernel)
    rows, stay = groups.grid(kernel.shape)[0], 1
    costs = second_order.costs(problem, groups, stay, rounds=100)
    outputs = y[:, : groups.cols]

    def error(left):
        inputs = x[:, np.repeat(left, groups.rows)]
        best, *_ = np.linalg.lstsq(inputs, outputs, rcond=None)
        return np.square(inputs @ best - outputs).sum()

    left, before = np.ones(rows, bool), 0.0
    order = np.argsort(costs[:, 0], kind="stable")
    for group in order[: rows - stay]:
        errors = {other: error(left & (np.arange(rows) != other)) for other in np.flatnonzero(left)}
        assert errors[group] == pytest.approx(min(errors.values()), rel=1e-6)
        assert costs[group, 0] >= (errors[group] - before) * (1 - 1e-6)
        left[group], before = False, errors[group]


@pytest.mark.parametrize(
    ("shape", "pool"), [("1", 24), ("4", 6), ("1x16", 24), ("2:4", 4), ("1:3", 3)]
)
@pytest.mark.parametrize("rounds", [1, 2, 16])
def test_every_pool_keeps_equally_many_groups(shape, pool, rounds):
    x, kernel, y = drawn(6)
    groups = Groups.parse(shape)
    stay = groups.count(kernel.shape, None if groups.pool else 0.5)
    costs = second_order.costs(exact_problem(x, y, kernel), groups, stay, rounds)
    chosen = second_order.select(costs, groups, stay)
    counts = chosen.reshape(-1, pool, chosen.shape[1]).sum(1)
    assert (counts == stay).all()


def test_groups_that_are_gone_stay_away():
    x, kernel, y = drawn(7)
    groups, allowed = Groups.parse("2"), np.random.default_rng(0).random((12, 8)) < 0.7
    allowed[:6] = True
    costs = second_order.costs(exact_problem(x, y, kernel), groups, 6, 3, allowed)
    chosen = second_order.select(costs, groups, 6)
    assert not (chosen & ~allowed).any()
    assert (chosen.sum(0) == 6).all()


@pytest.mark.parametrize("shape", ["1", "4", "1x16", "2:4", "3:6"])
def test_rounds_lower_the_error(shape):
    x, kernel, y = drawn(8, ins=48, outs=32)
    groups, problem = Groups.parse(shape), exact_problem(x, y, kernel)
    stay, moments = groups.count(kernel.shape, 0.5), Moments.of(x, y)
    errors = []
    for rounds in (1, 16):
        costs = second_order.costs(problem, groups, stay, rounds)
        mask = second_order.expanded(second_order.select(costs, groups, stay), groups)
        errors.append(moments.error(refit.refit(problem, mask, groups.cols)))
    assert errors[1] < errors[0]


def sparse_gpt(hessian, kernel, density, lines, axis=None):
    """SparseGPT as its section 3 describes it: one input after the other leaves the inverse.

    The weights of a run are compared with all others (axis None) or within their output (axis 0).
    """
    weights, size = kernel.copy(), len(kernel)
    for start in range(0, size, lines):
        inverse = np.linalg.inv(hessian[start:, start:])
        diagonal, rest = [], inverse.copy()
        for _ in range(min(lines, size - start)):
            diagonal.append(rest[0, 0])
            rest = rest[1:, 1:] - np.outer(rest[1:, 0], rest[0, 1:]) / rest[0, 0]
        run = slice(start, start + len(diagonal))
        scores = np.square(weights[run]) / np.array(diagonal)[:, None]
        gone = scores < np.quantile(scores, 1 - density, axis=axis)
        for line, row in enumerate(range(start, start + len(diagonal))):
            lost = np.where(gone[line], weights[row], 0) / inverse[0, 0]
            weights[row:] -= np.outer(inverse[:, 0], lost)
            inverse = inverse[1:, 1:] - np.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
        weights[run][gone] = 0
    return weights


@pytest.mark.parametrize("exact", [10**9, 0], ids=["exact rounds", "rounds of gradients"])
@pytest.mark.parametrize(("seed", "density", "lines"), [(0, 0.5, 128), (1, 0.5, 8), (2, 0.25, 16)])
def test_rounds_and_a_refit_have_a_lower_error_than_sparse_gpt(
    seed, density, lines, exact, monkeypatch
):
    monkeypatch.setattr(second_order, "EXACT", exact)
    x, kernel, y = drawn(seed, ins=64, outs=48)
    problem, moments, groups = exact_problem(x, y, kernel, 0.01), Moments.of(x, y), Groups.parse(1)
    expected = min(
        moments.error(sparse_gpt(problem.hessian, kernel, density, lines, axis))
        for axis in (None, 0)
    )
    stay = round(density * 64)
    mask = second_order.select(second_order.costs(problem, groups, stay, 8), groups, stay)
    assert moments.error(refit.refit(problem, mask)) < 0.85 * expected


@pytest.mark.parametrize("shape", ["1", "1x4", "4", "6x2", "2:4"])
@pytest.mark.parametrize("seed", [13, 14])
def test_rounds_of_gradients_have_nearly_the_error_of_exact_rounds(shape, seed, monkeypatch):
    x, kernel, y = drawn(seed, ins=96, outs=32)
    groups, problem = Groups.parse(shape), exact_problem(x, y, kernel, 0.01)
    stay, moments = groups.count(kernel.shape, 0.5), Moments.of(x, y)
    allowed = np.random.default_rng(seed).random(groups.grid(kernel.shape)) < 0.95

    def error(rounds, limit):
        monkeypatch.setattr(second_order, "EXACT", limit)
        costs = second_order.costs(problem, groups, stay, rounds, allowed)
        chosen = second_order.select(costs, groups, stay)
        assert not (chosen & ~allowed).any()
        mask = second_order.expanded(chosen, groups)
        return moments.error(refit.refit(problem, mask, groups.cols))

    exact, gradients, one_round = error(8, 10**9), error(8, 0), error(1, 10**9)
    assert exact < one_round and gradients < one_round
    assert gradients < 1.1 * exact
    assert error(1, 0) < 1.1 * one_round


@pytest.mark.parametrize("damping", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("shape", ["1", "1x4", "4"])
def test_conjugate_gradients_find_the_least_squares_weights(shape, damping):
    x, kernel, y = drawn(12, ins=96, outs=16)
    groups, problem = Groups.parse(shape), exact_problem(x, y, kernel, damping)
    stay, moments = groups.count(kernel.shape, 0.5), Moments.of(x, y)
    mask = second_order.select(second_order.costs(problem, groups, stay), groups, stay)
    mask = second_order.expanded(mask, groups)
    weights = refit.by_gradients(problem, mask)
    assert not weights[~mask].any()
    expected = moments.error(refit.refit(problem, mask, groups.cols))
    assert moments.error(weights) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("damping", [1e-6, 1e-2, 1.0])
def test_damping_alone_changes_no_weight(damping):
    x, kernel, _ = drawn(9)
    x[:, 3] = 0  # An input that no token has.
    problem = exact_problem(x, x @ kernel, kernel, damping)
    weights = refit.refit(problem, np.ones(kernel.shape, bool), kernel.shape[1])
    np.testing.assert_allclose(weights, kernel, atol=1e-6)


@pytest.mark.parametrize("text", ["0", "16x0", "4:2", "0:2", "x", "1x2x3", "", "2:2", "-4"])
def test_other_shapes_are_refused(text):
    with pytest.raises(UserError, match=r"is not legal; legal: 16 or 16x16 .*2:4"):
        Groups.parse(text)


@pytest.mark.parametrize(
    ("shape", "density", "words"),
    [
        ("5", 0.5, "do not divide a 24 x 16 matrix"),
        ("4", 0.4, r"legal: multiples of 1/6 up to 1"),
        ("1", 0.0, r"legal: multiples of 1/24"),
        ("2:4", 0.25, r"legal: 0.5, or none"),
        ("2:5", None, "do not divide"),
    ],
)
def test_a_density_that_no_layout_has_is_refused(shape, density, words):
    with pytest.raises(UserError, match=words):
        Groups.parse(shape).count((24, 16), density)
