"""One suite for every implementation of the block-sparse MLP, against the dense one in float64."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_operands import layout_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from marks import some
from mlp_operands import (
    assert_close,
    draw_gated,
    draw_operands,
    exact,
    exact_gated,
    irregular,
    mlp_layouts,
    permuted_groups,
)
from simulated import simulated_tpu
from simulated_hopper import simulated_hopper

from sparse_dataflow.core.config.activations import fused_names
from sparse_dataflow.core.layouts.layout import BlockLayout, Groups
from sparse_dataflow.core.layouts.patterns import PATTERNS
from sparse_dataflow.core.ops.sparse_mlp import mlp_op as api
from sparse_dataflow.core.ops.sparse_mlp import mlp_xla_static as xla_static
from sparse_dataflow.core.ops.sparse_mlp.mlp_op import gated_sparse_mlp, sparse_mlp
from sparse_dataflow.files.errors import UserError


class Implementation(NamedTuple):
    """An implementation, and cases that it supports."""

    name: str
    layouts: tuple[BlockLayout, BlockLayout]
    dtypes: tuple[str, ...]
    gated: bool = False
    environment: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    def run(self, operands, tables, activation=""):
        """The MLP, plain with four operands and a bias, or gated with a tuple of values."""
        if isinstance(operands[1], tuple):
            y = gated_sparse_mlp(*operands, [tables[0], *tables], activation or "silu")
            assert y is not None
            return y
        return sparse_mlp(*operands, *tables, self.name, activation=activation or "gelu")


GROUPS = layout_of(Groups(2, 1, 2), 4, 8, 128), layout_of(Groups(2, 2, 1), 8, 4, 128)
SUITE = [
    Implementation("products", irregular(8), ("float64", "bfloat16")),
    Implementation("xla_static", mlp_layouts("monarch"), ("float64", "bfloat16"), gated=True),
    Implementation(
        "pallas_tpu", irregular(128), ("float32", "bfloat16"), environment=simulated_tpu
    ),
    Implementation("pallas_tpu_grouped", GROUPS, ("float32", "bfloat16"), True, simulated_tpu),
    Implementation("pallas_hopper", irregular(64), ("bfloat16",), environment=simulated_hopper),
]
RUNTIME_TABLES = [each for each in SUITE if each.layouts is not GROUPS and not each.gated]
every_case = pytest.mark.parametrize(
    ("implementation", "gated"),
    [
        pytest.param(
            each,
            gated,
            id=f"{each.name}-{'gated' if gated else 'plain'}",
            # An implementation of both is the same code with one product more.
            marks=pytest.mark.slow if each.gated and not gated else (),
        )
        for each in SUITE
        for gated in (False, True)[: 1 + each.gated]
    ],
)
# Every implementation has its derivatives from core/ops/derivatives.py.
with_shared_derivatives = pytest.mark.parametrize(
    ("implementation", "gated"),
    some(
        {
            f"{each.name}-{'gated' if gated else 'plain'}": (each, gated)
            for each in SUITE
            for gated in (False, True)[: 1 + each.gated]
        },
        "xla_static-gated", "products-plain",
    ),
)  # fmt: skip


def draw(implementation, gated, tokens, dtype, seed=0, activation=""):
    """Return operands, a cotangent, and the exact (y, *gradients)."""
    layouts = implementation.layouts
    if not gated:
        operands, dy = draw_operands(layouts, tokens, dtype, seed)
        return operands, dy, exact(operands, dy, layouts, activation or "gelu")
    (x, up, gate, out), dy = draw_gated(layouts, tokens, dtype, seed)
    activation = activation or "silu"
    y, dx, dup, dgate, dout = exact_gated((x, up, gate, out), dy, layouts, activation)
    return (x, (gate, up, out)), dy, (y, dx, dgate, dup, dout)


def gradients(implementation, operands, dy, activation=""):
    """Return [y, *gradients] by concrete tables."""
    tables = [layout.tables() for layout in implementation.layouts]
    y, pull = jax.vjp(lambda *operands: implementation.run(operands, tables, activation), *operands)
    return jax.tree.leaves((y, pull(dy)))


def test_no_implementation_escapes_the_suite():
    assert {each.name for each in SUITE} == set(api.IMPLEMENTATIONS)


@every_case
def test_value_and_gradients_are_those_of_the_dense_mlp(implementation, gated):
    for dtype in implementation.dtypes:
        operands, dy, expected = draw(implementation, gated, (37,), dtype)
        with precision(dtype):
            run = jax.jit(lambda *o: gradients(implementation, o[:-1], o[-1]))
            assert_close(run(*operands, dy), expected, dtype)


@pytest.mark.slow
@every_case
@pytest.mark.parametrize("activation", fused_names())
def test_every_fused_activation_on_every_implementation(implementation, gated, activation):
    dtype = implementation.dtypes[0]
    operands, dy, expected = draw(implementation, gated, (37,), dtype, 3, activation)
    with precision(dtype):
        run = jax.jit(lambda *o: gradients(implementation, o[:-1], o[-1], activation))
        assert_close(run(*operands, dy), expected, dtype)


def test_an_activation_that_kernels_lack_is_refused_with_the_legal_ones():
    operands, _ = draw_operands(GROUPS, (8,), "float32")
    tables = [layout.tables() for layout in GROUPS]
    with pytest.raises(UserError, match=f"is gelu_exact; legal: {', '.join(fused_names())}"):
        sparse_mlp(*operands, *tables, activation="gelu_exact")


@with_shared_derivatives
def test_vmap_is_a_loop(implementation, gated):
    dtype = implementation.dtypes[0]
    several = [draw(implementation, gated, (40,), dtype, seed) for seed in range(2)]
    (_, *weights), *_ = several[0]
    inputs = [(operands[0], dy) for operands, dy, _ in several]
    run = lambda x, dy: gradients(implementation, [x, *weights], dy)  # noqa: E731
    with precision(dtype):
        together = jax.jit(jax.vmap(run))(*map(np.stack, zip(*inputs)))
        for number, (x, dy) in enumerate(inputs):
            alone = jax.jit(run)(x, dy)
            for one, both in zip(alone, together, strict=True):
                one, both = np.asarray(one, np.float64), np.asarray(both[number], np.float64)
                tolerance = (1e-6 if dtype != "bfloat16" else 1e-2) * max(1, np.abs(one).max())
                np.testing.assert_allclose(both, one, atol=tolerance)


@with_shared_derivatives
def test_forward_mode_is_the_transpose_of_the_gradient(implementation, gated):
    """⟨dy, J v⟩ = ⟨Jᵀ dy, v⟩, with the exact gradient on the right."""
    dtype = implementation.dtypes[0]
    operands, dy, (_, *expected) = draw(implementation, gated, (40,), dtype)
    directions, _, _ = draw(implementation, gated, (40,), dtype, seed=5)
    tables = [layout.tables() for layout in implementation.layouts]
    with precision(dtype):
        # Not under jit: interpreted kernels have effects, which the linear primitive hides.
        primals, tangents = (jax.tree.map(jnp.asarray, tuple(o)) for o in (operands, directions))
        moved = jax.jvp(lambda *o: implementation.run(o, tables), primals, tangents)[1]
        moved = np.asarray(moved, np.float64)
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(directions)]
    terms = [np.sum(g * leaf) for g, leaf in zip(expected, leaves, strict=True)]
    size = np.sqrt(sum(np.sum((g * leaf) ** 2) for g, leaf in zip(expected, leaves, strict=True)))
    tolerance = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.3}[dtype]
    assert abs(np.sum(np.asarray(dy, np.float64) * moved) - sum(terms)) <= tolerance * size


@pytest.mark.parametrize(
    "implementation", some({each.name: (each,) for each in SUITE}, "xla_static")
)
def test_second_derivatives_are_right_or_refused_in_words(implementation):
    dtype = implementation.dtypes[0]
    operands, *_ = draw(implementation, False, (40,), dtype)
    tables = [layout.tables() for layout in implementation.layouts]

    def curvature(run, x):
        slope = jax.grad(lambda x: jnp.sum(jnp.sin(run((x, *operands[1:]), tables))))
        return jax.grad(lambda x: jnp.sum(slope(x) ** 2))(x)

    if implementation.name.startswith("pallas"):
        with pytest.raises(UserError, match="first derivatives alone; legal"):
            curvature(implementation.run, operands[0])
    else:
        with precision(dtype):
            both = [curvature(run, operands[0]) for run in (implementation.run, SUITE[0].run)]
        np.testing.assert_allclose(*both, atol=1e-9 * np.abs(both[0]).max())


@pytest.mark.parametrize(
    "implementation",
    some({each.name: (each,) for each in RUNTIME_TABLES}, "products", "pallas_tpu"),
)
def test_a_changed_layout_runs_in_the_same_program(implementation):
    block, dtype = implementation.layouts[0].block, implementation.dtypes[0]

    @jax.jit
    def program(operands, dy, tables):
        y, pull = jax.vjp(lambda *operands: implementation.run(operands, tables), *operands)
        return y, *pull(dy)

    for offset in range(2):
        layouts = mlp_layouts("random", 2, 1, 2, block, (offset, offset + 1))
        operands, dy = draw_operands(layouts, (9,), dtype, offset)
        with precision(dtype):
            actual = program(operands, dy, [layout.tables() for layout in layouts])
            assert_close(actual, exact(operands, dy, layouts), dtype)
    assert program._cache_size() == 1


@every_case
def test_no_tokens_have_zero_gradients(implementation, gated):
    dtype = implementation.dtypes[0]
    operands, dy, _ = draw(implementation, gated, (0,), dtype)
    if gated and jax.sharding.get_abstract_mesh().empty:
        return  # Few rows have no fused op on a CPU.
    y, dx, *others = gradients(implementation, operands, dy)
    assert y.shape == dy.shape and dx.shape == operands[0].shape
    for gradient in others:
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


@pytest.mark.parametrize("name", [each.name for each in SUITE if each.name.startswith("pallas")])
def test_kernels_run_on_their_platform_alone(name):
    operands, _ = draw_operands(GROUPS, (8,), "float32")
    tables = [layout.tables() for layout in GROUPS]
    with pytest.raises(UserError, match=r"it runs on .*, and this is cpu\. Legal here: products"):
        sparse_mlp(*operands, *tables, name)


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


@pytest.mark.parametrize("pattern", some(["monarch", "butterfly", "random"], "monarch", "random"))
def test_concrete_and_traced_tables_agree(pattern):
    layouts = mlp_layouts(pattern)
    operands, dy = draw_operands(layouts, (3, 5), "float32")
    concrete, traced = (run(operands, dy, layouts, traced) for traced in (False, True))
    for mine, other in zip(concrete, traced, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


MANY = 33  # Rows for which a CPU goes group by group.


def test_permuted_groups_by_themselves():
    layouts = permuted_groups()
    assert xla_static.chain(*layouts)  # So this implementation is chosen.
    operands, dy = draw_operands(layouts, (3, 11), "float64")
    with precision("float64"):
        assert_close(run(operands, dy, layouts), exact(operands, dy, layouts), "float64")


def test_no_array_has_the_whole_hidden_layer_or_a_dense_weight(array_sizes):
    layouts = mlp_layouts("monarch")
    operands, dy = draw_operands(layouts, (MANY,), "float32")
    tables = [layout.tables() for layout in layouts]

    def sizes(implementation):
        def program(operands, dy):
            y, pull = jax.vjp(lambda *x: sparse_mlp(*x, *tables, implementation), *operands)
            return y, pull(dy)

        return array_sizes(program, operands, dy)

    hidden = MANY * layouts[0].out_features
    assert hidden in sizes("products") and hidden not in sizes(None)
    dense = layouts[0].in_features * layouts[0].out_features
    assert dense not in sizes("products") + sizes(None)


def test_hidden_groups_that_mix_are_refused():
    layouts = mlp_layouts("shuffle")
    operands, _ = draw_operands(layouts, (MANY,), "float32")
    tables = [layout.tables() for layout in layouts]
    assert not xla_static.chain(*layouts)
    with pytest.raises(UserError, match="does not read the hidden blocks of each group"):
        sparse_mlp(*operands, *tables, implementation="xla_static")


def test_illegal_operands_are_refused():
    layouts = mlp_layouts("monarch")
    (x, values_in, bias, values_out), _ = draw_operands(layouts, (MANY,), "float32")
    tables = [layout.tables() for layout in layouts]
    with pytest.raises(UserError, match="'fast' is unknown; legal: products, pallas_tpu"):
        sparse_mlp(x, values_in, bias, values_out, *tables, "fast")
    with pytest.raises(UserError, match=r"bias_in has shape \(5,\); legal: \(128,\)"):
        sparse_mlp(x, values_in, jnp.ones(5), values_out, *tables)
    with pytest.raises(UserError, match=r"x has shape \(0, 128\); the layout reads \[..., 32\]"):
        sparse_mlp(x, values_in, bias, values_out, tables[0], tables[0])
