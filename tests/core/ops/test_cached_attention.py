"""Attention of new tokens to a cache, in XLA and in C++, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.core.ops.cached_attention.cached_attention_op import (
    IMPLEMENTATIONS,
    cached_attention,
)
from sparse_dataflow.files.errors import UserError

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, compiled_kernels):
    if request.param == "native" and compiled_kernels:
        pytest.skip(compiled_kernels)
    return request.param


def exact(q, k, v, keys, values, positions, window, cap):
    """Returns attention and caches by a loop over tokens and heads, in float64."""
    q, k, v, keys, values = (np.array(array, np.float64) for array in (q, k, v, keys, values))
    batch, tokens, heads, width = q.shape
    for b, t in np.ndindex(batch, tokens):
        keys[b, :, positions[b, t]], values[b, :, positions[b, t]] = k[b, t], v[b, t]
    y = np.zeros_like(q)
    for b, t, h in np.ndindex(batch, tokens, heads):
        n = h // (heads // keys.shape[1])
        last = positions[b, t] + 1
        first = max(0, last - window) if window else 0
        scores = keys[b, n, first:last] @ q[b, t, h] / np.sqrt(width)
        scores = cap * np.tanh(scores / cap) if cap else scores
        weights = np.exp(scores - scores.max())
        y[b, t, h] = weights @ values[b, n, first:last] / weights.sum()
    return y, keys, values


@settings(max_examples=40)
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 3),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 6)),
    width=st.sampled_from([4, 16, 24, 64, 80, 160]),
    places=st.integers(3, 70),
    window=st.sampled_from([0, 1, 5, 40]),
    cap=st.sampled_from([0.0, 1.5]),
    dtype=st.sampled_from(list(TOLERANCE)),
    has_room=st.booleans(),
    seed=st.integers(0, 999),
)
def check_attention(
    implementation, batch, tokens, heads, width, places, window, cap, dtype, has_room, seed
):
    key_heads, group = heads
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        return jnp.asarray(rng.normal(size=shape) * 2, dtype)

    q = drawn(batch, tokens, key_heads * group, width)
    k, v = (drawn(batch, tokens, key_heads, width) for _ in range(2))
    keys, values = (drawn(batch, key_heads, places, width) for _ in range(2))
    positions = rng.integers(0, places - tokens + 1, (batch, 1)) + np.arange(tokens)
    operands = q, k, v, keys, values, positions.astype(np.int32), window, cap
    if implementation == "native" and not has_room:
        with pytest.raises(UserError, match="new tokens may have no place"):
            cached_attention(*operands, has_room, implementation)
        return
    results = cached_attention(*operands, has_room, implementation)
    assert all(result.dtype == q.dtype for result in results)
    tolerance = TOLERANCE[dtype]
    y, *caches = (np.asarray(array, np.float64) for array in results)
    expected, *expected_caches = exact(*operands)
    np.testing.assert_allclose(y, expected, tolerance, 4 * tolerance)
    for right, array in zip(expected_caches, caches, strict=True):
        np.testing.assert_array_equal(array, right)


def test_new_tokens_are_written_and_see_what_is_before_them(implementation):
    check_attention(implementation)


def test_a_token_without_a_place_is_not_written():
    keys = jnp.arange(24.0).reshape(1, 1, 3, 8)
    new = jnp.full((1, 1, 1, 8), 100.0)
    y, *caches = cached_attention(new, new, new, keys, keys, np.full((1, 1), 3, np.int32))
    np.testing.assert_array_equal(caches, [keys, keys])
    assert np.isfinite(y).all()


def test_large_and_small_scores_have_finite_weights(implementation):
    """Softmax of scores that are 1e4 apart, and of equal ones."""
    q = jnp.asarray([[[[200.0] * 16], [[0.0] * 16]]])[0][None, :1]
    for scale in (0.0, 1.0, 100.0):
        query = q * scale
        keys = jnp.asarray(np.linspace(-1, 1, 20)[:, None] * np.ones(16), jnp.float32)[None, None]
        values = jnp.asarray(np.arange(20.0)[:, None] * np.ones(16), jnp.float32)[None, None]
        new = jnp.ones((1, 1, 1, 16))
        operands = query, new, 20 * new, keys, values, np.full((1, 1), 19, np.int32), 0, 0.0
        y = cached_attention(*operands, True, implementation)[0]
        np.testing.assert_allclose(y, exact(*operands)[0], rtol=1e-5)


def test_a_cache_is_updated_in_place(compiled_kernels):
    """A copy of a cache would cost as much as the attention."""
    if compiled_kernels:
        pytest.skip(compiled_kernels)
    new, cache = jnp.ones((1, 1, 2, 16)), jnp.zeros((1, 2, 64, 16))

    def attend(keys, values, positions):
        return cached_attention(new, new, new, keys, values, positions, 0, 0.0, True, "native")

    positions = np.full((1, 1), 3, np.int32)
    program = jax.jit(attend, donate_argnums=(0, 1)).lower(cache, cache + 1, positions).compile()
    assert " copy(" not in program.as_text()
    assert program.memory_analysis().alias_size_in_bytes == 2 * cache.nbytes
