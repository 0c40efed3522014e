"""The fused sparse MLP's TPU kernels beyond the shared suite: tiles, what is fused, traffic."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from marks import some
from mlp_operands import assert_close, draw_operands, exact, irregular
from simulated import simulated_tpu, targeted_tpu

from sparse_dataflow.chips.tpu import mlp as pallas_tpu
from sparse_dataflow.chips.tpu import mlp_tuning as tuning
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops.sparse_mlp import mlp_op as api
from sparse_dataflow.core.ops.sparse_mlp.mlp_op import Operands
from sparse_dataflow.files.errors import UserError


def gradients(operands, dy, tables, tiles=None):
    """Return (y, gradients in the four operands) of the kernels."""
    run = lambda *o: api.sparse_mlp(*o, *tables, "pallas_tpu", tiles)  # noqa: E731
    y, pull = jax.vjp(run, *operands)
    return y, *pull(dy)


def tables_of(layouts):
    return [layout.tables() for layout in layouts]


def default_tuning(operands, tables):
    return pallas_tpu.default_tuning(Operands(*operands, *tables))


def small(tiles, **sizes):
    return dataclasses.replace(tiles, tokens=16, rows=16, lines=2, **sizes)


@pytest.mark.parametrize("buffers", some([1, 2], 2))
def test_many_tiles_over_two_cores(buffers):
    """Several token tiles, steps of result columns, and weight chunks."""
    layouts = irregular(128, seed=1)
    operands, dy = draw_operands(layouts, (50,), "float32")
    with simulated_tpu("TPU v5", 2):
        tables = tables_of(layouts)
        tiles = default_tuning(operands, tables)
        stream = tuning.StreamTiles(entries=1, ahead=3)
        tiles = dataclasses.replace(
            tiles,
            forward=small(tiles.forward, buffers=buffers, streams=(stream,) * 2),
            backward=small(tiles.backward, buffers=buffers, streams=(stream,) * 3),
        )
        actual = jax.jit(lambda o, dy: gradients(o, dy, tables, tiles))(operands, dy)
    assert_close(actual, exact(operands, dy, layouts), "float32")


@pytest.mark.slow
def test_a_backward_pass_of_single_products():
    """A chip with little VMEM runs these after a fused forward pass."""
    layouts = irregular(128, seed=2)
    operands, dy = draw_operands(layouts, (20,), "float32")
    with simulated_tpu():
        tables = tables_of(layouts)
        tiles = dataclasses.replace(default_tuning(operands, tables), backward=None)
        actual = jax.jit(lambda o, dy: gradients(o, dy, tables, tiles))(operands, dy)
    assert_close(actual, exact(operands, dy, layouts), "float32")


def structs(tokens, block, density, shape=(5120, 20480)):
    """Return the shapes of (x, values_in, bias, values_out) of GPT-13B's MLP, and its tables."""
    layouts = [make_layout("pixelfly", *s, block, density) for s in (shape, shape[::-1])]
    shapes = ((tokens, shape[0]), *((layout.nnz, block, block) for layout in layouts))
    x, first, second = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
    return (x, first, jax.ShapeDtypeStruct((shape[1],), jnp.float32), second), tables_of(layouts)


def chosen_at_13b(chip, block, density):
    with targeted_tpu(*chip):
        return default_tuning(*structs(2048, block, density))


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("chip", [("TPU v5 lite", 1), ("TPU v6 lite", 1), ("TPU v5", 2)])
def test_13b_is_fused_both_ways_where_vmem_is_large(chip, block):
    tiles = chosen_at_13b(chip, block, 1 / 8)
    assert tiles.forward.tokens >= 512 and tiles.backward.tokens >= 512


def test_16_mib_of_vmem_fuse_13b_only_where_it_saves_traffic():
    """VMEM of v4 fits 256 tokens of the hidden layer (10 MiB): each weight is read twice as often
    as by a single product, which is faster only for a sparse enough MLP."""
    sparse, half = (chosen_at_13b(("TPU v4", 2), 128, density) for density in (1 / 8, 1 / 2))
    assert sparse.forward.tokens == 256 and sparse.backward is None
    assert half.forward is None and half.backward is None


def test_the_forward_pass_never_writes_the_hidden_layer(array_sizes):
    operands, tables = structs(64, 128, 1 / 2, (256, 1024))
    hidden = 64 * 1024
    run = lambda *o: api.sparse_mlp(*o, *tables, implementation="pallas_tpu")  # noqa: E731
    with targeted_tpu():
        assert hidden not in array_sizes(run, *operands)
        assert hidden in array_sizes(jax.grad(lambda *o: run(*o).sum().astype(float)), *operands)
    with targeted_tpu():
        products = lambda *o: api.sparse_mlp(*o, *tables, implementation="products")  # noqa: E731
        assert hidden in array_sizes(products, *operands)


def test_illegal_blocks_are_refused():
    operands, tables = structs(8, 16, 1 / 2, (32, 64))
    with targeted_tpu(), pytest.raises(UserError, match="legal: 32, 64, 128, 256"):
        jax.eval_shape(lambda *o: api.sparse_mlp(*o, *tables, "pallas_tpu"), *operands)
