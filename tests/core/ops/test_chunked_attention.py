"""Attention in chunks, over documents and of shards of a sequence, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some

from sparse_dataflow.chips.tpu import splash
from sparse_dataflow.core.ops.attention import (
    attention_op as api,
)
from sparse_dataflow.core.ops.attention import attention_op as reference
from sparse_dataflow.core.ops.attention import dot_product
from sparse_dataflow.core.ops.attention.dot_product import Tokens


def draw(tokens, heads, kv_heads, width=8, rows=2, seed=0):
    rng = np.random.default_rng(seed)
    of = lambda n: rng.normal(size=(rows, tokens, n, width)).astype(np.float32)  # noqa: E731
    return [of(heads), of(kv_heads), of(kv_heads)]


def documents_of(tokens, count, rows=2, seed=0):
    rng = np.random.default_rng(seed)
    return np.sort(rng.integers(0, count, (rows, tokens)), axis=1).astype(np.int32)


def zigzag(tokens, shards):
    """Returns the positions of each shard, which has the i-th chunk from either end."""
    chunks = np.arange(tokens).reshape(2 * shards, -1)
    return np.stack([np.concatenate([chunks[i], chunks[-1 - i]]) for i in range(shards)])


def with_gradients(attend, operands):
    """Returns the result and its gradients, of a loss that weighs all of it."""

    def loss(*operands):
        result = attend(*operands)
        return jnp.sum(result * jnp.sin(jnp.arange(result.size)).reshape(result.shape))

    return attend(*operands), *jax.grad(loss, argnums=(0, 1, 2))(*operands)


def assert_equal(ours, exact, tolerance=3e-6):
    for mine, right in zip(ours, exact, strict=True):
        scale = max(1, np.abs(right).max())  # A window of one key has no gradient of queries.
        np.testing.assert_allclose(mine / scale, right / scale, atol=tolerance)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(dot_product, "CHUNK", 4)
    monkeypatch.setattr(dot_product, "DENSE_TOKENS", 0)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "group", "window", "cap", "count"),
    some(
        [
            (1, 1, 1, 0, 0.0, 0),
            (4, 2, 1, 0, 0.0, 3),
            (7, 1, 3, 0, 0.7, 0),
            (13, 2, 2, 0, 0.0, 5),
            (16, 1, 2, 1, 0.0, 0),
            (19, 2, 1, 6, 0.7, 4),
            (19, 1, 1, 20, 0.0, 2),
        ],
        7,
        13,
    ),
)
def test_chunks_have_the_result_and_the_gradients_of_the_reference(
    tokens, kv_heads, group, window, cap, count
):
    operands = draw(tokens, kv_heads * group, kv_heads)
    how = {"window": window, "cap": cap}
    how["documents"] = documents_of(tokens, count) if count else None
    ours = jax.jit(lambda *a: with_gradients(functools.partial(api.self_attention, **how), a))
    exact = with_gradients(functools.partial(reference.plain_attention, **how), operands)
    assert_equal(ours(*operands), exact)


@pytest.mark.usefixtures("small_chunks")
def test_chunks_in_bfloat16_sum_in_float32():
    shape = (1, 1024, 1, 8)
    zeros, values = jnp.zeros(shape, jnp.bfloat16), jnp.ones(shape, jnp.bfloat16)
    result = np.asarray(api.self_attention(zeros, zeros, values), np.float32)
    np.testing.assert_allclose(result, 1, rtol=2**-7)


def test_no_scores_beyond_a_chunk_exist_for_many_tokens():
    tokens, heads = 4096, 4
    shape = jax.ShapeDtypeStruct((1, tokens, heads, 16), jnp.float32)
    marks = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def loss(query, key, value, documents):
        return api.self_attention(query, key, value, documents=documents).sum()

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*[shape] * 3, marks).compile()
    array, chunk = tokens * heads * 16 * 4, heads * dot_product.CHUNK**2 * 4
    used = program.memory_analysis().temp_size_in_bytes
    assert used < 20 * array + 8 * chunk < heads * tokens**2 * 4 / 2


@pytest.mark.parametrize(("heads", "kv_heads", "window"), some([(2, 2, 0), (4, 2, 100)], 4))
def test_splash_attention_of_documents_is_that_of_the_reference(heads, kv_heads, window):
    operands = draw(256, heads, kv_heads, width=64)
    how = {"window": window, "documents": documents_of(256, 5)}
    ours = jax.jit(functools.partial(splash.self_attention, interpret=True, **how))(*operands)
    exact = reference.plain_attention(*operands, **how)
    np.testing.assert_allclose(ours, exact, atol=2e-6)


def test_splash_attention_of_documents_has_the_gradients_of_the_reference():
    operands, how = draw(256, 2, 1, width=32, rows=1), {"documents": documents_of(256, 4, rows=1)}
    attend = functools.partial(splash.self_attention, interpret=True, **how)
    exact = with_gradients(functools.partial(reference.plain_attention, **how), operands)
    assert_equal(jax.jit(lambda *a: with_gradients(attend, a))(*operands), exact)


@pytest.mark.parametrize("documents", some([0, 5], 5))
@pytest.mark.parametrize("window", some([0, 100], 100))
@pytest.mark.parametrize("name", ["xla", "splash"])
def test_shards_of_a_sequence_attend_as_the_whole(name, window, documents, monkeypatch):
    tokens, shards = 512, 2
    query, key, value = draw(tokens, 4, 2, width=32, rows=1)
    marks = documents_of(tokens, documents, rows=1) if documents else None
    order = zigzag(tokens, shards)
    monkeypatch.setattr(dot_product, "DENSE_TOKENS", 128)

    def attend(query, key, value):
        def shard(i):
            how, queries = {"window": window, "cap": 0.9}, query[:, order[i]]
            if name == "xla":
                how["documents"] = marks
                return api.shard_attention(queries, key, value, order, jnp.int32(i), **how)
            how["documents"] = (marks[:, order[i]], marks) if documents else None
            operands = queries, key, value, order, jnp.int32(i)
            return splash.shard_attention(*operands, **how, interpret=True)

        chunks = jnp.concatenate([shard(i) for i in range(shards)], axis=1)
        return chunks[:, np.argsort(order.reshape(-1))]

    exact = functools.partial(reference.plain_attention, window=window, cap=0.9, documents=marks)
    operands = query, key, value
    ours = jax.jit(lambda *a: with_gradients(attend, a))(*operands)
    assert_equal(ours, with_gradients(exact, operands))


def test_padding_of_a_shard_adds_no_gradient(monkeypatch):
    """Queries are padded to whole chunks, and padding is in no document of the keys."""
    monkeypatch.setattr(dot_product, "CHUNK", 4)
    query, key, value = draw(8, 1, 1)
    marks = documents_of(8, 2)
    operands = query[:, :5], key, value
    at = Tokens(jnp.arange(5), jnp.asarray(marks[:, :5])), Tokens(jnp.arange(8), jnp.asarray(marks))
    ours = with_gradients(lambda *a: dot_product.chunked_attention(*a, *at), operands)
    mask = dot_product.visible(*at)
    exact = with_gradients(lambda *a: dot_product.masked_attention(*a, mask), operands)
    assert_equal(ours, exact)
