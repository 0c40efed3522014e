"""The block-sparse MLP against the dense one in float64."""

import contextlib

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mlp_operands import assert_close, draw_gated, draw_operands, exact, exact_gated

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels.sparse_mlp import xla_static
from sparse_dataflow.kernels.sparse_mlp.api import gated_sparse_mlp, sparse_mlp
from sparse_dataflow.sparsity.layout import BlockLayout
from sparse_dataflow.sparsity.patterns import PATTERNS, make_layout

TOKENS = 7  # Divides no width below, so that an array's size identifies it.


def mlp_layouts(pattern, ring=8, degree=2, wide=4, block=4, offsets=(2, 3)):
    """Return layouts of mlp_in and mlp_out: `ring` blocks outside, `wide` times as many inside."""
    outside, inside = ring * block, ring * wide * block
    return (
        make_layout(pattern, outside, inside, block, degree / ring, offsets[0]),
        make_layout(pattern, inside, outside, block, degree / ring, offsets[1]),
    )


@st.composite
def mlp_layout_pairs(draw):
    """Draw layouts of any pattern (most often monarch), of two densities, or irregular."""
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
    offsets = draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    pattern = "monarch"
    if kind == "any":
        pattern = draw(st.sampled_from(sorted(set(PATTERNS) - {"dense"})))
    first, second = mlp_layouts(pattern, ring, degree, wide, block, offsets)
    if kind == "two densities":
        second = mlp_layouts(pattern, ring, 1, wide, block, offsets)[1]
    return first, second


def precision(dtype):
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def run(operands, dy, layouts, traced_tables=False):
    """Return (y, gradients in the four operands)."""
    tables = [layout.tables() for layout in layouts]

    def both(operands, dy, tables):
        y, pull = jax.vjp(lambda *operands: sparse_mlp(*operands, *tables), *operands)
        return y, *pull(dy)

    if traced_tables:
        return jax.jit(both)(operands, dy, tables)
    return jax.jit(lambda operands, dy: both(operands, dy, tables))(operands, dy)


@pytest.mark.slow
@settings(max_examples=16)
@given(
    mlp_layout_pairs(),
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
    """Return the sizes of all arrays in the program for TOKENS tokens and concrete tables."""
    operands, dy = draw_operands(layouts, (TOKENS,), "float32")
    tables = [layout.tables() for layout in layouts]

    def program(operands, dy):
        y, pull = jax.vjp(lambda *operands: sparse_mlp(*operands, *tables), *operands)
        return (y, pull(dy)) if gradient else y

    return array_sizes(program, operands, dy)


@pytest.mark.parametrize("pattern", ["monarch", "butterfly", "random"])
def test_concrete_and_traced_tables_agree(pattern):
    layouts = mlp_layouts(pattern)
    operands, dy = draw_operands(layouts, (3, 5), "float32")
    concrete, traced = (run(operands, dy, layouts, traced) for traced in (False, True))
    for mine, other in zip(concrete, traced, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


def test_no_array_has_the_dense_size(array_sizes):
    layouts = mlp_layouts("monarch", degree=1)
    dense = layouts[0].in_features * layouts[0].out_features
    assert max(sizes_of(array_sizes, layouts)) < dense


def test_named_implementation_agrees():
    layouts = mlp_layouts("monarch")
    operands, dy = draw_operands(layouts, (5,), "float32")
    tables = [layout.tables() for layout in layouts]
    y = sparse_mlp(*operands, *tables, implementation="products")
    assert_close([y], exact(operands, dy, layouts)[:1], "float32")


def permuted_groups(block=3):
    """Return layouts of three unequal groups whose blocks lie at no stride."""
    inside, hidden, outside = map(np.array, ([0, 1, 1, 2, 0], [2, 0, 1, 0, 2, 2], [1, 0, 2]))
    masks = inside[:, None] == hidden, hidden[:, None] == outside
    return tuple(BlockLayout.from_mask(mask, block) for mask in masks)


CHAINS = {
    "at a stride": mlp_layouts("monarch"),
    "permuted": permuted_groups(),
}
MANY = 33  # Rows for which a CPU goes group by group.


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("layouts", [CHAINS["at a stride"], CHAINS["permuted"]])
def test_groups_by_themselves(layouts, dtype):
    assert xla_static.chain(*layouts)  # So this implementation is chosen.
    operands, dy = draw_operands(layouts, (3, 11), dtype)
    with precision(dtype):
        assert_close(run(operands, dy, layouts), exact(operands, dy, layouts), dtype)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_groups_with_a_gate(activation):
    layouts = CHAINS["at a stride"]
    (x, up, gate, out), dy = draw_gated(layouts, (MANY,), "float64")
    tables = [layout.tables() for layout in (layouts[0], *layouts)]
    with precision("float64"):
        y, pull = jax.vjp(
            lambda x, *values: gated_sparse_mlp(x, values, tables, activation), x, gate, up, out
        )
        dx, dgate, dup, dout = pull(dy)
    expected = exact_gated((x, up, gate, out), dy, layouts, activation)
    assert_close([y, dx, dup, dgate, dout], expected, "float64")


def test_no_array_has_the_whole_hidden_layer(array_sizes):
    layouts = CHAINS["at a stride"]
    operands, dy = draw_operands(layouts, (MANY,), "float32")
    tables = [layout.tables() for layout in layouts]

    def sizes(implementation):
        def program(operands, dy):
            y, pull = jax.vjp(lambda *x: sparse_mlp(*x, *tables, implementation), *operands)
            return y, pull(dy)

        return array_sizes(program, operands, dy)

    hidden = MANY * layouts[0].out_features
    assert hidden in sizes("products") and hidden not in sizes(None)


def test_hidden_groups_that_mix_are_refused():
    layouts = mlp_layouts("shuffle")
    operands, _ = draw_operands(layouts, (MANY,), "float32")
    tables = [layout.tables() for layout in layouts]
    assert not xla_static.chain(*layouts)
    with pytest.raises(UserError, match="does not read the hidden blocks of each group"):
        sparse_mlp(*operands, *tables, implementation="xla_static")
