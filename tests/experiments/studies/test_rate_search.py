"""The search for a learning rate."""

import math

from hypothesis import given
from hypothesis import strategies as st

from experiments.studies.rate_search import best_multiplier, is_bracketed, next_multiplier


def searched(loss, trials):
    losses = {}
    for _ in range(trials):
        multiplier = next_multiplier(losses)
        assert multiplier not in losses
        losses[multiplier] = loss(multiplier)
    return losses


@given(st.floats(-3, 3), st.floats(0.1, 10))
def test_ten_trials_find_the_best_rate_of_a_convex_loss(optimum, curvature):
    losses = searched(lambda m: 2 + curvature * (math.log2(m) - optimum) ** 2, 10)
    assert abs(math.log2(best_multiplier(losses)) - optimum) <= 0.5 and is_bracketed(losses)


def test_rates_that_diverge_are_left_downward():
    losses = searched(lambda m: math.inf if m > 0.1 else 2 - math.log2(m) / 100, 6)
    assert best_multiplier(losses) <= 0.1 and math.isfinite(min(losses.values()))


def test_the_first_trials_are_the_recipe_and_its_neighbours():
    assert list(searched(lambda m: abs(math.log2(m)) + 1, 3)) == [1, 2, 0.5]
    assert not is_bracketed({1.0: 2.0, 2.0: 1.9})
