"""One contract for every kind of weight: its product and gradients are those of its matrix."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.model.projection import arrays
from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.weights import products
from sparse_dataflow.core.weights.block_sparse import BlockSparse
from sparse_dataflow.core.weights.dense import Dense, Quantised
from sparse_dataflow.core.weights.low_rank import LowRank, PlusLowRank
from sparse_dataflow.core.weights.weight import Hadamard, Linear, Probed, Thresholded

IN, OUT, SIDE = 32, 64, 4


def normal(rng, *shape):
    return rng.normal(size=shape)


def mask(rng):
    """A drawn mask that stores blocks of every output."""
    drawn = rng.random((IN // SIDE, OUT // SIDE)) < 0.3
    drawn[rng.integers(IN // SIDE, size=OUT // SIDE), np.arange(OUT // SIDE)] = True
    return drawn


def stored(rng, kind):
    """Returns (a weight that stores a matrix, the matrix in numpy)."""
    if kind == "dense":
        kernel = normal(rng, IN, OUT)
        return Dense(kernel), kernel
    if kind == "int8":
        kernel, scale = rng.integers(-127, 128, (IN, OUT)).astype(np.int8), normal(rng, OUT)
        return Quantised(kernel, scale), kernel * scale
    if kind == "low rank":
        factors = normal(rng, IN, 3), normal(rng, 3, OUT)
        return LowRank(*factors), factors[0] @ factors[1]
    layout = (
        make_layout("monarch", IN, OUT, SIDE, 0.25)
        if kind == "groups"
        else BlockLayout.from_mask(mask(rng), SIDE)
    )
    values = normal(rng, layout.nnz, SIDE, SIDE)
    matrix = np.zeros((IN, OUT))
    for row, col, block in zip(layout.rows, layout.cols, values, strict=True):
        matrix[SIDE * row :][:SIDE, SIDE * col :][:, :SIDE] = block
    return BlockSparse(values, layout.tables() if kind == "tables" else layout), matrix


STORED = ("dense", "int8", "low rank", "groups", "layout", "tables")
WRAPPED = ("plain", "hadamard", "low-rank term", "all")


def wrapped(rng, weight, matrix, how):
    """Returns (a weight with wrappers, its matrix in numpy)."""
    if how in ("hadamard", "all"):
        mix = np.kron(np.eye(IN // 8), scipy.linalg.hadamard(8) / 8**0.5)
        weight, matrix = Hadamard(weight, 8), mix @ matrix
    if how in ("low-rank term", "all"):
        term = normal(rng, IN, 2), normal(rng, 2, OUT), np.float64(0.5)
        weight, matrix = PlusLowRank(weight, *term), matrix + term[2] * term[0] @ term[1]
    return weight, matrix


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("how", WRAPPED)
def test_product_gradients_and_dense_form_are_those_of_the_matrix(kind, how):
    rng = np.random.default_rng(0)
    weight, matrix = wrapped(rng, *stored(rng, kind), how)
    x, dy = normal(rng, 2, 5, IN), normal(rng, 2, 5, OUT)
    floats = [leaf for leaf in jax.tree.leaves(weight) if leaf.dtype == np.float64]
    structure = jax.tree.structure(weight)

    def put(floats):
        rest = iter(floats)
        leaves = [next(rest) if a.dtype == np.float64 else a for a in jax.tree.leaves(weight)]
        return jax.tree.unflatten(structure, leaves)

    with jax.enable_x64(True):
        product = lambda x, floats: x @ put(floats)  # noqa: E731
        y, pullback = jax.vjp(product, jnp.asarray(x), list(map(jnp.asarray, floats)))
        dx, gradients = pullback(jnp.asarray(dy))
        np.testing.assert_allclose(weight.dense(), matrix, rtol=1e-12, atol=1e-12)
        # The gradient of an array is that of the matrix, through its own dense form.
        _, through_dense = jax.vjp(lambda f: put(f).dense(), list(map(jnp.asarray, floats)))
        [expected] = through_dense(jnp.asarray(np.einsum("bti,bto->io", x, dy)))
    np.testing.assert_allclose(y, x @ matrix, rtol=1e-12, atol=1e-11)
    np.testing.assert_allclose(dx, dy @ matrix.T, rtol=1e-12, atol=1e-11)
    for gradient, dense_gradient in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, dense_gradient, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("kind", STORED)
def test_a_threshold_is_the_product_of_the_input_with_zeros(kind):
    rng = np.random.default_rng(1)
    weight, matrix = stored(rng, kind)
    for tokens in (1, 6):
        x = normal(rng, tokens, IN)
        with jax.enable_x64(True):
            y = jnp.asarray(x) @ Thresholded(weight, np.float64(0.5))
        masked = np.where(np.abs(x) <= 0.5, 0, x)
        np.testing.assert_allclose(y, masked @ matrix, rtol=1e-12, atol=1e-11)


@settings(max_examples=5)
@given(st.integers(0, 10**6))
def test_a_probe_changes_no_product_and_measures_the_dense_gradient(seed):
    rng = np.random.default_rng(seed)
    weight, matrix = stored(rng, "layout")
    x, dy = normal(rng, 3, 7, IN), normal(rng, 3, 7, OUT)
    zeros = np.zeros((IN // SIDE, OUT // SIDE))
    with jax.enable_x64(True):
        y, pullback = jax.vjp(lambda norms: jnp.asarray(x) @ Probed(weight, norms), zeros)
        [norms] = pullback(jnp.asarray(dy))
    blocks = np.einsum("bti,bto->io", x, dy).reshape(IN // SIDE, SIDE, OUT // SIDE, SIDE)
    np.testing.assert_allclose(y, x @ matrix, rtol=1e-12, atol=1e-11)
    np.testing.assert_allclose(norms, np.linalg.norm(blocks, axis=(1, 3)), rtol=1e-12)


@pytest.mark.parametrize("devices", [2, 4])
def test_devices_that_share_the_rows_measure_the_gradient_of_all(devices):
    rng = np.random.default_rng(devices)
    weight, _ = stored(rng, "dense")
    x, dy = normal(rng, devices, 3, IN), normal(rng, devices, 3, OUT)
    zeros = np.zeros((IN // SIDE, OUT // SIDE))

    def measured(x, dy):
        product = lambda norms: x @ Probed(weight, norms, ("data",))  # noqa: E731
        return jax.vjp(product, zeros)[1](dy)[0]

    with jax.enable_x64(True):
        norms = jax.vmap(measured, axis_name="data")(jnp.asarray(x), jnp.asarray(dy))
    blocks = np.einsum("bti,bto->io", x, dy).reshape(IN // SIDE, SIDE, OUT // SIDE, SIDE)
    expected = np.linalg.norm(blocks, axis=(1, 3))
    np.testing.assert_allclose(norms, np.broadcast_to(expected, norms.shape), rtol=1e-10)


def test_a_layout_is_structure_and_tables_are_leaves():
    rng = np.random.default_rng(2)
    weight, _ = stored(rng, "groups")
    assert [leaf.shape for leaf in jax.tree.leaves(weight)] == [weight.values.shape]
    other = dataclasses.replace(weight, layout=make_layout("random", IN, OUT, SIDE, 0.25))
    again = dataclasses.replace(weight, layout=make_layout("monarch", IN, OUT, SIDE, 0.25))
    structure = jax.tree.structure(weight)
    assert structure == jax.tree.structure(again) != jax.tree.structure(other)
    traces = []

    @jax.jit
    def product(x, weight):
        traces.append(None)
        return x @ weight

    x = np.ones((2, IN), np.float32)
    as_data = [
        dataclasses.replace(w, layout=jax.tree.map(jnp.asarray, w.layout.tables()))
        for w in (weight, other)
    ]
    for w in (weight, again, other, *as_data):
        with jax.enable_x64(False):
            single = dataclasses.replace(w, values=np.float32(w.values))
            np.testing.assert_allclose(product(x, single), x @ single.dense(), rtol=1e-5, atol=1e-5)
    assert len(traces) == 3  # Two static layouts, and one program for all tables.


def test_arrays_have_the_names_of_checkpoints():
    rng = np.random.default_rng(3)
    weight, _ = wrapped(rng, *stored(rng, "layout"), "all")
    linear = Linear(weight, normal(rng, OUT))
    names = ["values", "a_kernel", "b_kernel", "gate", "bias"]
    assert list(arrays(linear)) == names
    tables, _ = stored(rng, "tables")
    assert list(arrays(Linear(tables))) == ["values"]


@pytest.mark.parametrize("kind", STORED)
def test_the_output_has_the_dtype_of_the_input(kind):
    weight, _ = stored(np.random.default_rng(4), kind)
    for x in (jnp.ones((3, IN), jnp.bfloat16), np.ones((3, IN), np.float32)):
        assert (x @ weight).dtype == x.dtype


def test_a_weight_prints_its_shapes_and_its_layout():
    weight, _ = stored(np.random.default_rng(5), "groups")
    text = repr(
        Linear(PlusLowRank(weight, *map(np.float32, (np.ones((IN, 2)), np.ones((2, OUT)), 1))))
    )
    for text_part in (
        "values=f64[32,4,4]",
        "a_kernel=f32[32,2]",
        "gate=f32[]",
        repr(weight.layout),
    ):
        assert text_part in text
    assert "precision" not in text and "bias" not in text and "\n" not in text
    assert "values=bf16[2]" in repr(BlockSparse(jnp.ones(2, jnp.bfloat16), weight.layout))


@pytest.mark.parametrize(
    ("pattern", "sides", "density"),
    [
        ("monarch", (640, 256), 1 / 4),
        ("monarch", (512, 1024), 1 / 8),
        ("shuffle", (256, 512), 1 / 4),
    ],
)
def test_each_group_of_inputs_is_read_by_one_group_of_outputs(pattern, sides, density):
    layout = make_layout(pattern, *sides, 32, density)
    weight = BlockSparse(jnp.ones((layout.nnz, 32, 32)), layout)
    groups, run = weight.input_groups
    stored = layout.mask.repeat(32, 0)  # [input features, output blocks]
    by_group = stored.reshape(-1, groups, run, stored.shape[1])
    # All features of a group have the same outputs, and no two groups share one.
    outputs = by_group[0, :, 0]
    assert (by_group == outputs[None, :, None]).all()
    assert (outputs.sum(0) == 1).all() and groups > 1


@pytest.mark.parametrize("sides", [(64, 64), (96, 32), (32, 160)])
def test_a_layout_without_groups_is_read_in_order(sides):
    layout = make_layout("random", *sides, 16, 0.5)
    assert BlockSparse(jnp.ones((layout.nnz, 16, 16)), layout).input_groups == (1, 0)
    assert Dense(jnp.ones(sides)).input_groups == (1, 0)


@pytest.mark.parametrize("sides", [(64, 64), (96, 32), (8, 160)])
def test_a_gpu_multiplies_one_row_as_two(sides):
    x, kernel = jax.random.normal(jax.random.key(0), (1, 1, sides[0])), jnp.ones(sides)

    def program():
        return str(jax.make_jaxpr(lambda x, kernel: products.by_rows(x, kernel))(x, kernel))

    with mock.patch.object(dispatch, "platform", lambda: "gpu"):
        assert f"f32[2,{sides[1]}] = dot_general" in program()
        np.testing.assert_allclose(products.by_rows(x, kernel), x @ kernel, rtol=1e-5, atol=1e-6)
    assert f"f32[1,{sides[1]}] = dot_general" in program()
