"""One suite for every implementation of the block-sparse matmul, the reference included.

The expected results are dense products in numpy's float64.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from marks import examples, some
from simulated import simulated_tpu
from simulated_hopper import simulated_hopper
from simulated_triton import simulated_triton

from sparse_dataflow.core.config.sparsity import GROUPED_PATTERNS
from sparse_dataflow.core.layouts.layout import BlockLayout, LayoutTables
from sparse_dataflow.core.layouts.patterns import PATTERNS, make_layout
from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.ops.block_sparse_matmul import matmul_op as api
from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import block_sparse_matmul
from sparse_dataflow.files.errors import UserError


class Implementation(NamedTuple):
    """An implementation, and the cases that it supports."""

    name: str
    blocks: tuple[int, ...] = (1, 3, 8, 16)
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float64")
    runtime_tables: bool = True
    stored_blocks_only: bool = True
    examples: int = 16
    most_weights: float = float("inf")
    grouped: bool = False  # Only layouts of equal groups.
    environment: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    def tables(self, layout: BlockLayout) -> LayoutTables:
        """Tables of a layout, with its groups if the implementation needs them."""
        return layout.tables().with_groups() if self.grouped else layout.tables()


SUITE = [
    Implementation("reference", stored_blocks_only=False),
    Implementation("grouped", runtime_tables=False, grouped=True),
    Implementation("xla"),
    Implementation("xla_static", runtime_tables=False),
    # The interpreter compiles slowly: few examples here, many layouts in test_pallas_tpu.py.
    Implementation(
        "pallas_tpu",
        (128, 64, 256, 32),
        ("float32", "bfloat16"),
        examples=3,
        environment=simulated_tpu,
    ),
    Implementation(
        "pallas_tpu_grouped",
        (128, 256),
        ("float32", "bfloat16"),
        runtime_tables=False,
        grouped=True,
        examples=3,
        environment=simulated_tpu,
    ),
    Implementation(
        "pallas_hopper",
        (128, 64, 256, 32),
        ("bfloat16", "float32"),
        examples=4,
        most_weights=2**18,
        environment=simulated_hopper,
    ),
    Implementation(
        "pallas_triton",
        (128, 64, 256, 32),
        ("bfloat16",),
        examples=4,
        most_weights=2**18,
        environment=simulated_triton,
    ),
]


def suite(*chosen, keep=lambda implementation: True):
    """Parametrizes with each implementation; those that are not chosen, if any is, are slow."""
    cases = {i.name: (i,) for i in SUITE if keep(i)}
    return pytest.mark.parametrize("implementation", some(cases, *(chosen or cases)))


every_implementation = suite()
# Every implementation has its derivatives from core/ops/derivatives.py.
with_shared_derivatives = suite("xla", "grouped", "pallas_tpu")
with_runtime_tables = suite(keep=lambda i: i.runtime_tables)


def test_no_implementation_escapes_the_suite():
    assert {i.name for i in SUITE} == set(api.IMPLEMENTATIONS)


@st.composite
def layouts(draw, block):
    """Draw layouts: balanced by any pattern, irregular, with empty lines, one block, all blocks."""
    in_blocks, out_blocks = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["balanced", "irregular", "empty lines", "one", "all"]))
    if kind == "balanced":
        ring = draw(st.sampled_from([2, 3, 4, 6]))
        shape = [ring * side * block for side in draw(st.sampled_from([(1, 1), (1, 2), (3, 1)]))]
        pattern = draw(st.sampled_from(sorted(set(PATTERNS) - {"dense"})))
        degrees = [k for k in range(1, ring) if pattern not in GROUPED_PATTERNS or ring % k == 0]
        density = draw(st.sampled_from(degrees)) / ring
        return make_layout(pattern, *shape, block, density, offset=draw(st.integers(0, 9)))
    if kind == "irregular":
        mask = draw(hnp.arrays(bool, (in_blocks, out_blocks)))
    else:
        mask = np.full((in_blocks, out_blocks), kind != "one")
    if kind == "empty lines":
        mask[draw(st.integers(0, in_blocks - 1))] = False
        mask[:, draw(st.integers(0, out_blocks - 1))] = False
    if not mask.any():
        mask[draw(st.integers(0, in_blocks - 1)), draw(st.integers(0, out_blocks - 1))] = True
    return BlockLayout.from_mask(mask, block)


@st.composite
def grouped_layouts(draw, block):
    """Draw layouts of equal groups, and shards that have some of the parts of one side."""
    count, parts = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    first = draw(st.integers(0, max(0, parts - count)))
    runs = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    outer = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    sides = [count, max(count, parts)]
    firsts = [0, first]
    if draw(st.booleans()):
        sides, firsts = sides[::-1], firsts[::-1]
    in_part, out_part = (
        np.arange(o * side * run) // run % side - start
        for o, side, run, start in zip(outer, sides, runs, firsts)
    )
    mask = (in_part[:, None] == out_part) & (in_part >= 0)[:, None] & (in_part < count)[:, None]
    return BlockLayout.from_mask(mask, block)


TOKENS = st.sampled_from([(), (1,), (7,), (3, 5), (2, 1, 3), (256,), (2, 130), (513,)])


class Case(NamedTuple):
    layout: BlockLayout
    dtype: str
    tokens: tuple[int, ...]
    seed: int
    traced_tables: bool


@st.composite
def cases(draw, implementation):
    few = lambda layout: layout.nnz * layout.block**2 <= implementation.most_weights  # noqa: E731
    kinds = grouped_layouts if implementation.grouped else layouts
    return Case(
        layout=draw(kinds(draw(st.sampled_from(implementation.blocks))).filter(few)),
        dtype=draw(st.sampled_from(implementation.dtypes)),
        tokens=draw(TOKENS),
        seed=draw(st.integers(0, 99)),
        traced_tables=(implementation.runtime_tables or implementation.grouped)
        and draw(st.booleans()),
    )


def precision(dtype):
    """Enable float64 within this context if the dtype needs it."""
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def draw_operands(layout, tokens, dtype, seed=0):
    """Return (x, values, cotangent of y), standard normal, rounded to dtype."""
    rng = np.random.default_rng(seed)
    shapes = operand_shapes(layout, tokens, dtype)
    return [rng.normal(size=operand.shape).astype(operand.dtype) for operand in shapes]


def operand_shapes(layout, tokens, dtype):
    shapes = (
        (*tokens, layout.in_features),
        (layout.nnz, layout.block, layout.block),
        (*tokens, layout.out_features),
    )
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def all_products(x, values, dy, tables, implementation):
    """Return (y = xW, dx = dy Wᵀ, dW at the stored blocks)."""
    product = lambda x, values: block_sparse_matmul(x, values, tables, implementation)  # noqa: E731
    y, pullback = jax.vjp(product, x, values)
    return y, *pullback(dy)


def run(implementation, operands, tables, traced_tables=False):
    if traced_tables:
        return jax.jit(all_products, static_argnums=4)(*operands, tables, implementation)
    return jax.jit(lambda *o: all_products(*o, tables, implementation))(*operands)


def exact_products(operands, layout):
    """Return the three products of the dense weight, in float64."""
    x, values, dy = (np.asarray(operand, np.float64) for operand in operands)
    dense = layout.to_dense(values)
    dweight = x.reshape(-1, layout.in_features).T @ dy.reshape(-1, layout.out_features)
    return x @ dense, dy @ dense.T, layout.from_dense(dweight)


def assert_close(actual, operands, layout):
    """Assert each product's error below the rounding bound: that of a dot product in the
    accumulator's precision, plus one rounding of the result."""
    dtype = operands[0].dtype
    unit = float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps)
    length = max(layout.in_features, layout.out_features, operands[0].size // layout.in_features)
    expected = exact_products(operands, layout)
    bounds = exact_products([np.abs(operand) for operand in operands], layout)
    for product, right, bound in zip(actual, expected, bounds):
        assert product.shape == right.shape
        assert product.dtype == dtype
        error = np.abs(np.asarray(product, np.float64) - right)
        assert np.all(
            error <= float(jnp.finfo(dtype).eps) * np.abs(right) + length * unit * bound
        ), error.max()


@every_implementation
def test_products_match_the_dense_product(implementation):
    @settings(max_examples=examples(implementation.examples))
    @given(case=cases(implementation))
    def check(case):
        operands = draw_operands(case.layout, case.tokens, case.dtype, case.seed)
        with precision(case.dtype):
            tables = implementation.tables(case.layout)
            actual = run(implementation.name, operands, tables, case.traced_tables)
        assert_close(actual, operands, case.layout)

    check()


@pytest.mark.parametrize("batched", some(["x", "values", "both"], "both"))
@with_shared_derivatives
def test_vmap_is_a_loop(implementation, batched):
    layout = make_layout(
        "monarch", *[2 * implementation.blocks[0]] * 2, implementation.blocks[0], 0.5
    )
    dtype = implementation.dtypes[0]
    several = [draw_operands(layout, (16,), dtype, seed) for seed in range(2)]
    axes = (0 if batched != "values" else None, 0 if batched != "x" else None, 0)
    operands = [
        np.stack([each[i] for each in several]) if axis == 0 else several[0][i]
        for i, axis in enumerate(axes)
    ]
    products = lambda x, values, dy: all_products(  # noqa: E731
        x, values, dy, implementation.tables(layout), implementation.name
    )
    results = jax.jit(jax.vmap(products, axes))(*operands)
    for number in range(2):
        one = [o[number] if axis == 0 else o for o, axis in zip(operands, axes)]
        assert_close([result[number] for result in results], one, layout)


@with_shared_derivatives
def test_second_derivatives_are_right_or_refused_in_words(implementation):
    block, dtype = implementation.blocks[0], implementation.dtypes[0]
    layout = make_layout("monarch", 2 * block, 2 * block, block, 0.5)
    x, values, _ = draw_operands(layout, (16,), dtype)

    def curvature(name):
        def slope(x):
            y = block_sparse_matmul(x, values, implementation.tables(layout), name)
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.grad(lambda x: jnp.sum(jax.grad(slope)(x) ** 2))(x)

    if implementation.name.startswith("pallas"):
        with pytest.raises(UserError, match="first derivatives alone; legal"):
            curvature(implementation.name)
    else:
        expected = curvature("reference")
        np.testing.assert_allclose(
            curvature(implementation.name), expected, atol=1e-4 * np.abs(expected).max()
        )


@with_shared_derivatives
def test_forward_mode_is_the_sum_of_two_products(implementation):
    block, dtype = implementation.blocks[0], implementation.dtypes[0]
    layout = make_layout("monarch", 2 * block, 2 * block, block, 0.5)
    moved = [draw_operands(layout, (16,), dtype, seed)[:2] for seed in range(2)]
    (x, values), (dx, dvalues) = moved
    tables = implementation.tables(layout)
    product = lambda x, values: block_sparse_matmul(x, values, tables, implementation.name)  # noqa: E731
    # Not under jit: interpreted kernels have effects, which the linear primitive hides.
    _, dy = jax.jvp(product, *(tuple(map(jnp.asarray, each)) for each in moved))
    dense = [layout.to_dense(np.asarray(each, np.float64)) for each in (values, dvalues)]
    wide = [np.asarray(each, np.float64) for each in (dx, x)]
    terms = [left @ right for left, right in zip(wide, dense)]
    tolerance = 4e-2 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(
        np.asarray(dy, np.float64), sum(terms), atol=tolerance * np.abs(terms).max()
    )


@suite("reference", "xla", "pallas_triton", keep=lambda i: i.runtime_tables)
def test_changed_tables_run_in_the_same_program(implementation):
    block = implementation.blocks[-1]
    traces = []

    @jax.jit
    def products(x, values, dy, tables):
        traces.append(1)
        return all_products(x, values, dy, tables, implementation.name)

    for offset in range(2):
        layout = make_layout("random", 8 * block, 4 * block, block, 0.5, offset)
        operands = draw_operands(layout, (6,), implementation.dtypes[0], offset)
        assert_close(products(*operands, layout.tables()), operands, layout)
    assert len(traces) == products._cache_size() == 1


@suite("reference", "xla", "pallas_triton", keep=lambda i: i.runtime_tables)
def test_a_program_with_runtime_tables_does_not_grow_with_the_layout(array_sizes, implementation):
    block = implementation.blocks[-1]

    def length(blocks):
        layout = make_layout("random", blocks * block, blocks * block, block, 0.25)
        operands = operand_shapes(layout, (6,), implementation.dtypes[0])
        products = lambda *a: all_products(*a, implementation.name)  # noqa: E731
        return len(array_sizes(products, *operands, layout.tables()))

    assert length(64) == length(128)  # Both are longer than a kernel's tiles.


def largest_of_a_gradient(array_sizes, implementation, tokens, traced_tables):
    """Return (size of the largest array in a forward and backward pass, size of the dense W)."""
    block = implementation.blocks[-1]
    layout = make_layout("butterfly", 32 * block, 64 * block, block, 1 / 16)
    operands = operand_shapes(layout, tokens, implementation.dtypes[0])
    tables = layout.tables()
    if traced_tables:
        products = lambda *a: all_products(*a, implementation.name)  # noqa: E731
        sizes = array_sizes(products, *operands, tables)
    else:
        sizes = array_sizes(lambda *o: all_products(*o, tables, implementation.name), *operands)
    return max(sizes), layout.in_features * layout.out_features


@pytest.mark.parametrize(
    ("implementation", "traced_tables"),
    [
        pytest.param(
            i,
            traced,
            id=f"{i.name}-{'traced' if traced else 'concrete'}",
            marks=pytest.mark.slow if i.runtime_tables and not traced else (),
        )
        for i in SUITE
        for traced in (False, True)
        if i.stored_blocks_only and (i.runtime_tables or not traced)
    ],
)
def test_no_array_has_the_dense_size(array_sizes, implementation, traced_tables):
    largest, dense = largest_of_a_gradient(array_sizes, implementation, (2, 8), traced_tables)
    assert largest <= dense / 16


def test_the_reference_has_an_array_of_the_dense_size(array_sizes):
    largest, dense = largest_of_a_gradient(array_sizes, SUITE[0], (2, 8), False)
    assert largest >= dense


@suite(keep=lambda i: i.runtime_tables and i.stored_blocks_only)
def test_the_gathered_copy_does_not_grow_with_tokens(array_sizes, implementation):
    tokens = 1 << 14
    largest, _ = largest_of_a_gradient(array_sizes, implementation, (tokens,), True)
    block = implementation.blocks[-1]
    assert largest == tokens * 64 * block  # The result; a full gathered copy is four times larger.


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_few_rows_read_every_stored_block_once(rows):
    block = 64
    layout = make_layout("butterfly", 16 * block, 32 * block, block, 1 / 8)
    operands = operand_shapes(layout, (rows,), "float32")[:2]
    product = jax.jit(lambda *a: block_sparse_matmul(*a, "xla"))
    cost = product.lower(*operands, layout.tables()).compile().cost_analysis()
    stored = 4 * layout.nnz * block * block
    assert cost["bytes accessed"] < 1.5 * stored  # The rest is partial products, rows / block.


@pytest.mark.parametrize("pattern", ["monarch", "butterfly", "random"])
@pytest.mark.parametrize("rows", some([1, 7, 32], 7))
def test_few_rows_on_a_gpu_run_no_kernel(monkeypatch, pattern, rows):
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    layout = make_layout(pattern, 256, 512, 64, 1 / 4)
    x, values, _ = draw_operands(layout, (rows,), "float32")
    dense = np.float64(x) @ layout.to_dense(np.float64(values))
    traced = layout.tables().with_groups()
    for layout_or_tables in (layout, layout.tables(), traced):
        product = lambda x, v, t=layout_or_tables: block_sparse_matmul(x, v, t)  # noqa: E731
        assert "pallas_call" not in str(jax.make_jaxpr(product)(x, values))
        np.testing.assert_allclose(product(x, values), dense, rtol=1e-5, atol=1e-5)
    y = jax.jit(block_sparse_matmul)(x, values, traced)
    np.testing.assert_allclose(y, dense, rtol=1e-5, atol=1e-5)


def program(layout, tables, implementation, x_shape=(64,)):
    operands = draw_operands(layout, x_shape, "float32")
    products = lambda x, v, dy: all_products(x, v, dy, tables, implementation)  # noqa: E731
    return str(jax.make_jaxpr(products)(*operands))


def test_concrete_tables_are_specialised_while_groups_are_few():
    if jax.default_backend() != "cpu":
        pytest.skip("specialising is for CPUs")
    few = make_layout("butterfly", 64, 128, 8, 0.25)
    assert program(few, few.tables(), None) == program(few, few.tables(), "xla_static")
    many = make_layout("random", 800, 800, 8, 0.25)
    assert program(many, many.tables(), None) == program(many, many.tables(), "xla")
    assert program(few, few.tables(), None, (1,)) == program(few, few.tables(), "xla", (1,))


def test_traced_tables_are_not_specialised():
    layout = make_layout("butterfly", 64, 128, 8, 0.25)
    programs = {}

    def record(tables):
        for name in (None, "xla"):
            programs[name] = program(layout, tables, name)
        return 0

    jax.jit(record)(layout.tables())
    assert programs[None] == programs["xla"]


LAYOUT = make_layout("cyclic", 32, 64, 8, 0.5)


def refused(x_shape=(4, 32), values_shape=(LAYOUT.nnz, 8, 8), dtypes=("float32",) * 2, name=None):
    """Return the error message for operands of these shapes."""
    x, values = (
        jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip((x_shape, values_shape), dtypes)
    )
    with pytest.raises(UserError) as refusal:
        jax.eval_shape(lambda x, v: block_sparse_matmul(x, v, LAYOUT.tables(), name), x, values)
    return str(refusal.value)


def test_bad_input_is_refused():
    assert "x has shape (4, 33); the layout reads [..., 32]" in refused(x_shape=(4, 33))
    assert "x has shape ()" in refused(x_shape=())
    assert "legal: [nnz, block, block]" in refused(values_shape=(LAYOUT.nnz, 64))
    assert "legal: [nnz, block, block]" in refused(values_shape=(LAYOUT.nnz, 8, 4))
    assert "x is bfloat16 and values are float32" in refused(dtypes=("bfloat16", "float32"))
    assert "legal: one float dtype" in refused(dtypes=("int32", "int32"))
    message = refused(name="fastest")
    assert "'fastest' is unknown" in message
    assert all(name in message for name in api.IMPLEMENTATIONS)


@pytest.mark.parametrize("nnz", [LAYOUT.nnz - 1, LAYOUT.nnz + 1])
def test_values_of_another_layout_are_refused(nnz):
    message = refused(values_shape=(nnz, 8, 8))
    assert f"{nnz} blocks" in message and f"{LAYOUT.nnz}" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_index": LAYOUT.tables().in_index + 0.5}, "in_index is float64"),
        ({"in_index": LAYOUT.tables().in_index + 4}, "in_index ranges from .* legal: 0 to 3"),
        ({"in_slot": LAYOUT.tables().in_slot[::-1]}, "sorted by output"),
        ({"out_slot": LAYOUT.tables().out_slot[0]}, r"legal: int32 \[lines, fan\]"),
    ],
)
def test_tables_of_no_layout_are_refused_before_anything_is_compiled(changes, message):
    operands = operand_shapes(LAYOUT, (4,), "float32")[:2]
    tables = LAYOUT.tables()._replace(**changes)
    with pytest.raises(UserError, match=message):
        jax.eval_shape(lambda x, v: block_sparse_matmul(x, v, tables), *operands)


def test_traced_tables_are_checked_as_far_as_is_known():
    operands = draw_operands(LAYOUT, (4,), "float32")[:2]
    wrong = [table.astype(np.float32) for table in LAYOUT.tables().arrays]
    with pytest.raises(UserError, match="in_index is float32"):
        jax.jit(block_sparse_matmul)(*operands, LayoutTables(*wrong))


def test_an_implementation_that_cannot_run_says_so():
    operands = draw_operands(LAYOUT, (4,), "float32")
    with pytest.raises(UserError, match=r"'xla_static' cannot run: it needs concrete .*Legal here"):
        jax.jit(all_products, static_argnums=4)(*operands, LAYOUT.tables(), "xla_static")


@every_implementation
def test_no_tokens_are_no_work(implementation):
    block = implementation.blocks[-1]
    layout = make_layout("monarch", 4 * block, 8 * block, block, 0.5)
    operands = draw_operands(layout, (2, 0), implementation.dtypes[0])
    y, dx, dvalues = run(implementation.name, operands, layout.tables())
    assert y.shape == (2, 0, layout.out_features) and dx.shape == operands[0].shape
    np.testing.assert_array_equal(dvalues, np.zeros_like(operands[1]))


@pytest.mark.parametrize("pattern", ["random", "monarch"])
def test_a_layout_is_specialised_to_as_its_concrete_tables_are(pattern):
    layout = make_layout(pattern, 64, 128, 16, 0.5)
    x, values = jnp.ones((64, 64)), jnp.ones((layout.nnz, 16, 16))
    programs = [
        str(
            jax.make_jaxpr(lambda x, values, form=form: block_sparse_matmul(x, values, form))(
                x, values
            )
        )
        for form in (layout, layout.tables())
    ]
    assert programs[0] == programs[1]
    with pytest.raises(UserError, match="blocks of 8; legal: the layout's 16"):
        block_sparse_matmul(x, values[:, :8, :8], layout)
