"""Heads that are cut in whole tiles, as on TPUs, are those of the definition, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples, some

from sparse_dataflow.chips.tpu import heads
from sparse_dataflow.core.weights.weight import Linear


def plain(bias, y, group, width):
    """Returns the heads of `heads.split`, from their order."""
    heads = Linear(None, bias).plus_bias(y).reshape(*y.shape[:2], -1, group + 2, width)
    queries = heads[..., :group, :].reshape(*y.shape[:2], -1, width)
    return queries, heads[..., group, :], heads[..., -1, :]


@settings(max_examples=examples(12), deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([8, 24, 40]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([128, 256]),
    st.sampled_from(["float32", "bfloat16"]),
    st.booleans(),
)
def test_tiles_have_the_bits_of_the_definition(rows, tokens, kv_heads, group, width, dtype, bias):
    features = kv_heads * (group + 2) * width
    numbers = np.random.default_rng(features)
    y, b = (
        jnp.asarray(numbers.normal(size=shape), at)
        for shape, at in (((rows, tokens, features), dtype), ((features,), jnp.float32))
    )
    b = b if bias else None
    tiled = heads.split(b, y, group, width)
    for got, expected in zip(tiled, plain(b, y, group, width), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("group", some([1, 2, 4], 2))
def test_gradients_of_tiles_are_those_of_the_definition(group):
    features = 2 * (group + 2) * 128
    y = jnp.linspace(-1, 1, 16 * features).reshape(1, 16, features)

    def loss(split):
        return lambda b, y: sum(
            (n + 1) * (p**3).sum() for n, p in enumerate(split(b, y, group, 128))
        )

    tiled, right = (
        jax.jit(jax.grad(loss(split), (0, 1)))(jnp.linspace(-1, 1, features), y)
        for split in (heads.split, plain)
    )
    for got, expected in zip(tiled, right, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize(("tokens", "width", "whole"), [(16, 128, 1), (12, 128, 0), (16, 64, 0)])
def test_only_whole_tiles_are_cut(tokens, width, whole):
    assert bool(heads.split(None, jnp.zeros((1, tokens, 3 * width)), 1, width)) == whole
