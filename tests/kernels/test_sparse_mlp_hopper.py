"""The sparse MLP's Hopper kernels, interpreted, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulated_hopper import simulated_hopper, targeted_gpu

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul.hopper.api import NEEDED_JAX
from sparse_dataflow.kernels.gelu.api import value_and_derivative
from sparse_dataflow.kernels.sparse_mlp import pallas_hopper
from sparse_dataflow.sparsity.layout import BlockLayout
from sparse_dataflow.sparsity.patterns import make_layout

pytestmark = [
    pytest.mark.skipif(
        jax.__version_info__ < NEEDED_JAX,
        reason=f"Mosaic GPU kernels need jax >= 0.11, not {jax.__version__}",
    ),
]


def draw(layout_in, layout_out, tokens):
    """Return (x, values_in, bias_in, values_out, dy), standard normal."""
    rng = np.random.default_rng(0)
    x, dy = (
        rng.normal(size=(tokens, features)).astype(jnp.bfloat16)
        for features in (layout_in.in_features, layout_out.out_features)
    )
    blocks = [
        rng.normal(size=(layout.nnz, layout.block, layout.block)).astype(jnp.bfloat16)
        for layout in (layout_in, layout_out)
    ]
    bias = rng.normal(size=layout_in.out_features).astype(np.float32)
    return x, blocks[0], bias, blocks[1], dy


def exact(layout_in, layout_out, x, values_in, bias_in, values_out, dy):
    """Return (y, dx, dvalues_in, dbias_in, dvalues_out) in float64."""
    x, values_in, bias_in, values_out, dy = (
        np.asarray(array, np.float64) for array in (x, values_in, bias_in, values_out, dy)
    )
    w_in, w_out = layout_in.to_dense(values_in), layout_out.to_dense(values_out)
    with jax.enable_x64(True):
        hidden, slope = map(np.asarray, value_and_derivative(jnp.asarray(x @ w_in + bias_in)))
    dz = dy @ w_out.T * slope
    return (
        hidden @ w_out,
        dz @ w_in.T,
        layout_in.from_dense(x.T @ dz),
        dz.sum(0),
        layout_out.from_dense(hidden.T @ dy),
    )


def value_and_gradients(x, values_in, bias_in, values_out, dy, tables_in, tables_out):
    y, pullback = jax.vjp(
        lambda *o: pallas_hopper.sparse_mlp(*o, tables_in, tables_out),
        x,
        values_in,
        bias_in,
        values_out,
    )
    return y, *pullback(dy)


@pytest.mark.parametrize(("block", "tokens"), [(64, 70), (128, 0)])
def test_the_mlp_and_its_gradients(block, tokens):
    """Irregular layouts, with a hidden block without inputs and one without outputs."""
    mask_in = np.array([[1, 0, 1, 1], [0, 0, 1, 0]], bool)
    mask_out = np.array([[1, 0], [1, 1], [0, 0], [0, 1]], bool)
    layouts = BlockLayout.from_mask(mask_in, block), BlockLayout.from_mask(mask_out, block)
    operands = draw(*layouts, tokens)
    with simulated_hopper():
        tables = [layout.tables() for layout in layouts]
        actual = jax.jit(value_and_gradients)(*operands, *tables)
    for got, right in zip(actual, exact(*layouts, *operands)):
        assert got.shape == right.shape
        error = np.abs(np.asarray(got, np.float64) - right)
        assert np.all(error <= 2e-2 * (np.abs(right).max(initial=0) + 1)), error.max()


def test_six_kernels_and_one_saved_activation():
    layouts = make_layout("cyclic", 256, 512, 64, 0.5), make_layout("cyclic", 512, 256, 64, 0.5)
    operands = draw(*layouts, 8)
    tables = [layout.tables() for layout in layouts]
    with targeted_gpu():
        program = jax.make_jaxpr(value_and_gradients)(*operands, *tables)
        _, pullback = jax.eval_shape(
            lambda *o: jax.vjp(lambda *a: pallas_hopper.sparse_mlp(*a, *tables), *o), *operands[:4]
        )
    assert str(program).count("mpmd_map[") == 6
    saved_shapes = [array.shape for array in jax.tree.leaves(pullback)]
    assert saved_shapes.count((8, 512)) == 1


def test_an_illegal_block_is_refused():
    layouts = make_layout("cyclic", 64, 128, 16, 0.5), make_layout("cyclic", 128, 64, 16, 0.5)
    tables = [layout.tables() for layout in layouts]
    with pytest.raises(UserError, match="legal: 32, 64, 128, 256"), targeted_gpu():
        pallas_hopper.sparse_mlp(*draw(*layouts, 8)[:4], *tables)
