"""Causal attention against softmax written out in numpy's float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.kernels.attention.api import causal_attention


def draw(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(jnp.dtype(dtype)) for _ in range(3)]


def exact_attention(query, key, value):
    """[batch, tokens, heads, head_dim] in float64: one query at a time, over what it may see."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    result = np.zeros_like(query)
    for t in range(query.shape[1]):
        seen_key, seen_value = key[:, : t + 1], value[:, : t + 1]
        scores = np.einsum("bhd,bshd->bhs", query[:, t], seen_key) / math.sqrt(query.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        result[:, t] = np.einsum("bhs,bshd->bhd", weights, seen_value)
    return result


@settings(max_examples=10, deadline=None)
@given(
    st.tuples(
        st.integers(1, 3), st.integers(1, 20), st.integers(1, 4), st.sampled_from([1, 8, 16])
    ),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(0, 9),
)
def test_attention_is_a_causal_softmax(shape, dtype, seed):
    operands = draw(shape, dtype, seed)
    attended = jax.jit(causal_attention)(*operands)
    assert attended.shape == shape and attended.dtype == dtype
    # Scores are rounded to the dtype; a softmax turns their absolute error into a relative one.
    tolerance = 30 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(attended, np.float64), exact_attention(*operands), atol=tolerance, rtol=tolerance
    )


def test_softmax_keeps_its_precision_over_many_equal_keys_in_bfloat16():
    """1,000 weights of 1/1000 sum to 1 in float32; summed in bfloat16 they stick at a half."""
    shape = (1, 1000, 1, 8)
    zeros, ones = jnp.zeros(shape, jnp.bfloat16), jnp.ones(shape, jnp.bfloat16)
    attended = np.asarray(causal_attention(zeros, zeros, ones), np.float32)
    np.testing.assert_allclose(attended, 1, rtol=2**-7)


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_gradients_match_finite_differences(argument):
    query, key, value = draw((2, 5, 2, 4), "float64", seed=3)
    cotangent, direction = draw(query.shape, "float64", seed=4)[:2]
    operands = [query, key, value]

    def exact(step):
        moved = list(operands)
        moved[argument] = moved[argument] + step * direction
        return np.sum(exact_attention(*moved) * cotangent)

    narrow = [a.astype(np.float32) for a in operands]
    loss = lambda *a: jnp.sum(causal_attention(*a) * cotangent.astype(np.float32))  # noqa: E731
    gradient = jax.jit(jax.grad(loss, argnums=argument))(*narrow)
    slope = (exact(1e-5) - exact(-1e-5)) / 2e-5
    assert np.sum(np.asarray(gradient, np.float64) * direction) == pytest.approx(slope, rel=1e-4)


def test_no_gradient_from_the_past_to_the_future():
    operands = draw((1, 6, 2, 4), "float32")
    per_query = lambda *a: causal_attention(*a).sum((0, 2, 3))  # noqa: E731
    for jacobian in jax.jit(jax.jacrev(per_query, argnums=(1, 2)))(*operands):
        reach = np.abs(jacobian).sum((1, 3, 4))  # [query position, key position]
        assert np.all(reach[np.triu_indices(6, 1)] == 0)
        # The first query sees one key, so that its weight is 1 and moves with nothing.
        assert np.all(reach[np.tril_indices(6)][1:] > 0)
