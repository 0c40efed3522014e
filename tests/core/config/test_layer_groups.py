"""Layer groups: their layers and models, and results that do not depend on grouping."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import some
from small_models import shapes_of, tables_of

from sparse_dataflow.compile import traced
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.layer_groups import (
    layer_groups,
    layer_linear,
    layer_model,
    split_groups,
)
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner import memory
from sparse_dataflow.runs.families import FAMILIES
from sparse_dataflow.runs.run_config import SIZES

PROJECTIONS = SIZES["nano"].projections

SPEC = LinearSpec("block_sparse", "cyclic", 1 / 4, block=8)
DENSE = ModelConfig(num_layers=3, d_model=32, num_heads=4, d_ff=64, vocab_size=40, max_len=12)
UNIFORM = DENSE.with_linears(SPEC)
MODEL = dataclasses.replace(
    UNIFORM.with_linears(dataclasses.replace(SPEC, rank=2), ("mlp_in",)).with_linears(
        LinearSpec(), ("attn_out",)
    ),
    density_by_depth=(3.0, 1.0, 1.0),
)


@st.composite
def models(draw):
    """Models with per-layer densities of some projections, with the multipliers."""
    layers = draw(st.integers(1, 6))
    sparse = draw(st.sets(st.sampled_from(PROJECTIONS), min_size=1))
    spec = dataclasses.replace(SPEC, rank=draw(st.sampled_from([0, 2])))
    depth = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0]), min_size=layers, max_size=layers))
    model = dataclasses.replace(DENSE, num_layers=layers).with_linears(spec, tuple(sparse))
    return dataclasses.replace(model, density_by_depth=tuple(depth)), depth


@given(models())
def test_groups_are_runs_of_layers_of_equal_density(model_and_depth):
    model, depth = model_and_depth
    groups = layer_groups(model)
    assert [i for group in groups for i in group.layers] == list(range(model.num_layers))
    assert len(groups) == len(list(itertools.groupby(depth)))
    for group in groups:
        assert not group.model.density_by_depth and group.model.num_layers == model.num_layers
        for layer, name in itertools.product(group.layers, model.sparse_projections):
            density = group.model.linear(name).density
            assert (
                density == layer_linear(model, name, layer).density == SPEC.density * depth[layer]
            )


@pytest.mark.parametrize("room", [1.0, 2.0, 3.0])
def test_tables_of_layouts_that_may_change_are_counted_with_their_room(room):
    model = DENSE.with_linears(dataclasses.replace(SPEC, max_fan_out=room))
    tables = jax.tree.leaves(stacks.stored_layouts(model))
    assert sum(table.nbytes for table in tables) == memory.table_bytes(model)


@settings(max_examples=20, deadline=None)
@given(models())
def test_parameters_tables_and_flops_follow_the_layouts(model_and_depth):
    model, _ = model_and_depth
    shapes = shapes_of(model)
    layouts = model_layouts.layouts(model)
    tables = stacks.stored_layouts(model, layouts)
    count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))  # noqa: E731
    assert count(shapes) == cost.parameter_count(model)
    assert 4 * count(tables) == memory.table_bytes(model)
    flops = cost.flops_per_token(model, 8, training=False).sections
    for name, layers in layouts.items():
        rank = model.linear(name).rank * sum(model.projection_shape(name))
        stored = sum(layout.nnz * layout.block**2 for layout in layers)
        assert flops[name] == pytest.approx(2 * (stored + model.num_layers * rank))
        assert len(layers) == model.num_layers
    assert stacks.layouts_of(model, tables) == layouts
    for blocks, group, stacked in zip(
        split_groups(shapes["blocks"]), layer_groups(model), split_groups(tables["blocks"])
    ):
        leaves = jax.tree.leaves((blocks, stacked))
        assert {len(leaf) for leaf in leaves if leaf.shape} == {len(group.layers)}


@given(models())
def test_from_json_inverts_to_json_with_per_layer_densities(model_and_depth):
    model, _ = model_and_depth
    fields = json.loads(json.dumps(model.to_json()))
    assert ModelConfig.from_json(fields) == model
    assert bool(fields["density_by_depth"]) == (len(layer_groups(model)) > 1)


@pytest.mark.parametrize("multiplier", [1.0, 2.0])
def test_equal_multipliers_are_folded_into_the_specs(multiplier):
    model = dataclasses.replace(UNIFORM, density_by_depth=[multiplier] * 3)
    spec = dataclasses.replace(SPEC, density=multiplier * SPEC.density)
    assert model == UNIFORM.with_linears(spec) and model.density_by_depth == ()
    assert dataclasses.replace(DENSE, density_by_depth=(1.0, 2.0, 3.0)) == DENSE


def test_initial_parameters_of_a_group_equal_those_of_its_uniform_model():
    key = jax.random.key(3)
    init = jax.jit(gpt.init, static_argnums=0)
    params = init(MODEL, key)
    layers, model = layer_groups(MODEL)[-1]
    uniform = init(model, key)
    expected = jax.tree.map(lambda leaf: leaf[layers.start : layers.stop], uniform["blocks"])
    jax.tree.map(np.testing.assert_array_equal, params["blocks"][-1], expected)
    jax.tree.map(np.testing.assert_array_equal, params["embed"], uniform["embed"])


def arbitrary(model, seed=0):
    rng = np.random.default_rng(seed)
    shapes = shapes_of(model)
    return jax.tree.map(lambda a: 0.2 * rng.normal(size=a.shape).astype(np.float32), shapes)


def layer_by_layer(model, params, tokens):
    """Returns the mean loss, layer by layer, with block-sparse weights as dense matrices."""
    dense = dataclasses.replace(
        model, linears={n: LinearSpec(rank=s.rank) for n, s in model.linears}
    )
    x = gpt.embed(dense, params["embed"], tokens[:, :-1])
    layouts, number = model_layouts.layouts(model), 0
    for blocks in split_groups(params["blocks"]):
        for i in range(len(blocks["norm1"]["scale"])):
            layer = {
                name: {n: leaf[i] for n, leaf in module.items()} for name, module in blocks.items()
            }
            for name in model.sparse_projections:
                values, layout = layer[name].pop("values"), layouts[name][number]
                grid = jnp.zeros((layout.in_blocks, layout.out_blocks, layout.block, layout.block))
                grid = grid.at[layout.rows, layout.cols].set(values)
                sides = model.projection_shape(name)
                layer[name]["kernel"] = grid.swapaxes(1, 2).reshape(sides)
            x = gpt.block(dense, layer_weights(dense, layer), x)[0]
            number += 1
    embedding = params["embed"]["tokens"]
    batch = Batch.from_windows(tokens).weighted()
    return gpt.head_loss(dense, params["head"], embedding, x, batch)[0]


@pytest.fixture(scope="module")
def expected():
    tokens = np.random.default_rng(1).integers(0, 40, (2, 13), np.int32)
    by_layer = jax.jit(jax.value_and_grad(lambda p: layer_by_layer(MODEL, p, tokens)))
    return tokens, by_layer(arbitrary(MODEL))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "traced_tables", "deepest"),
    [
        ("none", False, 0),
        *(
            pytest.param(*way, marks=pytest.mark.slow)
            for way in (("none", False, 16), ("full", True, 0))
        ),
    ],
)
def test_loss_and_gradients_equal_those_layer_by_layer(
    expected, monkeypatch, remat, traced_tables, deepest
):
    monkeypatch.setattr(whole, "UNROLL_LAYERS", deepest)
    monkeypatch.setattr(whole, "UNROLL_CHANGING_LAYERS", deepest)
    tokens, (loss, gradients) = expected
    model = dataclasses.replace(MODEL, remat=remat)
    static_tables = tables_of(model)

    @jax.jit
    def step(params, tables):
        tables = tables if traced_tables else static_tables
        return whole.loss_and_gradients(model, params, tables, Batch.from_windows(tokens))

    metrics, actual_gradients = step(arbitrary(model), static_tables)
    assert metrics["loss"].number() == pytest.approx(float(loss), rel=1e-5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        twin = actual_gradients
        for key in path:
            twin = twin[getattr(key, "key", getattr(key, "idx", None))]
        most = np.abs(leaf).max()
        assert most > 0 and twin.shape == leaf.shape
        np.testing.assert_allclose(twin, leaf, atol=1e-4 * most, err_msg=str(path))


@pytest.mark.parametrize(
    ("depth", "words"),
    [
        ((1.0, 2.0), "2 numbers for 3 layers"),
        ((1.0, 2.0, 5.0), "times 5 is above 1; legal: multiples up to 4"),
        ((1.0, 2.0, 0.0), "0.0; legal: numbers above 0"),
        ((1.0, 2.0, float("nan")), r"density_by_depth\[2\]=nan is not legal"),
        ((1.0, 2.0, "4"), "must be a finite number"),
    ],
)
def test_illegal_multipliers_are_refused(depth, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(UNIFORM, density_by_depth=depth)


def traced_flops(model):
    params = shapes_of(model)
    tables = jax.tree.map(jnp.asarray, tables_of(model))
    batch = Batch.from_windows(jnp.zeros((2, 9), jnp.int32))
    step = functools.partial(whole.loss_and_gradients, model)
    program = jax.make_jaxpr(step)(params, tables, batch)
    return traced.count(program, {}).flops


@pytest.mark.parametrize("deepest", some([0, 16], 16))
def test_a_step_has_the_flops_of_its_layers(monkeypatch, deepest):
    monkeypatch.setattr(whole, "UNROLL_CHANGING_LAYERS", deepest)
    group_flops = [
        len(g.layers) / MODEL.num_layers * traced_flops(g.model) for g in layer_groups(MODEL)
    ]
    assert traced_flops(MODEL) == pytest.approx(sum(group_flops))
    planned = [
        cost.flops_per_token(m, 8).total for m in (MODEL, *(g.model for g in layer_groups(MODEL)))
    ]
    assert planned[0] == pytest.approx(planned[1] / 3 + planned[2] * 2 / 3)


def test_full_layers_have_no_blocks():
    model = dataclasses.replace(DENSE, attention_blocks="window:1", layer_types="sliding+full")
    kinds = [layer_model(model, i).attention_blocks for i in range(3)]
    assert kinds == ["window:1", "", "window:1"]


def test_layers_with_a_window_alone_have_its_base_without_scaling():
    model = dataclasses.replace(
        DENSE,
        **FAMILIES["llama"],
        window=4,
        layer_types="sliding+sliding+full",
        rotary_base=1e4,
        rotary_local_base=30.0,
        rotary_scaling="linear",
        rotary_factor=8.0,
    )
    rotary = lambda layer: (layer.window, layer.rotary_base, layer.rotary_factor)  # noqa: E731
    local = (4, 30.0, 1.0)
    assert [rotary(layer_model(model, i)) for i in range(3)] == [local, local, (0, 1e4, 8.0)]
