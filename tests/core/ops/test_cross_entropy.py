"""Chunked cross-entropy: the reference's losses and gradients, without the full logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples

from sparse_dataflow.core.config import remat
from sparse_dataflow.core.ops.cross_entropy import cross_entropy_op as api

CHUNK = 8


@pytest.fixture(autouse=True, scope="module")
def short_chunks():
    """Use chunks of 8 tokens, so that small cases need several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remat, "CPU_TOKENS", CHUNK)
        yield


def operands(tokens, d_model, vocab, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, d_model)).astype(jnp.dtype(dtype))
    embedding = rng.normal(size=(vocab, d_model)).astype(jnp.dtype(dtype))
    targets = rng.integers(0, vocab, tokens).astype(np.int32)
    weights = rng.uniform(size=tokens).astype(np.float32)
    weights[rng.uniform(size=tokens) < 0.2] = 0  # Padding.
    return x, embedding, targets, weights


def loss_and_gradients(function, x, embedding, targets, weights, scale=1.0):
    scaled = lambda x, embedding: scale * function(x, embedding, targets, weights)  # noqa: E731
    return jax.jit(jax.value_and_grad(scaled, argnums=(0, 1)))(x, embedding)


def exact(x, embedding, targets, weights, scale):
    """Return (token losses, gradients of scale * weighted sum in x and embedding), in float64."""
    x, embedding = np.asarray(x, np.float64), np.asarray(embedding, np.float64)
    logits = x @ embedding.T
    odds = np.exp(logits - logits.max(1, keepdims=True))
    probability = odds / odds.sum(1, keepdims=True)
    dlogits = probability.copy()
    dlogits[np.arange(len(x)), targets] -= 1
    dlogits *= scale * weights[:, None].astype(np.float64)
    losses = -np.log(probability[np.arange(len(x)), targets])
    return losses, (dlogits @ embedding, dlogits.T @ x)


def plain_loss(x, embedding, targets, weights):
    log_probability = jax.nn.log_softmax(x @ embedding.T)
    return -jnp.sum(log_probability[jnp.arange(len(x)), targets] * weights)


TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 2e-2}


@settings(max_examples=examples(10))
@given(
    tokens=st.sampled_from([1, 5, 8, 9, 16, 23]),
    d_model=st.integers(1, 9),
    vocab=st.integers(1, 70),
    dtype=st.sampled_from(sorted(TOLERANCE)),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1.0, -0.25, 3.0]),
)
def test_losses_and_gradients(tokens, d_model, vocab, dtype, seed, scale):
    x, embedding, targets, weights = operands(tokens, d_model, vocab, dtype, seed)
    with jax.enable_x64(dtype == "float64"):
        losses, _ = jax.jit(api.token_scores)(x, embedding, targets)
        loss, gradients = loss_and_gradients(
            api.weighted_loss, x, embedding, targets, weights, scale
        )
    right, right_gradients = exact(x, embedding, targets, weights, scale)
    # Logits of bfloat16 operands are float32.
    wide = "float64" if dtype == "float64" else "float32"
    close = {"rtol": TOLERANCE[wide], "atol": TOLERANCE[wide]}
    assert losses.shape == (tokens,) and losses.dtype == wide
    np.testing.assert_allclose(losses, right, **close)
    np.testing.assert_allclose(loss, scale * np.sum(right * weights), **close)
    for gradient, expected in zip(gradients, right_gradients):
        assert gradient.dtype == dtype and gradient.shape == expected.shape
        size = TOLERANCE[dtype] * np.abs(expected).max(initial=1)
        np.testing.assert_allclose(np.asarray(gradient, np.float64), expected, atol=size)


@settings(max_examples=6)
@given(
    vocab=st.integers(1, 70),
    more=st.integers(1, 20),
    tokens=st.sampled_from([1, 8, 23]),
    seed=st.integers(0, 99),
)
def test_padding_rows_change_nothing(vocab, more, tokens, seed):
    x, embedding, targets, weights = operands(tokens, 5, vocab, "float32", seed)
    padded = np.concatenate([embedding, np.full((more, 5), 3, np.float32)])

    @functools.partial(jax.jit, static_argnums=1)
    def scores_and_gradients(table, size):
        loss = lambda *a: api.weighted_loss(*a, targets, weights, None, size)  # noqa: E731
        scores = api.token_scores(x, table, targets, None, size)
        return *scores, *jax.value_and_grad(loss, (0, 1))(x, table)

    losses, likeliest, loss, (dx, dtable) = scores_and_gradients(padded, vocab)
    right = scores_and_gradients(embedding, None)
    np.testing.assert_allclose(losses, right[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(likeliest, right[1])
    np.testing.assert_allclose(loss, right[2], rtol=1e-5)
    np.testing.assert_allclose(dx, right[3][0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dtable[:vocab], right[3][1], rtol=1e-4, atol=1e-5)
    assert not np.any(dtable[vocab:])


def test_gradients_match_finite_differences():
    x, embedding, targets, weights = operands(11, 3, 7, "float64")
    rng = np.random.default_rng(1)
    moves = rng.normal(size=x.shape), rng.normal(size=embedding.shape)
    with jax.enable_x64(True):
        step = lambda s: (x + s * moves[0], embedding + s * moves[1], targets, weights)  # noqa: E731
        loss = jax.jit(api.weighted_loss)
        slope = (loss(*step(1e-5)) - loss(*step(-1e-5))) / 2e-5
        _, gradients = loss_and_gradients(api.weighted_loss, x, embedding, targets, weights)
    along = sum(np.sum(np.asarray(g) * m) for g, m in zip(gradients, moves))
    assert along == pytest.approx(float(slope), rel=1e-7)


def test_capped_logits_have_the_gradients_of_automatic_differentiation():
    """Also with a padding row, whose logit is -inf."""
    x, embedding, targets, weights = operands(11, 3, 7, "float32")
    x = 4 * x

    def exact(x, embedding, targets, weights):
        log_probability = jax.nn.log_softmax(2 * jnp.tanh(x @ embedding[:6].T / 2))
        return -jnp.sum(log_probability[jnp.arange(len(x)), targets] * weights)

    capped = lambda *a: api.weighted_loss(*a, None, 6, 2.0)  # noqa: E731
    targets = targets % 6
    loss, gradients = loss_and_gradients(capped, x, embedding, targets, weights)
    expected, exact_gradients = loss_and_gradients(exact, x, embedding, targets, weights)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for gradient, right in zip(gradients, exact_gradients):
        np.testing.assert_allclose(gradient, right, rtol=1e-4, atol=1e-6)


def test_large_logits_stay_finite():
    x = np.full((10, 4), 1e4, np.float32)
    embedding = np.eye(6, 4, dtype=np.float32) * 10
    targets, weights = np.arange(10, dtype=np.int32) % 6, np.ones(10, np.float32)
    loss, gradients = loss_and_gradients(api.weighted_loss, x, embedding, targets, weights)
    assert all(np.all(np.isfinite(leaf)) for leaf in (loss, *gradients))


@pytest.mark.parametrize("vocab", [300, 3000])
def test_the_full_logits_never_exist(array_sizes, vocab):
    tokens, d_model = 100 * CHUNK, 16
    case = operands(tokens, d_model, vocab, "float32")
    largest = lambda function: max(  # noqa: E731
        array_sizes(lambda *a: jax.value_and_grad(function, (0, 1))(*a), *case)
    )
    assert largest(api.weighted_loss) == max(CHUNK * vocab, tokens * d_model, vocab * d_model)
    assert largest(plain_loss) == tokens * vocab


@pytest.mark.parametrize(
    ("vocabulary", "tokens"),
    [(16, 4096), (32_000, 4096), (50_257, 2048), (262_144, 512), (10**7, CHUNK)],
)
def test_an_accelerator_takes_as_many_tokens_as_half_a_gibibyte_of_logits_has(vocabulary, tokens):
    assert remat.chunk_tokens(vocabulary) == tokens
