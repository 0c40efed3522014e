"""Balanced masks of highest score: equal to brute force, balanced, without forbidden blocks."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from sparse_dataflow.core.layouts.balance import balanced_top
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.files.errors import UserError


def every_mask(in_blocks, out_blocks, fan_in, fan_out):
    """All balanced masks, column by column."""
    columns = [
        np.isin(np.arange(in_blocks), rows)
        for rows in itertools.combinations(range(in_blocks), fan_in)
    ]
    for chosen in itertools.product(columns, repeat=out_blocks):
        mask = np.stack(chosen, axis=1)
        if np.all(mask.sum(axis=1) == fan_out):
            yield mask


@st.composite
def tiny_problems(draw):
    """(integer scores, fan_in, fan_out, forbidden) on at most 4 x 4 blocks."""
    in_blocks, out_blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ring = math.gcd(in_blocks, out_blocks)
    degree = draw(st.integers(1, ring))
    blocks = st.lists(
        st.integers(0, 9), min_size=in_blocks * out_blocks, max_size=in_blocks * out_blocks
    )
    grid = lambda: np.reshape(draw(blocks), (in_blocks, out_blocks))  # noqa: E731
    forbidden = grid() > 7
    return grid(), degree * in_blocks // ring, degree * out_blocks // ring, forbidden


@settings(max_examples=150)
@given(tiny_problems())
def test_the_score_is_the_best_of_all_masks(problem):
    scores, fan_in, fan_out, forbidden = problem
    every = every_mask(*scores.shape, fan_in, fan_out)
    legal = [mask for mask in every if not mask[forbidden].any()]
    if not legal:
        with pytest.raises(UserError, match=f"fan-in {fan_in} and fan-out {fan_out}"):
            balanced_top(scores, fan_in, fan_out, forbidden)
        return
    result = balanced_top(scores, fan_in, fan_out, forbidden)
    assert any(np.array_equal(result, mask) for mask in legal)
    assert scores[result].sum() == max(scores[mask].sum() for mask in legal)


@settings(max_examples=25)
@given(st.sampled_from([(8, 32, 2), (32, 8, 1), (12, 18, 2), (16, 16, 16)]), st.integers(0, 99))
def test_fans_are_constant_and_forbidden_blocks_stay_empty(grid, seed):
    in_blocks, out_blocks, degree = grid
    rng = np.random.default_rng(seed)
    ring = math.gcd(in_blocks, out_blocks)
    layout = make_layout("random", in_blocks * 8, out_blocks * 8, 8, degree / ring, seed)
    forbidden = ~layout.mask & (rng.random(layout.mask.shape) < 0.7)
    scores = rng.lognormal(sigma=6, size=forbidden.shape)
    fan_in, fan_out = int(layout.fan_in[0]), int(layout.fan_out[0])
    mask = balanced_top(scores, fan_in, fan_out, forbidden)
    assert set(mask.sum(axis=0)) == {fan_in} and set(mask.sum(axis=1)) == {fan_out}
    assert not mask[forbidden].any()
    assert scores[mask].sum() >= scores[layout.mask].sum() * (1 - 1e-9)
    np.testing.assert_array_equal(balanced_top(scores, fan_in, fan_out, forbidden), mask)


def test_the_result_does_not_depend_on_the_scale_of_scores():
    scores = np.random.default_rng(3).normal(size=(9, 6))
    mask = balanced_top(scores, 3, 2)
    for factor in (1e-20, 1e12):
        np.testing.assert_array_equal(balanced_top(scores * factor, 3, 2), mask)
    assert balanced_top(np.zeros((4, 4)), 1, 1).sum() == 4


@pytest.mark.parametrize("bad", [np.full((2, 2), np.nan), np.full((2, 2), np.inf), np.ones(4)])
def test_scores_that_are_not_finite_matrices_are_refused(bad):
    with pytest.raises(UserError, match="finite"):
        balanced_top(bad, 1, 1)


def test_degrees_that_do_not_fit_the_grid_are_refused():
    with pytest.raises(UserError, match="4 x 6 blocks has fan-in 1 and fan-out 1"):
        balanced_top(np.ones((4, 6)), 1, 1)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_are_the_best_of_no_line_are_considered(seed):
    """All inputs prefer the same outputs, so most of the best pairs are the best of neither."""
    rng = np.random.default_rng(seed)
    scores = np.outer(rng.random(30), rng.random(30))
    expected = np.zeros(scores.shape, bool)
    expected[linear_sum_assignment(scores, maximize=True)] = True
    np.testing.assert_array_equal(balanced_top(scores, 1, 1), expected)
