"""Attention within documents against attention over each document alone."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples, some

from sparse_dataflow.core.ops.attention import attention_op as reference
from sparse_dataflow.core.ops.attention.attention_op import self_attention
from sparse_dataflow.core.ops.attention.dot_product import document_numbers


def test_a_document_ends_with_its_end_of_text():
    tokens = np.array([[5, 9, 1, 2, 9, 9, 3], [9, 1, 1, 1, 1, 1, 1]])
    expected = [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    np.testing.assert_array_equal(document_numbers(tokens, 9), expected)


@jax.jit
def together(operands, dy, documents):
    y, pull = jax.vjp(lambda *a: self_attention(*a, documents=documents), *operands)
    return y, *pull(dy)


@jax.jit
def alone(operands, dy):
    y, pull = jax.vjp(reference.plain_attention, *operands)
    return y, *pull(dy)


@settings(max_examples=examples(10), deadline=None)
@given(ends=st.sets(st.integers(1, 8), max_size=3), seed=st.integers(0, 99))
def test_documents_attend_as_if_each_were_alone(ends, seed):
    starts = [0, *sorted(ends)]
    documents = np.searchsorted(starts[1:], np.arange(9), side="right")[None].repeat(2, 0)
    rng = np.random.default_rng(seed)
    *operands, dy = rng.normal(size=(4, 2, 9, 2, 8)).astype(np.float32)
    exact = zip(
        *(
            alone([array[:, start:end] for array in operands], dy[:, start:end])
            for start, end in zip(starts, [*starts[1:], 9])
        )
    )
    for ours, parts in zip(together(operands, dy, documents), exact, strict=True):
        np.testing.assert_allclose(ours, np.concatenate(parts, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", some([1, 3], 3))
def test_a_window_limits_documents_too(window):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 6, 1, 4)).astype(np.float32) for _ in range(3))
    result = self_attention(q, k, v, window=window, documents=np.zeros((1, 6), np.int32))
    last = slice(6 - window, 6)
    exact = reference.plain_attention(q[:, last], k[:, last], v[:, last])
    np.testing.assert_allclose(result[:, -1], exact[:, -1], rtol=1e-4)
