"""Attention within documents against attention over each document alone."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.kernels.attention import reference
from sparse_dataflow.kernels.attention.documents import document_attention, document_numbers


def test_a_document_ends_with_its_end_of_text():
    tokens = np.array([[5, 9, 1, 2, 9, 9, 3], [9, 1, 1, 1, 1, 1, 1]])
    expected = [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    np.testing.assert_array_equal(document_numbers(tokens, 9), expected)


@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_documents_attend_as_if_each_were_alone(lengths, seed):
    rng = np.random.default_rng(seed)
    shape = 2, sum(lengths), 2, 8
    q, k, v, weight = (rng.normal(size=shape).astype(np.float32) for _ in range(4))
    documents = np.repeat(np.arange(len(lengths)), lengths)[None].repeat(2, 0)

    def together(q, k, v):
        return (document_attention(q, k, v, documents) * weight).sum()

    def alone(q, k, v):
        total, start = 0.0, 0
        for length in lengths:
            part = slice(start, start + length)
            y = reference.causal_attention(q[:, part], k[:, part], v[:, part])
            total, start = total + (y * weight[:, part]).sum(), start + length
        return total

    for ours, exact in zip(
        jax.tree.leaves(jax.jit(jax.value_and_grad(together, (0, 1, 2)))(q, k, v)),
        jax.tree.leaves(jax.jit(jax.value_and_grad(alone, (0, 1, 2)))(q, k, v)),
    ):
        np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_limits_documents_too(window):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 6, 1, 4)).astype(np.float32) for _ in range(3))
    result = document_attention(q, k, v, np.zeros((1, 6), np.int32), window)
    last = slice(6 - window, 6)
    exact = reference.causal_attention(q[:, last], k[:, last], v[:, last])
    np.testing.assert_allclose(result[:, -1], exact[:, -1], rtol=1e-4)
