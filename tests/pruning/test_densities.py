"""Densities by projection: the least summed cost at equal kept weights."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_dataflow as sd
from sparse_dataflow.core.model import stacks
from sparse_dataflow.pruning import densities, layer_by_layer
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.projection import Target, prune


@settings(max_examples=30, deadline=None)
@given(
    rates=st.lists(st.floats(0.5, 12), min_size=2, max_size=3),
    scales=st.lists(st.floats(0.01, 10), min_size=3, max_size=3),
    density=st.sampled_from([0.25, 0.5, 0.75]),
)
def test_no_other_densities_of_equal_sizes_cost_less(rates, scales, density):
    """Against all combinations, for costs that are convex in the density."""
    legal = {str(n): [each / 8 for each in range(1, 9)] for n in range(len(rates))}
    curves = {
        name: scale * (np.exp(-rate * np.array(legal[name])) - np.exp(-rate))
        for name, rate, scale in zip(legal, rates, scales)
    }
    shares = densities.shared_out(curves, legal, dict.fromkeys(legal, 1.0), density)
    assert sum(shares.values()) == pytest.approx(density * len(rates))
    cost = sum(curves[n][legal[n].index(d)] for n, d in shares.items())
    for other in itertools.product(range(8), repeat=len(rates)):
        if sum(each + 1 for each in other) <= 8 * density * len(rates):
            assert cost <= sum(curves[n][d] for n, d in zip(legal, other)) + 1e-9


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    degrees=st.integers(2, 40),
    density=st.floats(0.1, 0.9),
    seed=st.integers(0, 99),
)
def test_at_most_the_wanted_weights_are_kept_and_no_step_more_fits(sizes, degrees, density, seed):
    rng = np.random.default_rng(seed)
    values = [each / degrees for each in range(1, degrees + 1)]
    legal = {str(n): values for n in range(len(sizes))}
    curves = {name: np.append(np.sort(rng.random(degrees - 1))[::-1], 0) for name in legal}
    by_name = {str(n): float(size) for n, size in enumerate(sizes)}
    shares = densities.shared_out(curves, legal, by_name, density)
    least, total = sum(sizes) / degrees, density * sum(sizes)
    kept = sum(by_name[name] * share for name, share in shares.items())
    assert set(shares.values()) <= set(values)
    assert kept <= max(least, total) + 1e-6
    if kept > least + 1e-9:
        growing = [size for name, size in by_name.items() if shares[name] < 1]
        assert not growing or kept + min(growing) / degrees > total


@pytest.mark.parametrize("rate", [0.5, 3.0, 9.0])
@pytest.mark.parametrize("points", [(0.25, 0.5, 0.75), (0.125, 0.25), (0.0625, 0.125, 0.5)])
def test_an_exponential_cost_is_continued(rate, points):
    legal = [each / 16 for each in range(1, 17)]
    exact = lambda density: 0.3 * np.exp(-rate * density)  # noqa: E731
    costs = densities.curve({point: exact(point) for point in points}, legal)
    expected = exact(np.array(legal)) - exact(1.0)
    np.testing.assert_allclose(costs, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("measured", [{0.5: 0.2}, {0.25: 0.0, 0.5: 0.0}, {0.25: 0.1, 0.5: 0.2}])
def test_costs_never_rise_with_the_density(measured):
    costs = densities.curve(measured, [0.25, 0.5, 0.75, 1.0])
    assert costs[-1] == 0
    assert (np.diff(costs) <= 1e-12).all()


def model_of(**change):
    config = sd.preset("pico").dense().change(model__num_layers=2, model__d_model=64, **change)
    model = sd.init(config, jax.random.key(0))
    return dataclasses.replace(model, params=jax.tree.map(lambda leaf: leaf * 2, model.params))


TOKENS = [np.random.default_rng(n).integers(0, 512, (4, 32)).astype(np.int32) for n in range(2)]


@pytest.mark.parametrize("name", ["qkv", "attn_out", "mlp_in"])
def test_the_divergence_is_that_of_the_model_with_one_pruned_projection(name):
    model = model_of()
    weights = stacks.ModelWeights(jax.device_get(model.params))
    target = Target.of(Groups.parse("1x16"), model.model.projection_shape(name), 0.5, 1)
    measured = densities.divergences(model.model, weights, TOKENS, {(name, 0.5): target})
    linears = []

    def fitted(site):
        linears.append(site.linear(prune(site.fit, site.held_out, site.kernel, target).kernel))
        return site.kernel

    list(layer_by_layer.pruned_layers(model.model, weights, TOKENS, (name,), fitted))
    arrays = {
        "kernel": np.stack([each.weight.kernel for each in linears]),
        "bias": np.stack([each.bias for each in linears]),
    }
    blocks = {**model.params["blocks"], name: arrays}
    pruned = dataclasses.replace(model, params={**model.params, "blocks": blocks})
    old, new = (jax.nn.log_softmax(sd.logits(each, TOKENS[0])) for each in (model, pruned))
    expected = float((jnp.exp(old) * (old - new)).sum(-1).mean())
    assert measured[name, 0.5] == pytest.approx(expected, rel=1e-3)
    assert expected > 1e-3


@pytest.mark.parametrize("block", [16, "1x16", 1])
def test_a_projection_that_matters_less_keeps_less(block):
    """The MLP's output is nearly nothing, so its weights can go."""
    model = model_of()
    blocks = dict(model.params["blocks"])
    blocks["mlp_out"] = jax.tree.map(lambda leaf: leaf * 1e-3, blocks["mlp_out"])
    model = dataclasses.replace(model, params={**model.params, "blocks": blocks})
    pruned = sd.prune(model, TOKENS, block=block, rounds=1)
    shares = {name: pruned.model.model.linear(name).density for name in model.model.projections}
    assert shares["mlp_out"] < 0.5 < shares["qkv"]
    sizes = {name: np.prod(model.model.projection_shape(name)) for name in shares}
    kept = sum(shares[name] * sizes[name] for name in shares)
    assert 0.49 * sum(sizes.values()) < kept <= 0.5 * sum(sizes.values())
    for name, mask in pruned.masks.items():
        assert mask.mean() == pytest.approx(shares[name])
