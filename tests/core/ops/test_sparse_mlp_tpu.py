"""The sparse MLP's TPU kernels by index tables beyond the shared suite: tiles, what is fused."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from mlp_operands import assert_close, draw_operands, exact, irregular
from simulated import simulated_tpu, targeted_tpu

from sparse_dataflow.chips.tpu.matmul import api as products
from sparse_dataflow.chips.tpu.matmul.tuning import StreamTiles
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops.sparse_mlp import mlp_op as api
from sparse_dataflow.files.errors import UserError


def gradients(operands, dy, tables, tiles=None):
    """Return (y, gradients in the four operands) of the kernels."""
    run = lambda *o: api.sparse_mlp(*o, *tables, "pallas_tpu", tiles)  # noqa: E731
    y, pull = jax.vjp(run, *operands)
    return y, *pull(dy)


def tables_of(layouts):
    return [layout.tables() for layout in layouts]


def small(x, values, tables, *, activated):
    """Tiles of a product that has several of them."""
    tiles = products.default_tuning(x, values, tables, activated=activated)
    sizes = {"tokens": 16, "rows": 16, "lines": 2, "stream": StreamTiles(entries=1, ahead=3)}
    sides = {
        name: dataclasses.replace(getattr(tiles, name), **sizes)
        for name in ("forward", "input_gradient")
    }
    return dataclasses.replace(tiles, **sides)


def test_many_tiles_over_two_cores():
    """Several token tiles, steps of result columns, and weight chunks."""
    layouts = irregular(128, seed=1)
    operands, dy = draw_operands(layouts, (50,), "float32")
    with simulated_tpu("TPU v5", 2):
        tables = tables_of(layouts)
        x, values_in, _, values_out = operands
        hidden = jax.ShapeDtypeStruct((50, layouts[0].out_features), jnp.float32)
        tiles = (
            small(x, values_in, tables[0], activated=True),
            small(hidden, values_out, tables[1], activated=False),
        )
        actual = jax.jit(lambda o, dy: gradients(o, dy, tables, tiles))(operands, dy)
    assert_close(actual, exact(operands, dy, layouts), "float32")


def structs(tokens, block, density, shape):
    """Return the shapes of (x, values_in, bias, values_out) of an MLP, and its tables."""
    layouts = [make_layout("pixelfly", *s, block, density) for s in (shape, shape[::-1])]
    shapes = ((tokens, shape[0]), *((layout.nnz, block, block) for layout in layouts))
    x, first, second = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
    return (x, first, jax.ShapeDtypeStruct((shape[1],), jnp.float32), second), tables_of(layouts)


def test_bias_and_activation_are_computed_in_the_product(array_sizes):
    """Of the forward pass the hidden layer is the only array of its size."""
    operands, tables = structs(64, 128, 1 / 2, (256, 1024))
    hidden = 64 * 1024
    count = {}
    for name in ("pallas_tpu", "products"):
        run = lambda *o, name=name: api.sparse_mlp(*o, *tables, implementation=name)  # noqa: E731
        with targeted_tpu():
            count[name] = list(array_sizes(run, *operands)).count(hidden)
    assert count["pallas_tpu"] < count["products"]


def test_illegal_blocks_are_refused():
    operands, tables = structs(8, 16, 1 / 2, (32, 64))
    with targeted_tpu(), pytest.raises(UserError, match="legal: 32, 64, 128, 256"):
        jax.eval_shape(lambda *o: api.sparse_mlp(*o, *tables, "pallas_tpu"), *operands)
