"""The passes between a TPU's products move what they must: the norm, heads, and joined blocks."""

import functools

import jax
import jax.numpy as jnp
import pytest
from described_tpus import TOPOLOGIES, compiled, described, nightly

from sparse_dataflow.chips.tpu import heads
from sparse_dataflow.compile import hlo
from sparse_dataflow.core.layouts import patterns
from sparse_dataflow.core.ops.attention.attention_op import self_attention
from sparse_dataflow.core.ops.residual_norm.residual_norm_op import Norm, Operands, residual_norm

pytest.importorskip(
    "libtpu", reason="compiling for a TPU needs libtpu: pip install 'sparse_dataflow[aot]'"
)
pytestmark = pytest.mark.usefixtures("optimized")

TOKENS, WIDTH, HEADS, HEAD_WIDTH = 2048, 5120, 40, 128


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def moved(function, arguments, name):
    """Returns kernels of a function and its gradients."""

    def both(operands, cotangents):
        outputs, pull = jax.vjp(function, *operands)
        return outputs, pull(cotangents)

    return hlo.kernels(compiled(both, arguments, described(name)[0]).as_text())


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("width", [WIDTH, nightly(12288)])
def test_residual_and_norm_are_one_pass_each_way(name, width):
    wide, narrow = struct(4096, width), struct(width)
    operands = Operands(wide, wide, narrow, narrow, narrow)
    norm = Norm(True, 1e-5)
    kernels = moved(lambda o: residual_norm(norm, o), ((operands,), (wide, wide)), name)
    size = 2 * 4096 * width
    passes = {k.target: k.bytes for k in kernels if k.target.startswith("tpu:")}
    assert passes.keys() == {"tpu:residual_norm", "tpu:residual_norm_gradient"}
    assert all(moved <= 1.01 * 4 * size for moved in passes.values())


@pytest.mark.parametrize("name", ["v5p", nightly("v6e")])
def test_heads_are_split_in_fewer_bytes_than_by_their_definition(name):
    y, bias = struct(2, TOKENS, 3 * WIDTH), struct(3 * WIDTH)
    cotangent = struct(2, TOKENS, HEADS, HEAD_WIDTH)

    def tiled(y, bias):
        return self_attention(*heads.split(bias, y, 1, HEAD_WIDTH))

    def plain(y, bias):
        parts = (y + bias).reshape(2, TOKENS, HEADS, 3, HEAD_WIDTH)
        return self_attention(*jnp.moveaxis(parts, 3, 0))

    first, second = (
        sum(k.bytes for k in moved(split, ((y, bias), cotangent), name)) for split in (tiled, plain)
    )
    assert first < 0.85 * second


@pytest.mark.parametrize("name", ["v5p", nightly("v6e")])
def test_blocks_are_joined_in_one_copy(name):
    layout = patterns.make_layout("monarch", 5120, 20480, 128, 1 / 8)
    groups = layout.groups
    join = functools.partial(groups.join, in_blocks=40, out_blocks=160)
    values = struct(800, 128, 128)
    program = compiled(join, (values,), described(name)[0])
    kernels = [k for k in hlo.kernels(program.as_text()) if k.bytes > 1e6]
    assert sum(k.bytes for k in kernels) <= 1.01 * 2 * 2 * 800 * 128 * 128
