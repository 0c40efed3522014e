"""Densities by projection and depth: the measured rises, and the choice of the least sum."""

import itertools
import types

import jax
import numpy as np
import pytest
from small_models import DENSE, arbitrary_params

from experiments import density_search as experiment
from experiments.studies import density_choice, density_search, study
from experiments.studies.density_choice import EQUAL, FIRST, Choice
from sparse_dataflow.core.config.layer_groups import layer_linear
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.teacher import Teacher
from sparse_dataflow.data.batches import EvalBatches, TrainBatches
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import chips
from sparse_dataflow.runs.allocation import allocate
from sparse_dataflow.runs.run_config import preset

H100 = chips.lookup("h100")
LEVELS, MULTIPLES = (0.25, 0.5, 0.75, 1.0), (0.5, 1.0, 1.5)
NAMES = ("qkv", "attn_out", "mlp_in", "mlp_out")


def base(**changes):
    """A study of `pico` without a corpus."""
    config = preset("pico").change(**{"sparsity__pattern": "cyclic", **changes})
    tokenizer = types.SimpleNamespace(vocab_size=512)
    return study.Study(config, None, tokenizer, H100)


def space(chip=None, levels=LEVELS, budgets=(0.5,), **changes):
    options = experiment.Options(densities=levels, depth=MULTIPLES, budgets=budgets)
    return density_search.Space(base(**changes), options, chip)


def drawn_rises(keys, seed=0):
    """Rises at eighths that fall with the density, each in its own way."""
    rng = np.random.default_rng(seed)
    eighths = np.arange(1, 8) / 8
    return {
        key: dict(zip(eighths, np.sort(rng.exponential(rng.exponential(), 7))[::-1]))
        for key in keys
    }


def test_the_choice_is_that_of_trying_every_legal_budget():
    chosen_from = space()
    rises = drawn_rises(chosen_from.keys)
    model = base().variant("sparse", sparsity__density=0.5).model
    most = cost.flops_per_token(model, 64, training=False).projections

    def predicted(allocated):
        """The sum of the measured rises; None below them."""
        total = 0.0
        for name, layer in itertools.product(NAMES, range(2)):
            density = layer_linear(allocated, name, layer).density
            if density < min(LEVELS):
                return None
            total += rises[name, layer].get(density, 0.0) if density < 1 else 0.0
        return total

    expected = []
    for densities in itertools.product(LEVELS, repeat=4):
        for depth in ("1x,1x", "0.5x,1.5x", "1.5x,0.5x"):
            names = ",".join(f"{name}:{d}" for name, d in zip(NAMES, densities))
            try:
                allocated = allocate(model, f"{names},depth:{depth}")
            except UserError:
                continue
            flops = cost.flops_per_token(allocated, 64, training=False).projections
            rise = predicted(allocated)
            if rise is not None and density_choice.SPENT * most <= flops <= most * (1 + 1e-9):
                expected.append((rise, allocated))
    expected.sort(key=lambda pair: pair[0])
    order = chosen_from.ranked(rises, 0.5)
    assert len(order) == len(expected) >= 10 and len({c.depth for c in order}) == 3
    np.testing.assert_allclose([c.rise for c in order], [rise for rise, _ in expected], rtol=1e-9)
    assert allocate(model, order[0].budget) == expected[0][1]


def test_equal_density_is_always_a_choice_and_costs_the_budget():
    for chip in (None, H100):
        chosen_from = space(chip)
        order = chosen_from.ranked(drawn_rises(chosen_from.keys), 0.5)
        [equal] = [c for c in order if c.is_flat and {*c.densities.values()} == {0.5}]
        assert equal.cost == pytest.approx(1.0)
        assert all(density_choice.SPENT <= c.cost <= 1 + 1e-9 for c in order)


def test_seconds_of_a_chip_are_those_of_the_planner_and_not_flops():
    flops, seconds = (space(chip).costs for chip in (None, H100))
    share = {
        name: [costs[name][0.5] / sum(each[0.5] for each in costs.values()) for name in NAMES]
        for name, costs in (("flops", flops), ("seconds", seconds))
    }
    assert share["flops"] == pytest.approx([1 / 4, 1 / 12, 1 / 3, 1 / 3])
    assert share["seconds"] != pytest.approx(share["flops"], rel=1e-3)


def test_a_rise_is_interpolated_and_never_less_at_a_lower_density():
    rise = density_choice.curve({0.125: 0.8, 0.25: 0.9, 0.5: -0.1, 0.75: 0.3})
    rises = [rise(d) for d in (1.0, 0.75, 0.5, 0.25, 0.125)]
    assert rises == pytest.approx([0, 0.3, 0.3, 0.9, 0.9])
    assert rise(0.125**0.5) == pytest.approx(0.6)  # Halfway from 1/2 to 1/4 in the logarithm.


def test_multiples_over_the_depth_have_a_mean_of_one():
    assert density_choice.profiles(2, MULTIPLES) == [(1, 1), (0.5, 1.5), (1.5, 0.5)]
    three = density_choice.profiles(3, MULTIPLES)
    assert len(three) == len({*three}) == 7 and all(sum(each) == 3 for each in three)
    assert density_choice.profiles(3, (2.0,)) == [(1, 1, 1)]


def choice(rise, *densities, depth=(1.0, 1.0)):
    return Choice(dict(zip(NAMES, densities)), depth, 1.0, rise)


def test_the_first_choice_is_compared_with_four_others():
    order = [choice(n, 0.25, 0.5, 0.75, n) for n in range(9)]
    order[4] = choice(4, 0.5, 0.5, 0.5, 0.5)
    order[2] = choice(2, 0.25, 0.25, 1.0, 1.0, depth=(0.5, 1.5))
    chosen = density_choice.compared(order, 0.5)
    # Equal density is in the middle, too.
    assert {name: order.index(c) for name, c in chosen.items()} == {
        FIRST: 0, "unequal over depth": 2, EQUAL: 4, "last": 8, "rank 2": 1,
    }  # fmt: skip
    assert order[2].budget == "qkv:0.25,attn_out:0.25,mlp_in:1,mlp_out:1,depth:0.5x,1.5x"


@pytest.fixture
def measurement(monkeypatch, tmp_path):
    """A measurement of a model whose mlp_in is stored in blocks in its second layer already."""
    config, rng = DENSE, np.random.default_rng(0)
    training = preset("pico").change(training__sequence=16, training__batch=4).training
    params = jax.tree.map(np.array, arbitrary_params(config, scale=0.5))
    layout = make_layout("cyclic", *config.projection_shape("mlp_in"), 8, 0.5)
    params["blocks"]["mlp_in"]["kernel"][1] *= np.kron(layout.mask, np.ones((8, 8)))
    monkeypatch.setattr(study, "trained", lambda *arguments: Teacher(config, params))
    tokens = rng.integers(0, config.vocab_size, 3000).astype(np.int32)
    windows = EvalBatches(tokens, 4, 16, 16)
    data = types.SimpleNamespace(train=TrainBatches(tokens, 4, 16), validation=windows)
    tokenizer = types.SimpleNamespace(content_hash="")
    dense = types.SimpleNamespace(training=training)
    fake = types.SimpleNamespace(tokenizer=tokenizer)
    return density_search.Measurement(fake, dense, data, tmp_path)


def test_pruning_to_the_blocks_that_a_weight_has_costs_nothing(measurement):
    whole = measurement.loss(measurement.model.params, measurement._windows)
    there = measurement.pruned("mlp_in", range(1, 2), 0.5, 8) - whole
    elsewhere = measurement.pruned("mlp_in", range(1), 0.5, 8) - whole
    assert abs(there) < 1e-4 < 1e-3 < abs(elsewhere)
    assert measurement.pruned("mlp_in", range(0), 0.5, 8) == pytest.approx(whole, abs=1e-5)


def test_a_rise_is_measured_once(measurement, tmp_path):
    first = measurement._once("qkv", lambda: measurement._whole + 0.5)
    assert measurement._once("qkv", lambda: 0.0) == first == pytest.approx(0.5)
    assert study.read_result(tmp_path / "rises") == {"qkv": first}


def test_no_zeros_cost_nothing_and_a_projections_zeros_are_its_own(measurement):
    whole = measurement.loss(measurement.model.params, measurement._windows)
    assert measurement._zeroed({}, measurement._windows) == pytest.approx(whole, abs=1e-6)
    some = measurement._zeroed({"mlp_in": 0.9}, measurement._windows)
    assert abs(some - whole) > 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"levels": (0.3,)}, "Density 0.3 has no balanced layout"),
        ({"budgets": (0.3,)}, "Density 0.3 has no balanced layout"),
        ({"sparsity__pattern": "masked", "sparsity__block": 16}, "stores no blocks"),
    ],
)
def test_what_has_no_layout_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        space(**changes)


def test_too_many_choices_are_refused():
    costs = {str(name): {n / 64: n for n in range(1, 65)} for name in range(8)}
    with pytest.raises(UserError, match="too many"):
        density_choice.ranked({(name, 0): {} for name in costs}, costs, 8)


def test_the_first_choice_is_judged_by_the_best_trained_one():
    bits = {FIRST: (2.0, 2.1), EQUAL: (2.1, 2.2), "last": (1.9, 2.3)}
    results = [
        {"density": 0.5, "choice": name, "seed": seed, "bits_per_byte": value}
        for name, values in bits.items()
        for seed, value in enumerate(values)
    ]
    text = density_search.trained_table(results)
    assert "the first choice is 0.00% behind the best of these, within 1%" in text
    assert "| 0.5 | first | 2.0500 | 2 | -4.65% ± 0.11% |" in text
    worse = [{**r, "bits_per_byte": 1.0} if r["choice"] == "last" else r for r in results]
    assert "105.00% behind the best of these, not within 1%" in density_search.trained_table(worse)
