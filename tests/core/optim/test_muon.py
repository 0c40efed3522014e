"""Muon: equality with optax, orthogonal blocks and groups, one moment, and learning rates."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import some
from small_models import MIXED as MODEL
from small_models import shapes_of, tables_of

from sparse_dataflow.core.config.model import SUPAR_WIDTH, ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.layouts.layout import BlockLayout, stack_tables
from sparse_dataflow.core.model import stacks as layer_stacks
from sparse_dataflow.core.optim import matrix_leaves, muon
from sparse_dataflow.core.optim.optimizers import (
    adam_state,
    learning_rate_multipliers,
    make_optimizer,
)
from sparse_dataflow.files.errors import UserError

TRAINING = TrainingConfig(steps=20, batch=4, sequence=8, weight_decay=0.3, optimizer="muon")
WIDE = dataclasses.replace(TRAINING, optimizer="adamw")

stacks = st.builds(
    lambda lead, m, n, seed: np.random.default_rng(seed).normal(size=(*lead, m, n)).astype("f4"),
    st.sampled_from([(), (1,), (3, 2)]),
    st.sampled_from([4, 24]),
    st.sampled_from([4, 24]),
    st.integers(0, 10**6),
)
"""Few shapes, as each compiles a program; many values."""


def gradients_of(model, number=1):
    rng = np.random.default_rng(number)
    shapes = shapes_of(model)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)


def moves(model, training, steps=3):
    """Returns the update of the last of some steps on random gradients, and the state."""
    optimizer, params = make_optimizer(model, training), gradients_of(model, 0)
    state = optimizer.init(params)
    for number in range(1, steps + 1):
        updates, state = jax.jit(functools.partial(optimizer.update, learning_rate=-1.0))(
            gradients_of(model, number), state, params
        )
    return updates, state


@given(stacks)
def test_every_matrix_of_a_stack_becomes_orthogonal(stack):
    for array in (stack, jnp.asarray(stack)):
        singular = np.linalg.svd(np.asarray(muon.orthogonalize(array)), compute_uv=False)
        large = np.linalg.svd(stack, compute_uv=False) > 0.01 * np.linalg.norm(
            stack, axis=(-2, -1), keepdims=True
        ).squeeze(-1)
        assert np.all((singular > 0.6) & (singular < 1.3) | ~large)


@given(stacks, st.sampled_from([np.asarray, jnp.asarray]))
def test_stacks_are_orthogonalised_matrix_by_matrix(stack, array):
    """Zeros stay zero, and the transpose gives the transpose."""
    whole = muon.orthogonalize(array(stack))
    flat = stack.reshape(-1, *stack.shape[-2:])
    one_by_one = np.stack([muon.orthogonalize(array(matrix)) for matrix in flat])
    np.testing.assert_allclose(np.asarray(whole).reshape(flat.shape), one_by_one, atol=2e-3)
    np.testing.assert_allclose(
        muon.orthogonalize(array(stack).swapaxes(-1, -2)).swapaxes(-1, -2), whole, atol=2e-3
    )
    assert not np.any(muon.orthogonalize(array(np.zeros_like(stack))))


def test_a_dense_model_is_trained_as_by_optax():
    """Kernels alone: optax gives Nesterov's momentum to its AdamW as well."""
    model, rate, decay = dataclasses.replace(MODEL, linears={}), 0.01, 0.3

    def matrices(params):
        numbers = optax.contrib.MuonDimensionNumbers(1, 2)
        return jax.tree_util.tree_map_with_path(
            lambda path, _: numbers if matrix_leaves.has_muon(model, path) else None, params
        )

    theirs = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            rate,
            weight_decay=decay,
            adam_b1=TRAINING.b1,
            adam_b2=TRAINING.b2,
            eps=TRAINING.epsilon,
            adam_weight_decay=0.0,
            muon_weight_dimension_numbers=matrices,
            consistent_rms=muon.RMS,
        ),
    )
    ours = make_optimizer(model, TRAINING)
    params = right = gradients_of(model, 0)
    state, their_state = ours.init(params), theirs.init(right)
    for number in range(1, 5):
        gradients = gradients_of(model, number)
        updates, state = jax.jit(functools.partial(ours.update, learning_rate=-1.0))(
            gradients, state, params
        )
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        updates, their_state = jax.jit(theirs.update)(gradients, their_state, right)
        right = jax.tree.map(np.add, right, updates)
    for name, module in params["blocks"].items():
        if "kernel" in module:
            twin = right["blocks"][name]["kernel"]
            np.testing.assert_allclose(module["kernel"], twin, rtol=1e-5, atol=1e-5)


def test_each_stored_block_moves_by_the_same_root_mean_square():
    training = dataclasses.replace(TRAINING, weight_decay=0.0)
    updates, _ = moves(MODEL, training)
    for module, leaf in (("qkv", "values"), ("mlp_out", "values"), ("mlp_in", "kernel")):
        move = np.asarray(updates["blocks"][module][leaf])
        np.testing.assert_allclose(
            np.sqrt(np.mean(move**2, axis=(-2, -1))), muon.RMS, rtol=0.3, err_msg=module
        )


GRIDS = [(4, 12, 4), (6, 6, 3), (8, 2, 2), (4, 4, 1), (6, 12, 6)]
"""Input blocks, output blocks and groups of a layout."""


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(
    "grid", some({str(grid): (grid,) for grid in GRIDS}, "(6, 6, 3)", "(6, 12, 6)")
)
@pytest.mark.parametrize("strided_outputs", [False, True])
def test_a_grouped_layout_moves_by_dense_groups(grid, strided_outputs, array):
    """As if each group were cut from the dense matrix and orthogonalised by itself."""
    in_blocks, out_blocks, count = grid
    contiguous = np.arange(out_blocks) // (out_blocks // count)
    output_groups = np.arange(out_blocks) % count if strided_outputs else contiguous
    input_groups = np.arange(in_blocks) % count
    layout = BlockLayout.from_mask(input_groups[:, None] == output_groups, 4)
    stacked = stack_tables([layout.tables(), layout.tables()]).with_groups()
    stored = np.random.default_rng(0).normal(size=(2, layout.nnz, 4, 4)).astype(np.float32)
    matrices = muon.matrices_of(stored.shape, stacked)
    joined = matrices.join(array(stored))
    assert joined.shape[-2:] == matrices.shape == (4 * in_blocks // count, 4 * out_blocks // count)
    np.testing.assert_array_equal(matrices.split(joined), stored)
    moves = np.asarray(matrices.split(muon.update(joined, joined, 1)))
    for values, move in zip(stored, moves):
        dense, moved = layout.to_dense(values), layout.to_dense(move)
        for group in range(count):
            features = lambda blocks: np.flatnonzero(np.repeat(blocks, 4))  # noqa: E731
            part = np.ix_(features(input_groups == group), features(output_groups == group))
            one = muon.update(dense[part], dense[part], 1)
            np.testing.assert_allclose(moved[part], one, atol=2e-3)


def test_layouts_that_change_move_by_blocks():
    model = MODEL.with_linears(LinearSpec("block_sparse", "monarch", 0.5, 8), ["mlp_in"])
    params = gradients_of(model)
    tables = tables_of(model)
    optimizer = make_optimizer(model, dataclasses.replace(TRAINING, weight_decay=0.0))
    state = optimizer.init(params)

    def updates(tables):
        move = jax.jit(functools.partial(optimizer.update, learning_rate=-1.0))(
            params, state, params, rest=tables
        )
        return move[0]["blocks"]["mlp_in"]

    by_group, by_block = updates(layer_stacks.with_groups(tables)), updates(tables)
    np.testing.assert_array_equal(by_block["values"], updates(())["values"])
    assert not np.allclose(by_group["values"], by_block["values"], atol=1e-3)


def test_everything_but_matrices_of_projections_has_adamw():
    mine, theirs = (moves(MODEL, training)[0] for training in (TRAINING, WIDE))
    for path, leaf in jax.tree_util.tree_leaves_with_path(mine):
        twin = theirs
        for key in path:
            twin = twin[key.key]
        same = np.array_equal(leaf, twin)
        assert same != matrix_leaves.has_muon(MODEL, path), jax.tree_util.keystr(path)


@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"], "bfloat16"))
def test_a_matrix_has_one_moment_in_the_state_dtype(dtype):
    training = dataclasses.replace(TRAINING, state_dtype=dtype)
    params = gradients_of(MODEL)
    adam = adam_state(moves(MODEL, training)[1])
    assert jax.tree.structure(adam.mu) == jax.tree.structure(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((adam.mu, adam.nu))} == {dtype}
    size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))  # noqa: E731
    matrices = size(params) - size(matrix_leaves.without_muon(MODEL, params))
    assert matrices > 0.7 * size(params)
    assert size(adam.nu) == size(params) - matrices


def test_supar_keeps_the_change_of_an_output_over_width_density_and_block():
    """Of aligned inputs: f / m matrices of m inputs each move an output by RMS sqrt(m)."""
    changes = []
    cases = itertools.product((64, 256), (1.0, 0.5, 0.25), (0, 8, 16), ("cyclic", "monarch"))
    for width, density, block, pattern in cases:
        if not block and density < 1:
            continue
        spec = LinearSpec("block_sparse", pattern, density, block) if block else LinearSpec()
        model = ModelConfig(1, width, 4, 2 * width, 40, 12, parametrization="supar")
        model = model.with_linears(spec)
        params = shapes_of(model)
        tables = layer_stacks.with_groups(tables_of(model))
        module = learning_rate_multipliers(model, TRAINING, params, tables)["blocks"]["qkv"]
        grouped = pattern == "monarch" or density == 1
        side = round(density * width) if grouped else block
        rate = module["values" if block else "kernel"]
        changes.append(rate * density * width / side * math.sqrt(side))
    np.testing.assert_allclose(changes, math.sqrt(SUPAR_WIDTH))


def test_unknown_optimizers_are_refused():
    with pytest.raises(UserError, match=r"optimizer=lions is unknown. Legal: adamw, muon, lion"):
        dataclasses.replace(TRAINING, optimizer="lions")
