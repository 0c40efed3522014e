"""The product that skips rows, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.core.ops.nonzero_rows import SHORTEST_ROW
from sparse_dataflow.core.ops.nonzero_rows.nonzero_rows_op import nonzero_rows_matmul

matmul = jax.jit(nonzero_rows_matmul)
WIDTH = SHORTEST_ROW + 3


@settings(max_examples=40)
@given(
    st.sampled_from([(1, "float32", 1e-5), (21, "float32", 1e-5), (8, "bfloat16", 2e-2)]),
    st.sampled_from([0.0, 0.4, 0.9, 1.0]),
    st.integers(0, 99),
)
def test_one_row_is_the_product_of_its_nonzero_inputs(case, zeros, seed):
    inputs, dtype, tolerance = case
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(1, inputs)) * (rng.random(inputs) >= zeros)).astype(jnp.dtype(dtype))
    kernel = rng.normal(size=(inputs, WIDTH)).astype(jnp.dtype(dtype))
    expected = x.astype(np.float64) @ kernel.astype(np.float64)
    kernel[x[0] == 0] = np.nan  # A row that no input needs is not read.
    y = matmul(x, kernel)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, tolerance, 4 * tolerance)


@pytest.mark.parametrize(("rows", "width"), [(2, WIDTH), (1, SHORTEST_ROW - 1)])
def test_several_rows_and_short_rows_are_the_dense_product(rows, width):
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((rows, 8), (8, width))]
    program = jax.make_jaxpr(nonzero_rows_matmul)(*shapes)
    assert [equation.primitive.name for equation in program.eqns] == ["dot_general"]
