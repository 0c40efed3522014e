"""Models of equal cost: drawn budgets, and the smallest ones."""

import dataclasses
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from marks import some

import sparse_dataflow.core.layouts.evolution  # noqa: F401  Registers the patterns.
from sparse_dataflow.core.config.projections import MLP, LinearSpec
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs import equal_cost
from sparse_dataflow.runs.equal_cost import equal_cost_model, stored_parameters
from sparse_dataflow.runs.run_config import SIZES


def flops_of(scale):
    sequence = SIZES[scale].max_len
    return lambda model: cost.flops_per_token(model, sequence).total


def shape(scale, pattern="random", block=8, projections=("qkv", "attn_out", "mlp_in", "mlp_out")):
    return SIZES[scale].with_linears(LinearSpec("block_sparse", pattern, 0.125, block), projections)


@settings(max_examples=20, deadline=None)
@given(
    scale=st.sampled_from(["pico", "3m"]),
    budget=st.floats(0.5, 2),
    density=st.sampled_from([1.0, 0.5, 0.25, 0.125]),
    pattern=st.sampled_from(["random", "cyclic"]),
    projections=st.sampled_from([("qkv", "attn_out", "mlp_in", "mlp_out"), ("mlp_in", "mlp_out")]),
    cost_name=st.sampled_from(["flops", "parameters"]),
)
def test_a_model_costs_its_budget(scale, budget, density, pattern, projections, cost_name):
    base = shape(scale, pattern, projections=projections)
    cost_of = flops_of(scale) if cost_name == "flops" else stored_parameters
    target = budget * cost_of(SIZES[scale])
    try:
        model = equal_cost_model(base, cost_of, target, density)
    except UserError:
        assume(False)
    assert cost_of(model) == pytest.approx(target, rel=equal_cost.TOLERANCE)
    assert model.d_ff == 4 * model.d_model and model.num_layers == base.num_layers
    head = base.d_model / base.num_heads
    assert abs(math.log(model.d_model / model.num_heads / head)) <= math.log(equal_cost.HEAD_RATIO)
    assert model.sparse_projections == (base.sparse_projections if density < 1 else ())
    for layouts in model_layouts.layouts(dataclasses.replace(model, num_layers=1)).values():
        for layout in layouts:
            stored = layout.nnz / (layout.in_blocks * layout.out_blocks)
            ratio = stored / density
            assert 1 / equal_cost.DENSITY_RATIO <= ratio <= equal_cost.DENSITY_RATIO
            assert layout.balanced and stored == pytest.approx(model.linear("mlp_in").density)


@pytest.mark.parametrize("budget", some([0.25, 1, 4], 1))
@pytest.mark.parametrize("density", [0.5, 0.25, 0.125, 0.0625])
def test_the_default_study_has_a_model_of_every_density_within_two_percent(budget, density):
    flops = flops_of("3m")
    dense = equal_cost_model(shape("3m"), flops, budget * flops(SIZES["3m"]))
    sparse = equal_cost_model(shape("3m"), flops, flops(dense), density)
    assert sparse.d_model > dense.d_model
    assert flops(sparse) == pytest.approx(flops(dense), rel=0.02)


def test_the_model_itself_is_the_answer_to_its_own_cost():
    assert equal_cost_model(shape("3m"), flops_of("3m"), flops_of("3m")(SIZES["3m"])) == SIZES["3m"]


def test_each_expert_is_stored_however_few_are_active():
    model = dataclasses.replace(SIZES["pico"], experts=4, top_k=2)
    weights = {name: math.prod(model.projection_shape(name)) for name in model.projections}
    by_hand = sum(count * (4 if name in MLP else 1) for name, count in weights.items())
    assert stored_parameters(model) == model.num_layers * by_hand


def test_a_budget_below_every_layout_is_refused():
    with pytest.raises(UserError, match=r"legal: a larger budget .*smaller --block"):
        equal_cost_model(shape("pico", block=64), flops_of("pico"), 1e5, 0.125)
