"""The loss of training.objective=masked against a transformer written out here."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.held_out import batch_sums
from sparse_dataflow.core.training.step import make_eval_step
from sparse_dataflow.data.masking import Masking

MODEL = dataclasses.replace(small_models.DENSE, bidirectional=True)
END, MASK = MODEL.vocab_size - 1, MODEL.vocab_size - 2
TRAINING = TrainingConfig(1, 6, 16, objective="masked", mask_share=0.4)
MASKING = Masking(MASK, MASK, END, TRAINING)


def draw(seed=0):
    rng = np.random.default_rng(seed)
    inputs = rng.integers(MASK, size=(6, 16)).astype(np.int32)
    inputs[rng.random(inputs.shape) < 0.2] = END
    return gpt.init(MODEL, jax.random.key(seed)), MASKING.training_batch(inputs, range(6), 6)


def normed(x, norm):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * norm["scale"] + norm["bias"]


def plain_logits(params, tokens, documents=None):
    """Scores of each place, from embeddings, attention of every pair and MLPs."""
    heads, width = MODEL.num_heads, MODEL.head_width
    x = params["embed"]["tokens"][tokens] + params["embed"]["positions"][: tokens.shape[1]]
    for layer in range(MODEL.num_layers):
        block = jax.tree.map(lambda leaf, i=layer: leaf[i], params["blocks"])
        qkv = normed(x, block["norm1"]) @ block["qkv"]["kernel"] + block["qkv"]["bias"]
        q, k, v = jnp.moveaxis(qkv.reshape(*tokens.shape, heads, 3, width), 3, 0)
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(width)
        if documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None, :]
            scores = jnp.where(same, scores, -1e30)
        y = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v).reshape(x.shape)
        x = x + y @ block["attn_out"]["kernel"] + block["attn_out"]["bias"]
        hidden = normed(x, block["norm2"]) @ block["mlp_in"]["kernel"] + block["mlp_in"]["bias"]
        hidden = jax.nn.gelu(hidden, approximate=True)
        x = x + hidden @ block["mlp_out"]["kernel"] + block["mlp_out"]["bias"]
    return normed(x, params["head"]["norm"]) @ params["embed"]["tokens"].T


def plain_loss(params, batch, documents=None):
    """The mean over the hidden tokens of the negative log of the probability of each."""
    log_probabilities = jax.nn.log_softmax(plain_logits(params, batch.tokens, documents))
    hidden = np.argwhere(batch.token_weights > 0)
    losses = [-log_probabilities[r, t, batch.targets[r, t]] for r, t in hidden]
    return sum(losses) / (6 * round(0.4 * 16))


@pytest.mark.parametrize("within", [False, True])
def test_the_loss_and_its_gradients_are_those_of_a_plain_transformer(within):
    model = dataclasses.replace(MODEL, mask_documents=within)
    params, batch = draw()
    ends = batch.targets == END
    documents = np.cumsum(ends, axis=1) - ends if within else None
    loss, gradients = jax.value_and_grad(plain_loss)(params, batch, documents)
    metrics, ours = whole.loss_and_gradients(model, params, (), batch)
    assert float(metrics["loss"].total) == pytest.approx(float(loss), rel=1e-5)
    for mine, right in zip(jax.tree.leaves(ours), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-5 * np.abs(right).max() + 1e-7)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_token_sees_those_after_it_in_a_masked_model_alone(bidirectional):
    model = dataclasses.replace(MODEL, bidirectional=bidirectional)
    params, batch = draw()
    changed = batch.tokens.copy()
    changed[:, -1] = (changed[:, -1] + 1) % MASK
    weights = weights_of(model, params)
    first, second = (whole.logits(model, weights, tokens) for tokens in (batch.tokens, changed))
    moved = np.abs(np.asarray(first - second)[:, 0]).max(axis=-1)
    assert (moved > 1e-5).all() if bidirectional else not moved.any()


def test_an_evaluation_counts_the_hidden_tokens_that_are_likeliest():
    params, batch = draw()
    counted = dataclasses.replace(batch, token_weights=np.sign(batch.token_weights))
    logits = np.array(plain_logits(params, batch.tokens))
    # Half of the hidden tokens are given as the likeliest ones.
    hidden = np.argwhere(counted.token_weights > 0)
    for row, place in hidden[::2]:
        counted.targets[row, place] = logits[row, place].argmax()
    expected = sum(logits[r, t].argmax() == counted.targets[r, t] for r, t in hidden)
    metrics = make_eval_step(MODEL)(params, (), counted)
    assert metrics["correct"].number() == expected >= len(hidden) / 2
    assert set(make_eval_step(small_models.DENSE)(params, (), counted)) == {"loss"}


def test_the_sums_of_a_batch_have_what_was_measured():
    params, batch = draw()

    programs = types.SimpleNamespace(eval_step=make_eval_step(MODEL), rest=lambda state: ())
    [sums] = batch_sums(programs, types.SimpleNamespace(params=params), [batch])
    assert sums.nats == pytest.approx(float(plain_loss(params, batch)), rel=1e-5)
    assert sums.weights == pytest.approx(batch.token_weights.sum())


def test_attention_in_both_directions_costs_twice_the_causal_half():
    sequence = 16
    causal, both = (cost.flops_per_token(model, sequence) for model in (small_models.DENSE, MODEL))
    assert both.attention == 2 * causal.attention
    assert both.total - both.attention == causal.total - causal.attention


def test_padding_is_seen_by_no_token():
    """Ids below 0 follow shorter rows where continuations are scored."""
    params, _ = draw()
    tokens = np.arange(10, dtype=np.int32)[None]
    padded = np.pad(tokens, ((0, 0), (0, 6)), constant_values=-1)
    places, targets = np.arange(8, dtype=np.int32), np.arange(1, 9, dtype=np.int32)
    for model in (MODEL, dataclasses.replace(MODEL, mask_documents=True)):
        scores = [
            whole.token_scores(model, weights_of(model, params), Batch(rows), places, targets)[0]
            for rows in (tokens, padded)
        ]
        np.testing.assert_allclose(*scores, rtol=1e-5)
