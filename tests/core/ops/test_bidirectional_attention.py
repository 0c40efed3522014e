"""Attention in both directions against softmax written out in numpy's float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_dataflow.chips.tpu import splash
from sparse_dataflow.core.executors.context import zigzag
from sparse_dataflow.core.ops.attention import attention_op, dot_product
from sparse_dataflow.core.ops.attention.attention_op import self_attention

TOKENS = 256
SUITE = {
    "reference": functools.partial(self_attention, implementation="reference"),
    "xla": functools.partial(self_attention, implementation="xla"),
    "splash": functools.partial(splash.self_attention, interpret=True),
}


def draw(tokens, heads=2, kv_heads=1):
    rng = np.random.default_rng(tokens)
    shapes = [(2, tokens, count, 8) for count in (heads, kv_heads, kv_heads)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def documents_of(tokens):
    """Two rows, each of documents of its own lengths."""
    ends = [[3, tokens // 2, tokens - 2], [tokens // 3]]
    return np.stack([np.searchsorted(each, np.arange(tokens), "right") for each in ends]).astype(
        np.int32
    )


def exact(query, key, value, window=0, documents=None):
    """[batch, tokens, heads, head_dim] in float64, one query at a time."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    key, value = (np.repeat(a, query.shape[2] // a.shape[2], axis=2) for a in (key, value))
    result, places = np.zeros_like(query), np.arange(query.shape[1])
    for row in range(len(query)):
        for t in places:
            seen = abs(places - t) < window if window else places >= 0
            if documents is not None:
                seen = seen & (documents[row] == documents[row, t])
            scores = np.einsum("hd,shd->hs", query[row, t], key[row, seen]) / np.sqrt(8)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            result[row, t] = np.einsum("hs,shd->hd", weights, value[row, seen])
    return result


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(dot_product, "DENSE_TOKENS", 4)
    monkeypatch.setattr(dot_product, "CHUNK", 4)


def how_of(window, within, tokens):
    return {
        "window": window,
        "documents": documents_of(tokens) if within else None,
        "bidirectional": True,
    }


@pytest.mark.parametrize(("window", "within"), [(0, False), (0, True), (3, True)])
@pytest.mark.parametrize("name", SUITE)
def test_a_token_sees_both_sides(name, window, within):
    tokens = 128 if name == "splash" else 13
    how = how_of(window, within, tokens)
    operands = draw(tokens)
    ours = jax.jit(functools.partial(SUITE[name], **how))(*operands)
    np.testing.assert_allclose(ours, exact(*operands, window, how["documents"]), atol=2e-6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("window", "within"), [(0, False), (3, False), (0, True)])
@pytest.mark.parametrize("tokens", [8, 13])
def test_chunks_see_both_sides_and_no_padding(tokens, window, within):
    how = how_of(window, within, tokens)
    operands = draw(tokens)

    def loss(attend):
        return lambda *a: jnp.sum(jnp.sin(attend(*a, **how)))

    np.testing.assert_allclose(
        self_attention(*operands, **how),
        exact(*operands, window, how["documents"]),
        atol=2e-6,
    )
    ours, plain = (
        jax.jit(jax.grad(loss(SUITE[name]), argnums=(0, 1, 2)))(*operands)
        for name in ("xla", "reference")
    )
    for mine, right in zip(ours, plain, strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-5)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("name", ["xla", "splash"])
def test_shards_of_a_sequence_see_both_sides(name, window):
    query, key, value = draw(TOKENS)
    order = zigzag(TOKENS, 2)
    how = {"window": window, "bidirectional": True}
    attend = attention_op.shard_attention
    if name == "splash":
        attend = functools.partial(splash.shard_attention, interpret=True)
    shards = [attend(query[:, order[i]], key, value, order, jnp.int32(i), **how) for i in range(2)]
    ours = jnp.concatenate(shards, axis=1)[:, np.argsort(order.reshape(-1))]
    np.testing.assert_allclose(ours, exact(query, key, value, window), atol=2e-6)


def test_cudnn_has_no_window_on_both_sides():
    query, key, _ = (jax.ShapeDtypeStruct((2, 128, 2, 64), "bfloat16") for _ in range(3))
    assert "window" in dot_product.cudnn_refusal(query, key, 5, None, True)
