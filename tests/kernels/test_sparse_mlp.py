"""The block-sparse MLP against the dense one in float64; which layouts it computes in chunks."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from simulated import targeted_tpu

from sparse_dataflow.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul.api import MAX_STATIC_GROUPS
from sparse_dataflow.kernels.sparse_mlp.api import sparse_mlp
from sparse_dataflow.sparsity.layout import BlockLayout
from sparse_dataflow.sparsity.patterns import PATTERNS, make_layout

pytestmark = pytest.mark.usefixtures("quick_compile")

TOKENS = 7  # Divides no width below, so that an array's size tells what it is.


def mlp_layouts(pattern, ring=8, degree=2, wide=4, block=4, phases=(2, 3)):
    """Layouts of mlp_in and mlp_out, `ring` blocks wide outside and `wide` times that inside."""
    outside, inside = ring * block, ring * wide * block
    return (
        make_layout(pattern, outside, inside, block, degree / ring, phases[0]),
        make_layout(pattern, inside, outside, block, degree / ring, phases[1]),
    )


@st.composite
def drawn_layouts(draw):
    """Of any pattern, most often monarch's; of differing densities; irregular."""
    block = draw(st.sampled_from([1, 3, 8]))
    kind = draw(st.sampled_from(["monarch", "any", "two densities", "irregular"]))
    if kind == "irregular":
        counts = draw(st.tuples(*[st.integers(1, 5)] * 3))
        masks = [draw(hnp.arrays(bool, counts[i : i + 2])) for i in range(2)]
        for mask in masks:
            mask[-1, -1] = True
        return tuple(BlockLayout.from_mask(mask, block) for mask in masks)
    ring, wide = draw(st.sampled_from([2, 4, 6])), draw(st.integers(1, 3))
    degree = draw(st.sampled_from([k for k in range(1, ring + 1) if ring % k == 0]))
    phases = draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    pattern = "monarch"
    if kind == "any":
        pattern = draw(st.sampled_from(sorted(set(PATTERNS) - {"dense"})))
    first, second = mlp_layouts(pattern, ring, degree, wide, block, phases)
    if kind == "two densities":
        second = mlp_layouts(pattern, ring, 1, wide, block, phases)[1]
    return first, second


def draw_operands(layouts, tokens, dtype, seed=0):
    """(x, values_in, bias_in, values_out) and a cotangent; activations near 1."""
    rng = np.random.default_rng(seed)
    first, second = layouts
    shapes = (
        (*tokens, first.in_features),
        (first.nnz, first.block, first.block),
        (first.out_features,),
        (second.nnz, second.block, second.block),
        (*tokens, second.out_features),
    )
    scales = (1, first.in_features**-0.5, 1, second.in_features**-0.5, 1)
    drawn = [(s * rng.normal(size=n)).astype(jnp.dtype(dtype)) for s, n in zip(scales, shapes)]
    return drawn[:-1], drawn[-1]


def precision(dtype):
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def run(operands, dy, layouts, traced_tables=False):
    """(y, gradients in the four operands)."""
    tables = [layout.tables() for layout in layouts]

    def both(operands, dy, tables):
        y, pull = jax.vjp(lambda *operands: sparse_mlp(*operands, *tables), *operands)
        return y, *pull(dy)

    if traced_tables:
        return jax.jit(both)(operands, dy, tables)
    return jax.jit(lambda operands, dy: both(operands, dy, tables))(operands, dy)


def exact(operands, dy, layouts):
    """The dense MLP and its gradients, in float64, written out."""
    x, values_in, bias, values_out = (np.asarray(a, np.float64) for a in operands)
    dy = np.asarray(dy, np.float64)
    flat, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    weight_in, weight_out = layouts[0].to_dense(values_in), layouts[1].to_dense(values_out)

    def activate(z):
        return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

    pre = flat @ weight_in + bias
    hidden = activate(pre)
    step = 1e-30
    dpre = flat_dy @ weight_out.T * activate(pre + 1j * step).imag / step
    return (
        (hidden @ weight_out).reshape(dy.shape),
        (dpre @ weight_in.T).reshape(x.shape),
        layouts[0].from_dense(flat.T @ dpre),
        dpre.sum(0),
        layouts[1].from_dense(hidden.T @ flat_dy),
    )


TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 4e-2}


def assert_close(actual, right, dtype):
    for result, expected in zip(actual, right, strict=True):
        assert result.shape == expected.shape and result.dtype == jnp.dtype(dtype)
        atol = TOLERANCE[dtype] * max(1, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(np.asarray(result, np.float64), expected, atol=atol, rtol=0)


@pytest.mark.slow
@settings(max_examples=16)
@given(
    drawn_layouts(),
    st.sampled_from([(), (1,), (7,), (2, 5)]),
    st.sampled_from(["float64", "float32", "bfloat16"]),
    st.booleans(),
)
def test_values_and_gradients(layouts, tokens, dtype, traced_tables):
    operands, dy = draw_operands(layouts, tokens, dtype)
    with precision(dtype):
        actual = run(operands, dy, layouts, traced_tables)
    assert_close(actual, exact(operands, dy, layouts), dtype)


def sizes_of(array_sizes, layouts, gradient=True):
    """Elements of every array in the program for TOKENS tokens, tables known."""
    operands, dy = draw_operands(layouts, (TOKENS,), "float32")
    tables = [layout.tables() for layout in layouts]

    def program(operands, dy):
        y, pull = jax.vjp(lambda *operands: sparse_mlp(*operands, *tables), *operands)
        return (y, pull(dy)) if gradient else y

    return array_sizes(program, operands, dy)


def assembled(array_sizes, layouts):
    """Whether the program, forward and backward, holds the hidden layer in one array."""
    return TOKENS * layouts[0].out_features in sizes_of(array_sizes, layouts)


@pytest.mark.parametrize("phases", [(0, 1), (2, 3), (6, 7), (5, 5)])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_monarch_never_assembles_its_hidden_layer(array_sizes, degree, phases):
    layouts = mlp_layouts("monarch", degree=degree, phases=phases)
    sizes = sizes_of(array_sizes, layouts)
    assert TOKENS * layouts[0].out_features not in sizes
    # What there is instead: the hidden activations of one group.
    assert TOKENS * layouts[0].out_features * degree // 8 in sizes


@pytest.mark.parametrize("pattern", ["butterfly", "random"])
def test_layouts_without_common_groups_are_two_products(array_sizes, pattern):
    assert assembled(array_sizes, mlp_layouts(pattern))


def test_groups_that_do_not_fit_are_two_products(array_sizes):
    quarter, half = mlp_layouts("monarch", degree=2), mlp_layouts("monarch", degree=4)
    assert assembled(array_sizes, (quarter[0], half[1]))
    fine = make_layout("monarch", 128, 32, 2, 1 / 4)
    assert fine.in_features == quarter[0].out_features and fine.block != quarter[0].block
    assert assembled(array_sizes, (quarter[0], fine))


def test_many_groups_are_two_products(array_sizes):
    most = MAX_STATIC_GROUPS // 2
    assert not assembled(array_sizes, mlp_layouts("monarch", most, 1, wide=2, block=1))
    assert assembled(array_sizes, mlp_layouts("monarch", most + 1, 1, wide=2, block=1))


def test_no_chunks_in_a_program_for_an_accelerator(array_sizes):
    with targeted_tpu():
        assert assembled(array_sizes, mlp_layouts("monarch"))


@pytest.mark.parametrize("pattern", ["monarch", "butterfly", "random"])
def test_known_and_traced_tables_agree(pattern):
    layouts = mlp_layouts(pattern)
    operands, dy = draw_operands(layouts, (3, 5), "float32")
    known, traced = (run(operands, dy, layouts, traced) for traced in (False, True))
    for mine, other in zip(known, traced, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


def test_nothing_of_the_dense_size_is_made(array_sizes):
    layouts = mlp_layouts("monarch", degree=1)
    dense = layouts[0].in_features * layouts[0].out_features
    assert max(sizes_of(array_sizes, layouts)) < dense


def test_chunks_that_are_asked_for_and_cannot_be_are_refused():
    def refusal(layouts, traced=False):
        operands, _ = draw_operands(layouts, (3,), "float32")
        tables = [layout.tables() for layout in layouts]
        run = lambda tables: sparse_mlp(*operands, *tables, implementation="chunked")  # noqa: E731
        with pytest.raises(UserError, match="Legal: products") as refused:
            jax.jit(run)(tables) if traced else run(tables)
        return str(refused.value)

    assert "same few hidden groups" in refusal(mlp_layouts("butterfly"))
    assert "these are traced" in refusal(mlp_layouts("monarch"), traced=True)


@pytest.mark.parametrize("implementation", ["products", "chunked"])
def test_named_implementations_agree(implementation):
    layouts = mlp_layouts("monarch")
    operands, dy = draw_operands(layouts, (5,), "float32")
    tables = [layout.tables() for layout in layouts]
    y = sparse_mlp(*operands, *tables, implementation=implementation)
    assert_close([y], exact(operands, dy, layouts)[:1], "float32")
