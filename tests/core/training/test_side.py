"""Side networks: what they compute, what is trained and saved for it, and what reads them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some
from test_adapters import BASES, DENSE, SPARSE, planned_as_compiled, same_bits

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.training import cost, features
from sparse_dataflow.core.training.step import initial_state, make_train_step
from sparse_dataflow.evaluation import decoded_form, kv_cache
from sparse_dataflow.evaluation.generate import generate_tokens
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner import memory
from sparse_dataflow.runs import adapted_model
from sparse_dataflow.runs.families import FAMILIES

WIDTH = 8
ALL_BASES = BASES | {
    "gemma2": dataclasses.replace(DENSE, **FAMILIES["gemma2"] | {"window": 3}, num_kv_heads=2),
}
TRAINING = TrainingConfig(steps=4, batch=4, sequence=8, learning_rate=1e-2, side_width=WIDTH)
TOKENS = np.random.default_rng(0).integers(0, 48, (4, 9)).astype(np.int32)
BATCH = Batch.from_windows(TOKENS)


def start(base, frozen_dtype="compute"):
    """Returns (config with a side network, initial state)."""
    model = adapted_model.with_adapters(base, 0, frozen_dtype, side_width=WIDTH)
    state = initial_state(model, dataclasses.replace(TRAINING, frozen_dtype=frozen_dtype))
    return model, state._replace(rest=stacks.fixed_layouts(state.rest))


def moved(state):
    """Returns a state whose side network adds something."""
    up = state.params["head"]["side"]["up"]
    noise = 0.3 * jax.random.normal(jax.random.key(1), up.shape)
    head = {"side": {**state.params["head"]["side"], "up": noise}}
    return state._replace(params={**state.params, "head": head})


@pytest.mark.parametrize("base", some(ALL_BASES, "sparse"))
def test_before_the_first_step_the_model_is_its_base(base):
    model, state = start(base)
    logits = jax.jit(
        lambda model, params: whole.logits(model, weights_of(model, params, ()), TOKENS),
        static_argnums=0,
    )
    # In bfloat16 the compiler rounds at other places.
    tolerance = 5e-3 if base.compute_dtype == "bfloat16" else 0
    np.testing.assert_allclose(
        logits(model, state.merged), logits(base, state.rest), atol=tolerance, rtol=0
    )
    assert not np.array_equal(logits(model, moved(state).merged), logits(model, state.merged))


@pytest.mark.parametrize("frozen_dtype", ["compute", "int8"])
def test_training_changes_every_array_of_it_and_no_bit_of_the_base(frozen_dtype):
    model, state = start(DENSE if frozen_dtype == "int8" else SPARSE, frozen_dtype)
    step = jax.jit(make_train_step(model, TRAINING))
    before = jax.device_get(state)
    for _ in range(2):
        state, report = step(state, BATCH, np.float32(1e-2))
    assert same_bits(before.rest, state.rest) and np.isfinite(report.loss)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before.params, state.params)
    assert all(jax.tree.leaves(changed))
    names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(state.params)}
    assert names == {"down", "in", "out", "up"}
    if frozen_dtype == "int8":
        assert state.rest["blocks"]["mlp_in"]["kernel"].dtype == jnp.int8


def reference_loss(side, xs, state):
    """Returns the mean loss of BATCH as the docstring of `model.side` has it, from the inputs of
    the layers, as a function of the arrays of the side network."""
    norm = lambda x: x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)  # noqa: E731
    layers = [jax.tree.map(lambda a, i=i: a[i], side["blocks"]) for i in range(2)]
    s = 0.0
    for x, arrays in zip(xs, [*layers, side["head"]], strict=True):
        s = s + norm(x) @ arrays["down"]
        s = s + jax.nn.gelu(norm(s) @ arrays["in"]) @ arrays["out"]
    x = xs[-1] + norm(s) @ side["head"]["up"]
    scale, bias = (state.rest["head"]["norm"][name] for name in ("scale", "bias"))
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + DENSE.norm_epsilon)
    logits = (x * scale + bias) @ state.rest["embed"]["tokens"].T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), TOKENS[:, 1:, None], axis=2).mean()


def test_loss_and_gradient_are_those_of_the_formula_on_constant_features():
    model, state = start(DENSE)
    state = moved(state)
    xs = []
    for layers in range(3):  # The stream after so many layers of the base.
        base = dataclasses.replace(DENSE, num_layers=layers or 1)
        blocks = jax.tree.map(lambda a, n=layers: a[: n or 1], state.rest["blocks"])
        weights = weights_of(base, {**state.rest, "blocks": blocks})
        x = whole.gpt.embed(base, weights["embed"], TOKENS[:, :-1])
        xs.append(whole.apply_blocks(base, weights, x)[0] if layers else x)
    side = {name: state.params[name]["side"] for name in ("blocks", "head")}
    expected, gradients = jax.value_and_grad(reference_loss)(side, xs, state)
    metrics, mine = whole.loss_and_gradients(model, state.params, state.rest, BATCH)
    np.testing.assert_allclose(metrics["loss"].number(), expected, rtol=1e-5)
    mine = {name: mine[name]["side"] for name in side}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), mine, gradients)


@pytest.mark.parametrize("name", some(list(ALL_BASES), "sparse", "gemma2"))
def test_generated_tokens_are_the_likeliest_of_the_logits(name):
    model, state = start(ALL_BASES[name])
    params = moved(state).merged
    prompts = [TOKENS[i, :length].tolist() for i, length in enumerate((3, 1, 7))]
    tolerance = 2e-2 if name == "bfloat16" else 1e-4
    weights = kv_cache.prepare(model, params, decoded_form.DENSE)
    scores = jax.jit(lambda tokens: whole.logits(model, weights_of(model, params, ()), tokens))
    for new in generate_tokens(model, weights, prompts, 4, 16):
        padded = np.asarray([prompt + [0] * (16 - len(prompt)) for prompt in prompts])
        for row, (prompt, logits) in enumerate(zip(prompts, scores(padded), strict=True)):
            assert logits[len(prompt) - 1, new[row]] >= logits[len(prompt) - 1].max() - tolerance
            prompt.append(new[row])


@pytest.mark.parametrize("remat", some(["none", "full", "keep"], "full"))
def test_the_plan_of_memory_is_that_of_the_compiled_step(remat):
    base = ModelConfig(whole.UNROLL_LAYERS + 1, 256, 4, 1024, 512, 128, remat=remat)
    training = TrainingConfig(steps=1, batch=2, sequence=128, side_width=16)
    model = adapted_model.with_adapters(base, 0, side_width=16)
    plan = planned_as_compiled(model, training)
    assert plan.state == memory.frozen_bytes(model) + 16 * cost.side_count(model)


def test_flops_are_those_of_a_forward_pass_and_a_backward_pass_of_side_and_head():
    model = adapted_model.with_adapters(DENSE, 0, side_width=4)
    step, base = cost.flops_per_token(model, 8, adapters=True), cost.flops_per_token(DENSE, 8)
    forward = cost.flops_per_token(DENSE, 8, training=False)
    side = 2 * cost.side_count(model)
    assert cost.side_count(model) == 2 * (32 * 4 + 2 * 16) + 32 * 4 + 2 * 16 + 4 * 32
    assert step.total == pytest.approx(forward.total + forward.head + 3 * side)
    assert step.total < base.total / 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adapter_rank": 2}, "side_width=8 lets no .*adapter_rank=2 is .*legal with it: 0"),
        ({"prompt_vectors": 2}, "training.prompt_vectors=2 is trained by; legal with it: 0"),
        ({"optimizer": "muon"}, "legal with it: adamw"),
    ],
)
def test_what_needs_a_gradient_through_the_layers_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        TrainingConfig(side_width=8, **changes)


def test_experts_are_refused():
    with pytest.raises(UserError, match=r"side_width=8 with model.experts=4 .*: 0"):
        adapted_model.with_adapters(dataclasses.replace(DENSE, experts=4), 0, side_width=8)


def stored(model, dtype, folder):
    return features.StoredFeatures(model, dtype, folder)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("base", some(ALL_BASES, "sparse"))
def test_a_step_on_stored_features_is_that_of_the_whole_model(tmp_path, dtype, base):
    """To the rounding of the stored form; read again, they are the same bits."""
    model, state = start(base)
    state = moved(state)
    add = stored(model, dtype, tmp_path).program()
    batch = add(BATCH, state.rest)
    again = stored(model, dtype, tmp_path).program()(BATCH, state.rest)
    assert np.array_equal(batch.features, again.features)
    assert len(list(tmp_path.glob("*.npy"))) == len(TOKENS)
    shape = stored(model, dtype, tmp_path).example(BATCH).features
    assert (shape.shape, shape.dtype) == (batch.features.shape, batch.features.dtype)
    expected, gradients = whole.loss_and_gradients(model, state.params, state.rest, BATCH)
    how = whole.Accumulation(2)
    metrics, mine = whole.loss_and_gradients(model, state.params, state.rest, batch, how)
    np.testing.assert_allclose(metrics["loss"].number(), expected["loss"].number(), rtol=2e-3)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(a, b, atol=0.05 * np.abs(b).max())


def test_other_weights_tokens_dtypes_and_models_have_other_features(tmp_path):
    model, state = start(DENSE)
    add = stored(model, "int8", tmp_path).program()
    first = add(BATCH, state.rest).features
    count = lambda: len(list(tmp_path.glob("*.npy")))  # noqa: E731
    assert count() == 4
    norm = state.rest["head"]["norm"]
    other = {**state.rest, "head": {"norm": {**norm, "scale": norm["scale"].at[0].add(1e-3)}}}
    stored(model, "int8", tmp_path).program()(BATCH, other)
    assert count() == 8
    stored(model, "bfloat16", tmp_path).program()(BATCH, state.rest)
    assert count() == 12
    documents = dataclasses.replace(model, mask_documents=True)
    stored(documents, "int8", tmp_path).program()(BATCH, state.rest)
    assert count() == 16
    # A batch of two known rows and two new ones stores two.
    mixed = Batch.from_windows(np.concatenate([TOKENS[2:], TOKENS[:2] + 1 - TOKENS[:2] // 47]))
    features_of_mixed = add(mixed, state.rest).features
    assert count() == 18
    assert np.array_equal(features_of_mixed[:2], first[2:])
    # Another side network reads the same features.
    wider, _ = dataclasses.replace(model, side_width=4), None
    stored(wider, "int8", tmp_path).program()(BATCH, state.rest)
    assert count() == 18


def test_a_damaged_row_is_computed_again(tmp_path):
    model, state = start(DENSE)
    add = stored(model, "int8", tmp_path).program()
    first = add(BATCH, state.rest).features
    for path in tmp_path.glob("*.npy"):
        path.write_bytes(path.read_bytes()[:-1])
    again = stored(model, "int8", tmp_path).program()(BATCH, state.rest).features
    assert np.array_equal(first, again)
