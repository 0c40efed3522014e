"""Heads that are split in tiles, as on TPUs, are those of the plain split, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.core.model import heads
from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.weights.weight import Linear
from tests.marks import examples


@settings(max_examples=examples(18))
@given(
    st.integers(1, 3),
    st.sampled_from([8, 24, 40]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 4, 128]),
    st.sampled_from(["float32", "bfloat16"]),
    st.booleans(),
)
def test_tiles_have_the_bits_of_the_plain_split(rows, tokens, kv_heads, group, width, dtype, bias):
    features = kv_heads * (group + 2) * width
    numbers = np.random.default_rng(features)
    y, b = (
        jnp.asarray(numbers.normal(size=shape), at)
        for shape, at in (((rows, tokens, features), dtype), ((features,), jnp.float32))
    )
    qkv = Linear(None, b if bias else None)
    plain = heads.split(qkv, y, group, width)
    tiled = heads.split_tiles(qkv.bias, y, group, width)
    for got, expected in zip(tiled, plain, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_gradients_of_tiles_are_those_of_the_plain_split(group):
    features = 2 * (group + 2) * 4
    y, b = (jnp.linspace(-1, 1, n).reshape(s) for n, s in ((16 * features, (1, 16, features)),
                                                          (features, (features,))))  # fmt: skip

    def loss(split):
        return lambda y, b: sum((n + 1) * (part**3).sum() for n, part in enumerate(split(y, b)))

    plain = jax.grad(loss(lambda y, b: heads.split(Linear(None, b), y, group, 4)), (0, 1))(y, b)
    tiled = jax.grad(loss(lambda y, b: heads.split_tiles(b, y, group, 4)), (0, 1))(y, b)
    for got, expected in zip(tiled, plain, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize(("tokens", "width", "tiles"), [(16, 128, 1), (12, 128, 0), (16, 64, 0)])
def test_a_tpu_splits_whole_tiles_only(monkeypatch, tokens, width, tiles):
    calls = []
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    monkeypatch.setattr(heads, "split_tiles", lambda *a: calls.append(a))
    heads.split(Linear(None, None), jnp.zeros((1, tokens, 3 * width)), 1, width)
    assert len(calls) == tiles
