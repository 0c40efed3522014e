"""Properties of a GPT: causality, dense equivalence, positions, initial scale, stored arrays."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some
from small_models import (
    DENSE,
    MONARCH,
    arbitrary_params,
    as_dense,
    fixed,
    logits_of,
    shapes_of,
    tables_of,
    tokens_of,
)

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.rotary import rotate
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.training.cost import parameter_count
from sparse_dataflow.core.training.step import initial_state, make_train_step
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import SIZES

PROJECTIONS = SIZES["nano"].projections

SPARSE = DENSE.with_linears(MONARCH)
LOW_RANK = DENSE.with_linears(dataclasses.replace(MONARCH, rank=3))
MIXED = DENSE.with_linears(MONARCH, ["qkv", "mlp_out"]).with_linears(LinearSpec(rank=2), ["mlp_in"])
ROTARY = dataclasses.replace(SPARSE, positions="rotary", norm="rmsnorm")
VARIANTS = {"dense": DENSE, "low_rank": LOW_RANK, "mixed": MIXED, "rotary": ROTARY}


def variants(*names):
    """Parametrizes with variants; all but the first are slow."""
    cases = {name: VARIANTS[name] for name in names}
    return pytest.mark.parametrize("config", some(cases, names[0]))


@variants("dense", "mixed", "rotary")
def test_logits_are_causal(config):
    params, tables = arbitrary_params(config), tables_of(config)
    weights = np.random.default_rng(1).normal(size=config.vocab_size).astype(np.float32)

    def mixed_logits(x):
        x, _ = whole.apply_blocks(config, weights_of(config, params, tables), x)
        return gpt.logits(config, params, x) @ weights

    x = gpt.embed(config, params["embed"], tokens_of(config, 2, 6))
    jacobian = jax.jit(jax.jacrev(mixed_logits))(x)  # [B, T] by [B, T, D]
    reach = np.abs(jacobian).sum(-1)
    for logits_row in range(2):
        for input_row in range(2):
            effect = reach[logits_row, :, input_row]
            if logits_row != input_row:
                assert np.all(effect == 0)
            else:
                assert np.all(effect[np.triu_indices(6, 1)] == 0)
                assert np.all(effect[np.tril_indices(6)] > 0)


@variants("low_rank", "mixed", "rotary")
def test_a_sparse_model_equals_the_dense_model_of_its_weights(config):
    params, tokens = arbitrary_params(config), tokens_of(config)
    logits = logits_of(config, params, tokens)
    assert logits.shape == (4, 11, config.vocab_size) and logits.dtype == np.float32
    np.testing.assert_allclose(
        logits, logits_of(*as_dense(config, params), tokens), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("pattern", ["dense", "pixelfly"])
def test_density_one_equals_the_dense_model(pattern):
    full = DENSE.with_linears(LinearSpec("block_sparse", pattern, density=1.0, block=8))
    dense_params = arbitrary_params(DENSE)
    blocks = {name: dict(module) for name, module in dense_params["blocks"].items()}
    for name, layers in model_layouts.layouts(full).items():
        kernels = blocks[name].pop("kernel")
        blocks[name]["values"] = np.stack([la.from_dense(k) for la, k in zip(layers, kernels)])
    tokens = tokens_of(DENSE)
    np.testing.assert_allclose(
        logits_of(full, {**dense_params, "blocks": blocks}, tokens),
        logits_of(DENSE, dense_params, tokens),
        rtol=1e-4,
        atol=1e-4,
    )


def test_the_low_rank_term_is_part_of_the_weight():
    """Merged into the dense weights it gives the same logits; with gates at 0 they differ."""
    params, tokens = arbitrary_params(LOW_RANK), tokens_of(LOW_RANK)
    logits = logits_of(LOW_RANK, params, tokens)
    _, dense_params = as_dense(LOW_RANK, params)
    merged = {}
    for name, module in dense_params["blocks"].items():
        if name in PROJECTIONS:
            product = module["a_kernel"] @ module["b_kernel"]
            kernel = module["kernel"] + module["gate"][:, None, None] * product
            module = {"kernel": kernel, "bias": module["bias"]}
        merged[name] = module
    merged_params = {**dense_params, "blocks": merged}
    np.testing.assert_allclose(
        logits, logits_of(DENSE, merged_params, tokens), rtol=1e-4, atol=1e-4
    )
    ungated = jax.tree_util.tree_map_with_path(
        lambda path, leaf: 0 * leaf if path[-1].key == "gate" else leaf, params
    )
    assert np.abs(logits - logits_of(LOW_RANK, ungated, tokens)).max() > 0.1


def test_rotary_scores_depend_on_the_distance_alone():
    length, width = 9, 8
    q, k = np.random.default_rng(0).normal(size=(2, width)).astype(np.float32)
    everywhere = lambda row: rotate(THIN, np.tile(row, (1, length, 1, 1)))[0, :, 0]  # noqa: E731
    scores = np.asarray(everywhere(q) @ everywhere(k).T)  # [query position, key position]
    for distance in range(1 - length, length):
        diagonal = scores.diagonal(distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    np.testing.assert_allclose(scores[0, 0], q @ k, rtol=1e-5)
    by_distance = [scores.diagonal(distance)[0] for distance in range(length)]
    assert np.ptp(by_distance) > 0.5


def test_positions_are_absolute_where_learned_and_relative_where_rotary():
    """A repeated token has equal logits at every position only without absolute positions."""
    tokens = np.full((1, 10), 3, np.int32)
    for config, spread_is_zero in ((ROTARY, True), (SPARSE, False)):
        logits = logits_of(config, arbitrary_params(config), tokens)
        assert (np.ptp(logits, axis=1).max() < 1e-3) == spread_is_zero


def test_rotary_logits_depend_on_the_order_of_earlier_tokens():
    params = arbitrary_params(ROTARY)
    tokens, swapped = np.array([[1, 2, 3, 4]], np.int32), np.array([[2, 1, 3, 4]], np.int32)
    last = [logits_of(ROTARY, params, tokens)[0, -1] for tokens in (tokens, swapped)]
    assert np.abs(last[0] - last[1]).max() > 1e-3


def test_sequences_longer_than_the_learned_positions_are_refused():
    message = "Sequence of 17 tokens is longer than the model's 16 positions; legal: 1 to 16"
    with pytest.raises(UserError, match=message):
        logits_of(SPARSE, arbitrary_params(SPARSE), tokens_of(SPARSE, length=17))
    longer = tokens_of(ROTARY, length=20)
    assert logits_of(ROTARY, arbitrary_params(ROTARY), longer).shape == (4, 20, 40)


def test_prompt_vectors_take_positions_from_the_text():
    config = dataclasses.replace(DENSE, max_len=16, prompt_vectors=4)
    config.check_context(16)
    with pytest.raises(UserError, match=r"of 13 tokens .* legal: 1 to 12 after 4 prompt vectors"):
        config.check_context(17)
    with pytest.raises(UserError, match=r"^T is longer .* legal: 1 to 12 after 4 prompt vectors"):
        config.check_context(17, "T")


def test_norms():
    x = 3 + 2 * np.random.default_rng(0).normal(size=(2, 5, 32)).astype(np.float32)
    scale, bias = np.ones(32, np.float32), np.zeros(32, np.float32)
    layer = np.asarray(gpt.head(DENSE, {"norm": {"scale": scale, "bias": bias}}, x))
    np.testing.assert_allclose(layer.mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(layer.std(-1), 1, rtol=1e-3)
    rms = np.asarray(gpt.head(ROTARY, {"norm": {"scale": 2 * scale}}, x))
    expected = 2 * x / np.sqrt(np.mean(np.square(x), -1, keepdims=True))
    np.testing.assert_allclose(rms, expected, rtol=1e-3)


@pytest.mark.slow
def test_the_initial_scale_of_activations_does_not_depend_on_density():
    base = ModelConfig(num_layers=2, d_model=128, num_heads=4, d_ff=512, vocab_size=9, max_len=64)
    specs = [LinearSpec()]
    specs += [LinearSpec("block_sparse", "butterfly", d, block=8) for d in (1 / 16, 1 / 2)]
    x = np.random.default_rng(0).normal(size=(4, 32, 128)).astype(np.float32)
    scales = []
    for spec in specs:
        config = base.with_linears(spec)

        def branch_scale(key, tables, x, config=config):
            blocks = gpt.init(config, key)["blocks"]
            return jnp.std(
                whole.apply_blocks(config, weights_of(config, {"blocks": blocks}, tables), x)[0] - x
            )

        scales.append(float(jax.jit(branch_scale)(jax.random.key(0), tables_of(config), x)))
    assert np.ptp(scales) < 0.1 * scales[0], scales


@variants(*VARIANTS)
def test_the_parameter_count_equals_the_planners(config):
    leaves = jax.tree.leaves(shapes_of(config))
    count = sum(math.prod(leaf.shape) for leaf in leaves)
    assert count == parameter_count(config)
    assert all(leaf.dtype == np.float32 for leaf in leaves)


def test_initial_parameters_differ_between_layers_and_keys():
    draw = jax.jit(lambda key: gpt.init(SPARSE, key))
    params, again, other = draw(jax.random.key(0)), draw(jax.random.key(0)), draw(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    values = params["blocks"]["qkv"]["values"]
    assert np.abs(values[0] - values[1]).min() > 0
    assert np.abs(values - other["blocks"]["qkv"]["values"]).min() > 0


THIN = ModelConfig(
    num_layers=2, d_model=256, num_heads=4, d_ff=1024, vocab_size=32, max_len=8
).with_linears(LinearSpec("block_sparse", "butterfly", 1 / 16, block=8))
TRAINING = TrainingConfig(steps=10, batch=2, sequence=4)


def test_a_training_state_holds_stored_blocks_only():
    state = jax.eval_shape(lambda: initial_state(THIN, TRAINING))
    parameters = jax.tree.map(lambda leaf: leaf.shape, state.params)
    for name, layers in model_layouts.layouts(THIN).items():
        assert parameters["blocks"][name]["values"] == (2, layers[0].nnz, 8, 8)
        assert layers[0].density == 1 / 16
    adam = next(moment for moment in state.moments if hasattr(moment, "mu"))
    for moments in (adam.mu, adam.nu):
        assert jax.tree.map(lambda leaf: leaf.shape, moments) == parameters
    smallest_dense = min(math.prod(THIN.projection_shape(name)) for name in PROJECTIONS)
    assert all(math.prod(leaf.shape) < smallest_dense for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("traced_tables", [False, True])
def test_a_training_step_has_no_array_of_the_dense_size(array_sizes, remat, traced_tables):
    config = dataclasses.replace(THIN, remat=remat)
    state = jax.eval_shape(lambda: initial_state(config, TRAINING))
    tokens = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    batch = Batch(tokens, tokens)

    def step(state, batch, rate):
        tables = state.rest if traced_tables else fixed(tables_of(config))
        return make_train_step(config, TRAINING)(state._replace(rest=tables), batch, rate)

    rate = jax.ShapeDtypeStruct((), jnp.float32)
    smallest_dense = min(math.prod(config.projection_shape(name)) for name in PROJECTIONS)
    assert max(array_sizes(step, state, batch, rate)) < smallest_dense
