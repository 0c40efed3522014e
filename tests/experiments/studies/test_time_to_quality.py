"""Where an evaluation curve reaches a loss, and what a training needs until then."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from experiments.studies.time_to_quality import crossing, effort

CURVE = np.array([[100, 4.0], [200, 3.0], [300, 2.5], [400, 2.6]])


@pytest.mark.parametrize(
    ("target", "tokens"),
    [(5.0, 100), (4.0, 100), (3.5, 150), (3.0, 200), (2.6, 280), (2.5, 300), (2.4, None)],
)
def test_a_curve_is_interpolated_between_evaluations(target, tokens):
    assert crossing(CURVE, target) == (tokens if tokens is None else pytest.approx(tokens))


@given(
    st.lists(st.floats(0.5, 5), min_size=2, max_size=20, unique=True),
    st.floats(0, 1),
    st.integers(1, 1000),
)
def test_a_falling_curve_crosses_where_interpolation_gives_the_target(losses, share, spacing):
    bits = np.sort(losses)[::-1]
    tokens = spacing * np.arange(1, len(bits) + 1)
    target = bits[-1] + share * (bits[0] - bits[-1])
    at = crossing(np.column_stack([tokens, bits]), target)
    assert np.interp(at, tokens, bits) == pytest.approx(target, rel=1e-6)


def trainings(steps, curve, shifts=(0,), seconds=(2.0,)):
    """Returns results of a length, of 10 tokens and 1e5 FLOPs a step."""
    half = {"steps": steps, "tokens": 10 * steps, "flops": 1e5 * steps}
    curves = [curve + np.array([0, shift]) for shift in shifts]
    return [
        {**half, "curve": curve, "bits_per_byte": curve[-1, 1], "step_seconds": each}
        for curve, each in zip(curves, seconds, strict=True)
    ]


def test_an_effort_is_the_mean_over_seeds_at_the_speed_of_the_fastest():
    results = {40: trainings(40, CURVE, (-0.25, 0.25, 0), (2.0, 3.0, 2.5))}
    needed = effort(results, 3.5)
    assert needed.tokens == pytest.approx(150)
    assert needed.flops == pytest.approx(1.5e6) and needed.seconds == pytest.approx(15 * 2.0)
    assert effort(results, 1.0) is None


def test_curves_of_a_part_of_the_split_end_at_the_results_of_all_of_it():
    results = trainings(40, CURVE)
    moved = [{**result, "bits_per_byte": result["bits_per_byte"] - 0.5} for result in results]
    assert effort({40: moved}, 3.0).tokens == pytest.approx(effort({40: results}, 3.5).tokens)


def test_between_two_lengths_the_tokens_of_a_training_of_its_own_are_interpolated():
    """Losses that fall by a power law of the tokens are met exactly, whatever the curves inside."""
    law = lambda tokens: 3 - 0.5 * np.log2(tokens / 100)  # noqa: E731
    lengths = {
        steps: trainings(steps, np.array([[5 * steps, 9.0], [10 * steps, law(10 * steps)]]))
        for steps in (10, 40, 160)
    }
    for steps in (10, 20, 40, 57, 160):
        needed = effort(lengths, law(10 * steps))
        assert needed.tokens == pytest.approx(10 * steps)
        assert needed.flops == pytest.approx(1e5 * steps)
        assert needed.seconds == pytest.approx(2.0 * steps)
    assert effort(lengths, law(1601)) is None
    assert effort(lengths, 4.0).tokens < 100


@given(st.lists(st.floats(0.5, 5), min_size=2, max_size=6, unique=True), st.floats(0, 1))
@example([3.7263931610795082, 0.8527141332541335], 1.0)
def test_an_effort_lies_between_the_lengths_whose_losses_enclose_the_target(losses, share):
    lengths = {
        10 * 2**i: trainings(10 * 2**i, np.array([[1, 9.0], [100 * 2**i, bits]]))
        for i, bits in enumerate(losses)
    }
    # Rounding can take the sum below all losses.
    target = max(losses[0] + share * (min(losses) - losses[0]), min(losses))
    needed = effort(lengths, target)
    first = next(i for i, bits in enumerate(losses) if bits <= target)
    assert needed.tokens <= 100 * 2**first * (1 + 1e-9)
    assert first == 0 or needed.tokens >= 100 * 2 ** (first - 1) * (1 - 1e-9)
