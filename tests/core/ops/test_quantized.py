"""Products of fp8 and int8 operands: scales and rounding, error, independence, refusals."""

import functools
import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples

from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops import quantized
from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import block_sparse_matmul
from sparse_dataflow.files.errors import UserError

needs_library = pytest.mark.skipif(
    not importlib.util.find_spec("qwix"), reason="quantised products need the extra quantized"
)

PRECISIONS = st.sampled_from(sorted(quantized.TYPES))
BLOCK = 4


@st.composite
def cases(draw):
    """(x, weight, dy, layout or None for a dense weight); rows of very different magnitudes."""
    ring = draw(st.sampled_from([2, 4, 6]))
    sides = [ring * BLOCK * draw(st.integers(1, 3)) for _ in range(2)]
    degree = draw(st.sampled_from([d for d in range(1, ring + 1) if ring % d == 0]))
    layout = None
    if draw(st.booleans()):
        layout = make_layout("monarch", *sides, BLOCK, degree / ring)
    dtype = draw(st.sampled_from([np.float32, jnp.bfloat16]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def drawn(rows, columns):
        array = rng.standard_normal((rows, columns)) * np.exp(3 * rng.standard_normal((rows, 1)))
        return array.astype(dtype)

    tokens = draw(st.integers(1, 9))
    x, dy = drawn(tokens, sides[0]), drawn(tokens, sides[1])
    x[0] = 0  # A row without a scale.
    return x, drawn(*sides), dy, layout


def groups(weight, layout):
    """(input features, output features) of each group."""
    if layout is None:
        return [tuple(map(np.arange, weight.shape))]
    mask = np.kron(layout.mask, np.ones((BLOCK, BLOCK), bool))
    columns = {column.tobytes(): column for column in mask.T}
    return [
        (np.flatnonzero(column), np.flatnonzero((mask.T == column).all(1)))
        for column in columns.values()
    ]


@functools.partial(jax.jit, static_argnames=("layout", "precision"))
def computed(x, weight, dy, layout, precision):
    """y, dx and the gradient of the dense weight or of its stored blocks."""
    if layout is None:
        product = functools.partial(quantized.matmul, precision=precision)
    else:
        product = functools.partial(block_sparse_matmul, layout=layout, precision=precision)
    y, pullback = jax.vjp(lambda x, weight: product(x, weight), x, weight)
    return y, *pullback(dy)


def actual(x, weight, dy, layout, precision):
    stored = weight if layout is None else layout.from_dense(weight)
    y, dx, dweight = (np.asarray(a) for a in computed(x, stored, dy, layout, precision))
    assert y.dtype == dx.dtype == dweight.dtype == x.dtype
    dweight = dweight if layout is None else layout.to_dense(dweight)
    return [np.asarray(a, np.float64) for a in (y, dx, dweight)]


@needs_library
@settings(max_examples=examples(8))
@given(cases(), PRECISIONS)
def test_the_three_products_are_those_of_rounded_operands(case, precision):
    x, weight, dy, layout = case
    results = actual(x, weight, dy, layout, precision)
    expected = reference.three_products(x, weight, dy, groups(weight, layout), precision)
    ulp = 2.0**-8 if x.dtype != np.float32 else 0.0
    for mine, (right, tolerance) in zip(results, expected):
        assert np.all(np.abs(mine - right) <= tolerance + ulp * np.abs(right) + 1e-30)


@needs_library
@settings(max_examples=examples(8))
@given(cases(), PRECISIONS)
def test_the_error_is_within_that_of_rounding(case, precision):
    x, weight, dy, layout = case
    results = actual(x, weight, dy, layout, precision)
    expected = reference.three_products(
        x, weight, dy, groups(weight, layout), precision, reference.exact_product
    )
    ulp = 2.0**-8 if x.dtype != np.float32 else 1e-6
    for mine, (right, bound) in zip(results, expected):
        assert np.all(np.abs(mine - right) <= bound + ulp * (np.abs(right) + bound) + 1e-30)


@needs_library
@pytest.mark.parametrize("precision", sorted(quantized.TYPES))
def test_a_token_has_the_same_result_whatever_the_other_tokens_are(precision):
    layout = make_layout("monarch", 16, 32, BLOCK, 0.5)
    rng = np.random.default_rng(0)
    x, weight, dy = (
        rng.standard_normal(s).astype(np.float32) for s in ((6, 16), (16, 32), (6, 32))
    )
    y, dx, _ = actual(x, weight, dy, layout, precision)
    y_alone, dx_alone, _ = actual(x[:1], weight, dy[:1], layout, precision)
    np.testing.assert_array_equal(y[:1], y_alone)
    np.testing.assert_array_equal(dx[:1], dx_alone)


@needs_library
def test_no_tokens_are_no_work():
    layout, empty = make_layout("monarch", 16, 32, BLOCK, 0.5), np.zeros((0, 16), np.float32)
    y, dx, dweight = actual(
        empty, np.ones((16, 32), np.float32), empty @ np.zeros((16, 32), np.float32), layout, "int8"
    )
    assert y.shape == (0, 32) and dx.shape == (0, 16) and not dweight.any()


def test_layouts_and_implementations_that_are_not_quantised_are_refused():
    layout = make_layout("random", 32, 32, BLOCK, 0.5)
    values, x = np.ones((layout.nnz, BLOCK, BLOCK), np.float32), np.ones((2, 32), np.float32)
    with pytest.raises(UserError, match="equal groups that cannot change; legal: the patterns mon"):
        block_sparse_matmul(x, values, layout, precision="int8")
    monarch = make_layout("monarch", 32, 32, BLOCK, 0.5)
    with pytest.raises(UserError, match="equal groups that cannot change"):
        traced = jax.tree.map(jnp.asarray, monarch.tables())
        block_sparse_matmul(x, values, traced, precision="fp8")
    with pytest.raises(UserError, match=r"'xla' does not quantise .* precision=fp8: grouped"):
        block_sparse_matmul(x, values, monarch, "xla", precision="fp8")
    with pytest.raises(UserError, match="'int4' is unknown; legal: compute_dtype, fp8, int8"):
        block_sparse_matmul(x, values, monarch, precision="int4")


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(UserError, match=r"pip install 'sparse_dataflow\[quantized\]'"):
        quantized.library()
