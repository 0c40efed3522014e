"""Properties of the product of two matrices, and of what it copies on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some

from sparse_dataflow.core.ops import dispatch, matrix_product

SHAPES = [(96, 40, 24), (1, 8, 8), (33, 7, 129), (0, 4, 6)]
"""(tokens, inputs, outputs)."""
DTYPES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Dtype -> tolerance, relative to the largest number."""


def operands(shape, dtype="float32"):
    tokens, inputs, outputs = shape
    rng = np.random.default_rng(tokens)
    sides = (tokens, inputs), (inputs, outputs), (tokens, outputs)
    return [jnp.asarray(rng.normal(size=each), dtype) for each in sides]


def assert_near(got, expected, tolerance):
    largest = np.abs(expected).max(initial=1.0)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=tolerance * largest)


@pytest.mark.parametrize("dtype", some([*DTYPES], "float32", "bfloat16"))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_and_its_gradients_are_those_of_float64(shape, dtype):
    x, weight, dy = operands(shape, dtype)
    y, pull = jax.vjp(matrix_product.product, x, weight)
    wide_x, wide_weight, wide_dy = (np.asarray(each, np.float64) for each in (x, weight, dy))
    expected = wide_x @ wide_weight, wide_dy @ wide_weight.T, wide_x.T @ wide_dy
    for got, want in zip((y, *pull(dy)), expected, strict=True):
        assert got.dtype == dtype
        assert_near(got, want, DTYPES[dtype])


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_forward_mode_is_the_transpose_of_reverse_mode(shape):
    x, weight, dy = operands(shape)
    dx, dweight, _ = operands(shape[:1] + shape[1:])
    moved = jax.jvp(matrix_product.product, (x, weight), (dx, dweight))[1]
    pulled = jax.vjp(matrix_product.product, x, weight)[1](dy)
    inner = sum(jnp.vdot(a, b) for a, b in zip((dx, dweight), pulled))
    assert float(jnp.vdot(moved, dy)) == pytest.approx(float(inner), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("shape", [*SHAPES[:1], (64, 24, 40), (128, 16, 72)])
def test_a_weight_gradient_of_a_cpu_copies_no_operand_to_float32(shape):
    x, _, dy = operands(shape, "bfloat16")
    gradient = jax.jit(lambda x, dy: matrix_product.dot(x, dy, 0, 0))
    text = gradient.lower(x, dy).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert f"f32[{shape[0]},{shape[1]}]" not in entry and f"bf16[{shape[1]},{shape[0]}]" in entry


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_other_platforms_copy_nothing(platform):
    x, _, dy = operands(SHAPES[0], "bfloat16")
    with dispatch.tracing_for(platform):
        traced = jax.make_jaxpr(lambda x, dy: matrix_product.dot(x, dy, 0, 0))(x, dy)
    assert [str(each.primitive) for each in traced.eqns] == ["dot_general"]
