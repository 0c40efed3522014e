"""Prompt tuning: vectors in front of each row, which alone are trained, and what reads them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples, some
from test_adapters import BASES, DENSE, SHAPE, SPARSE, planned_as_compiled, same_bits

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.step import (
    initial_state,
    make_train_step,
)
from sparse_dataflow.evaluation import decoded_form, kv_cache
from sparse_dataflow.evaluation.generate import generate_tokens
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner import memory, plan_memory
from sparse_dataflow.runs import adapted_model
from sparse_dataflow.runs.families import FAMILIES

VECTORS = 3
ALL_BASES = BASES | {
    # A window that does not reach the vectors from every token.
    "window": dataclasses.replace(DENSE, **FAMILIES["llama"], num_kv_heads=2, window=4),
    "scaled": dataclasses.replace(DENSE, **FAMILIES["gemma2"] | {"window": 3}, num_kv_heads=2),
}
TRAINING = TrainingConfig(steps=4, batch=4, sequence=8, learning_rate=1e-2, prompt_vectors=VECTORS)
TOKENS = np.random.default_rng(0).integers(0, 48, (4, 9)).astype(np.int32)
WEIGHTS = np.random.default_rng(1).uniform(size=(4, 8)).astype(np.float32)
BATCH = Batch.from_windows(TOKENS, WEIGHTS / WEIGHTS.sum())
exact_bases = some([name for name in ALL_BASES if name != "bfloat16"], "window", "scaled", "sparse")


def start(base, vectors=VECTORS):
    """Returns (config with vectors, initial state with vectors of the scale of embeddings)."""
    model = adapted_model.with_adapters(base, 0, prompt_vectors=vectors)
    state = initial_state(model, dataclasses.replace(TRAINING, prompt_vectors=vectors))
    return model, state._replace(rest=stacks.fixed_layouts(state.rest))


def longer_vocabulary(model, params):
    """Returns an ordinary model whose tokens after the vocabulary are the vectors.

    Its output layer has rows for them too, of which `text_logits` takes none.
    """
    embed, head = dict(params["embed"]), dict(params["head"])
    vectors, table = np.asarray(embed.pop("prompt")), np.asarray(embed["tokens"])
    embed["tokens"] = np.concatenate([table, vectors])
    if "output" in head:
        head["output"] = np.concatenate([head["output"], 0 * vectors])
    changes = {"vocab_size": model.vocab_size + len(vectors), "prompt_vectors": 0}
    return dataclasses.replace(model, **changes), {**params, "embed": embed, "head": head}


def text_logits(plain, params, tokens):
    """Returns the logits of text behind the added tokens of a `longer_vocabulary`."""
    count = len(params["embed"]["tokens"]) - SHAPE["vocab_size"]
    front = jnp.broadcast_to(SHAPE["vocab_size"] + jnp.arange(count), (len(tokens), count))
    weights = weights_of(plain, params)
    ids = jnp.concatenate([front, tokens], axis=1)
    return whole.logits(plain, weights, ids)[:, count:, : SHAPE["vocab_size"]]


@pytest.mark.parametrize("name", exact_bases)
def test_logits_are_those_of_ordinary_tokens_whose_embeddings_are_the_vectors(name):
    model, state = start(ALL_BASES[name])
    params = state.merged
    expected = text_logits(*longer_vocabulary(model, params), TOKENS[:, :8])
    weights = weights_of(model, params)
    np.testing.assert_allclose(whole.logits(model, weights, TOKENS[:, :8]), expected, atol=2e-5)
    # A vector is no token: no logit is its own, and it changes what follows.
    other = {**params, "embed": {**params["embed"], "prompt": -params["embed"]["prompt"]}}
    moved = whole.logits(model, weights_of(model, other), TOKENS[:, :8])
    assert np.abs(moved - expected).max() > 1e-3


def reference_loss(plain, params, vectors):
    """Returns the weighted loss of BATCH by the ordinary model, as a function of the vectors."""
    table = params["embed"]["tokens"][: SHAPE["vocab_size"]]
    tokens = jnp.concatenate([table, vectors])
    logits = text_logits(
        plain, {**params, "embed": {**params["embed"], "tokens": tokens}}, TOKENS[:, :8]
    )
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), TOKENS[:, 1:, None], axis=2)
    return jnp.sum(losses[..., 0] * BATCH.token_weights)


@pytest.mark.parametrize("name", exact_bases)
def test_the_gradient_of_the_vectors_is_that_of_the_concatenated_embeddings(name):
    """By differentiation of an ordinary model, and by differences along a direction."""
    model, state = start(ALL_BASES[name])
    plain, params = longer_vocabulary(model, state.merged)
    loss = jax.jit(functools.partial(reference_loss, plain, params))
    vectors = state.params["embed"]["prompt"]
    metrics, gradients = whole.loss_and_gradients(model, state.params, state.rest, BATCH)
    assert jax.tree.map(jnp.shape, gradients) == {"embed": {"prompt": vectors.shape}}
    gradient = gradients["embed"]["prompt"]
    np.testing.assert_allclose(gradient, jax.grad(loss)(vectors), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(metrics["loss"].number(), loss(vectors), rtol=1e-5)
    direction = np.random.default_rng(2).normal(size=vectors.shape).astype(np.float32)
    above, below = (float(loss(vectors + step * direction)) for step in (1e-3, -1e-3))
    np.testing.assert_allclose(np.vdot(gradient, direction), (above - below) / 2e-3, atol=1e-2)


@pytest.mark.parametrize("base", some(BASES, "sparse"))
def test_training_changes_every_vector_and_no_bit_of_the_base(base):
    model, state = start(base)
    step = jax.jit(make_train_step(model, TRAINING))
    before = jax.device_get(state)
    for _ in range(2):
        state, report = step(state, BATCH, np.float32(1e-2))
    assert same_bits(before.rest, state.rest) and np.isfinite(report.loss)
    (vectors,) = jax.tree.leaves(state.params)
    assert (vectors != before.params["embed"]["prompt"]).all()
    assert jax.tree.structure(state.moments[1].mu) == jax.tree.structure(state.params)
    assert "prompt" not in state.rest["embed"]


@settings(max_examples=examples(20))
@given(
    st.sampled_from(["dense", "window", "scaled"]),
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_generated_tokens_are_the_likeliest_after_vectors_and_text(name, lengths, vectors):
    model, state = start(ALL_BASES[name], vectors)
    params = jax.tree.map(lambda leaf: leaf * 3, state.merged)  # Clear differences of logits.
    prompts = [TOKENS[i, :length].tolist() for i, length in enumerate(lengths)]
    weights = kv_cache.prepare(model, params, decoded_form.DENSE)
    written = list(generate_tokens(model, weights, prompts, 3, 10))
    for row, prompt in enumerate(prompts):
        for new in written:
            if new[row] is None:  # The context of 10 tokens is full; vectors take none of it.
                assert len(prompt) == 10
                continue
            logits = whole.logits(model, weights_of(model, params, {}), np.asarray([prompt]))[0, -1]
            assert logits[new[row]] >= logits.max() - 1e-4
            prompt.append(new[row])


def test_scores_of_continuations_are_those_of_the_logits():
    model, state = start(SPARSE)
    weights = weights_of(model, state.merged)
    logits = jax.nn.log_softmax(whole.logits(model, weights, TOKENS[:, :8]))
    places = np.asarray([0, 7, 8, 20, 31, 31], np.int32)
    targets = np.asarray([1, 2, 3, 4, 5, 47], np.int32)
    losses, largest = whole.token_scores(model, weights, Batch(TOKENS[:, :8]), places, targets)
    rows = logits.reshape(-1, 48)[places]
    np.testing.assert_allclose(losses, -rows[np.arange(6), targets], atol=1e-5)
    assert (largest == (rows.argmax(1) == targets)).all()


def test_the_plan_of_memory_is_that_of_the_compiled_step():
    base = ModelConfig(whole.UNROLL_LAYERS + 1, 256, 4, 1024, 512, 160, remat="full")
    training = TrainingConfig(steps=1, batch=2, sequence=128, prompt_vectors=32)
    model = adapted_model.with_adapters(base, 0, prompt_vectors=32)
    plan = planned_as_compiled(model, training)
    assert plan.state == memory.frozen_bytes(model) + 16 * 32 * 256
    plain = dataclasses.replace(training, sequence=160, prompt_vectors=0)
    assert plan.activations == plan_memory.training_bytes(base, plain).activations


def test_flops_are_those_of_rows_with_the_vectors_and_of_no_gradient_of_weights():
    model = adapted_model.with_adapters(DENSE, 0, prompt_vectors=4)
    step = cost.flops_per_token(model, 12, adapters=True)
    row = cost.flops_per_token(DENSE, 16, training=False)
    assert step.head == pytest.approx(2 * row.head * 16 / 12)
    assert step.attention == pytest.approx(3 * row.attention * 16 / 12)
    assert step.total == pytest.approx((2 * row.total + row.attention) * 16 / 12)


def test_a_model_that_takes_no_vectors_is_named():
    with pytest.raises(UserError, match=r"prompt_vectors=2 with model.experts=4 .*: 0"):
        adapted_model.with_adapters(dataclasses.replace(DENSE, experts=4), 0, prompt_vectors=2)
    with pytest.raises(UserError, match="legal with it: adamw"):
        TrainingConfig(optimizer="muon", prompt_vectors=4)
