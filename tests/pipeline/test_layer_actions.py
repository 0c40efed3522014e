"""A layer split in four programs computes the layer and its gradient, without extra work."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some
from small_models import DENSE, QUARTER, arbitrary_params, assert_same, tables_of
from small_models import EACH_KIND as MODEL

from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.pipeline.layer_actions import layer_actions
from sparse_dataflow.runs.run_config import SIZES

PROJECTIONS = SIZES["nano"].projections

NIGHTLY = pytest.mark.nightly


def second_layer(model):
    """Returns (params, tables, x, dy) of the second layer."""
    params, tables = (
        arbitrary_params(model)["blocks"],
        (tables_of(model) or {"blocks": {}})["blocks"],
    )
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 4, 10, model.d_model)).astype(np.float32)
    return *jax.tree.map(lambda leaf: leaf[1], (params, tables)), x, dy


def block(model, params, tables, x):
    return gpt.block(model, layer_weights(model, merged(params, tables)), x)


def run(model, recompute):
    """Returns (results, stored values, FLOPs of each program)."""
    params, tables, x, dy = second_layer(model)
    layer = whole.rematerialised(model.remat, functools.partial(block, model))
    actions = layer_actions(layer, params, tables, x, recompute)
    flops = []

    def call(program, *operands):
        compiled = jax.jit(program).lower(*operands).compile()
        flops.append(compiled.cost_analysis().get("flops", 0))
        return compiled(*operands)

    y, _, saved = call(actions.forward, params, tables, x)
    recomputed = call(actions.recompute, params, tables, saved)
    dx, pending = call(actions.backward, params, tables, saved, recomputed, dy)
    dparams = call(actions.weights, params, tables, saved, recomputed, pending)
    return {"y": y, "dx": dx, "dparams": dparams}, (saved, recomputed, pending), flops


def whole_layer(model):
    params, tables, x, dy = second_layer(model)

    def both(params, x, dy):
        y, pullback = jax.vjp(lambda p, x: block(model, p, tables, x)[0], params, x)
        dparams, dx = pullback(dy)
        return {"y": y, "dx": dx, "dparams": dparams}

    compiled = jax.jit(both).lower(params, x, dy).compile()
    return compiled(params, x, dy), compiled.cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("remat", "recompute"),
    [
        *some([("none", False), ("keep", False), ("full", True)], "full"),
        pytest.param("keep", True, marks=NIGHTLY),
    ],
)
def test_the_programs_compute_the_layer_and_its_gradient(remat, recompute):
    model = dataclasses.replace(MODEL, remat=remat)
    results, (_, recomputed, _), _ = run(model, recompute)
    assert recompute or not recomputed
    assert_same(whole_layer(MODEL)[0], results, 2e-6)


def test_no_work_is_repeated_and_actions_cost_alike():
    _, _, (forward, recompute_flops, backward, weights) = run(DENSE, recompute=False)
    _, together = whole_layer(DENSE)
    assert recompute_flops == 0
    assert forward + backward + weights == pytest.approx(together, rel=0.02)
    assert max(forward, backward, weights) < 1.3 * min(forward, backward, weights)


def test_full_remat_stores_the_input_alone_and_recomputes_once():
    model = dataclasses.replace(DENSE, remat="full")
    _, (saved, _, _), (forward, recompute_flops, backward, weights) = run(model, recompute=True)
    assert [leaf.shape for leaf in saved] == [(4, 10, model.d_model)]
    _, together = whole_layer(DENSE)
    # A second recomputation would add a third.
    assert forward + recompute_flops + backward + weights == pytest.approx(
        together + forward, rel=0.1
    )


def test_weights_are_not_stored():
    """The stored values do not grow with the density."""
    wide = dataclasses.replace(QUARTER, density=0.5)
    sizes = []
    for spec in (QUARTER, wide):
        model = dataclasses.replace(DENSE, linears=dict.fromkeys(PROJECTIONS, spec))
        params, tables, x, dy = second_layer(model)
        layer = whole.rematerialised(model.remat, functools.partial(block, model))
        # Traced tables: layouts of one shape share a program.
        operands = jax.tree.map(jnp.asarray, (params, tables))
        actions = layer_actions(layer, *operands, x, recompute=False)

        def everything(params, tables, x, dy, actions=actions):
            _, _, saved = actions.forward(params, tables, x)
            _, pending = actions.backward(params, tables, saved, (), dy)
            return saved, pending

        shapes = jax.eval_shape(everything, *operands, x, dy)
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves(shapes)))
    assert sizes[0] == sizes[1]
