"""The grouped TPU kernels compile ahead of time for TPUs at GPT-13B's shapes."""

import jax
import jax.numpy as jnp
import pytest
from described_tpus import TOPOLOGIES, compiled, described, nightly

from sparse_dataflow.chips.tpu import grouped_mlp as mlp
from sparse_dataflow.chips.tpu.grouped_matmul import api as kernels
from sparse_dataflow.core.layouts.layout import Groups
from sparse_dataflow.core.layouts.patterns import make_layout

pytest.importorskip(
    "libtpu", reason="compiling for a TPU needs libtpu: pip install 'sparse_dataflow[aot]'"
)
pytestmark = pytest.mark.usefixtures("optimized")

PROJECTIONS = {"qkv": (5120, 15360), "out": (5120, 5120), "in": (5120, 20480), "mlp": (20480, 5120)}
BLOCK = 128
MIB = 2**20


@pytest.fixture(params=list(TOPOLOGIES))
def device(request):
    return described(request.param)[0]


def monarch(in_features, out_features, count):
    """Return the groups of the pattern `monarch`: weights that widen read at a stride."""
    inputs = 1 if in_features < out_features else in_features // BLOCK // count
    return Groups(count, inputs, out_features // BLOCK // count)


def operands(projection, count, dtype=jnp.bfloat16, tokens=2048):
    """Return the groups, and the shapes of (x, weight, dy, bias)."""
    inputs, outputs = PROJECTIONS[projection]
    shapes = (tokens, inputs), (count, inputs // count, outputs // count), (tokens, outputs)
    bias = jax.ShapeDtypeStruct((outputs,), jnp.float32)
    arrays = [*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), bias]
    return monarch(inputs, outputs, count), arrays


def products(groups, x, weight, dy):
    """Return (y, dx, dW): three kernels."""
    y, pullback = jax.vjp(lambda x, w: kernels.products(x, w, groups, block=BLOCK), x, weight)
    return y, *pullback(dy)


def kernels_in(program):
    return program.as_text().count('custom_call_target="tpu_custom_call"')


def temporary_bytes(program):
    return program.memory_analysis().temp_size_in_bytes


EVERY_SHAPE = [(projection, count) for projection in PROJECTIONS for count in (4, 8)]
EVERY_DAY = [("out", 8), ("mlp", 8)]


@pytest.mark.parametrize(
    ("projection", "count"),
    [*EVERY_DAY, *(nightly(*shape) for shape in EVERY_SHAPE if shape not in EVERY_DAY)],
)
def test_three_products_compile_without_a_temporary(device, projection, count):
    groups, arrays = operands(projection, count)
    program = compiled(lambda *o: products(groups, *o), arrays[:3], device)
    assert kernels_in(program) == 3
    assert temporary_bytes(program) <= MIB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tokens"), [("float32", 2048), ("bfloat16", 1999), nightly("float32", 5)]
)
def test_other_dtypes_and_token_counts_compile(device, dtype, tokens):
    groups, arrays = operands("out", 8, jnp.dtype(dtype), tokens)
    compiled(lambda *o: products(groups, *o), arrays[:3], device)


def mlp_gradients(groups, x, weight_in, bias, weight_out, dy):
    y, pullback = jax.vjp(
        lambda *o: mlp.grouped_mlp(*o, *groups, block=BLOCK), x, weight_in, bias, weight_out
    )
    return y, *pullback(dy)


@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e"])
@pytest.mark.parametrize(
    ("count", "dtype", "tokens"),
    [(8, "bfloat16", 2048), nightly(8, "bfloat16", 1999), nightly(20, "float32", 2048)],
)
def test_the_sparse_mlp_compiles(name, count, dtype, tokens):
    _, (x, weight_in, _, bias) = operands("in", count, jnp.dtype(dtype), tokens)
    _, (_, weight_out, dy, _) = operands("mlp", count, jnp.dtype(dtype), tokens)
    groups = Groups(count, 1, 160 // count), Groups(count, 160 // count, 40 // count)
    program = compiled(
        lambda *o: mlp_gradients(groups, *o),
        [x, weight_in, bias, weight_out, dy],
        described(name)[0],
    )
    assert kernels_in(program) == 2
    # The pre-activation; ragged tokens add padded copies.
    preactivation = tokens * 20480 * x.dtype.itemsize
    assert tokens % 16 or temporary_bytes(program) <= preactivation + MIB


def gated_gradients(groups, x, weight_in, weight_gate, weight_out, dy):
    y, pullback = jax.vjp(
        lambda x, into, gate, out: mlp.grouped_mlp(
            *(x, into, None, out, *groups), block=BLOCK, weight_gate=gate, activation="silu"
        ),
        *(x, weight_in, weight_gate, weight_out),
    )
    return y, *pullback(dy)


def gated_operands(tokens, d_model, d_ff, count):
    """Returns (groups of both layouts, shapes of the operands of `gated_gradients`)."""
    inputs, hidden = d_model // count, d_ff // count
    into, out = (count, inputs, hidden), (count, hidden, inputs)
    shapes = (tokens, d_model), into, into, out, (tokens, d_model)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    groups = [
        make_layout("monarch", *sides, BLOCK, 1 / count, 0, reads).groups
        for sides, reads in (((d_model, d_ff), True), ((d_ff, d_model), False))
    ]
    return groups, operands


def gated_program(name, *sizes):
    groups, operands = gated_operands(*sizes)
    return compiled(lambda *o: gated_gradients(groups, *o), operands, described(name)[0])


@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e"])
def test_the_gated_mlp_of_llama_3_8b_compiles(name):
    program = gated_program(name, 2048, 4096, 14336, 8)
    assert kernels_in(program) == 2
    # The two products into the hidden layer.
    assert temporary_bytes(program) <= 2 * 2048 * 14336 * 2 + MIB


def test_the_four_groups_of_llama_2_13b_do_not_fit_vmem():
    """Its 40 and 108 blocks have no more groups; a model then runs three products."""
    groups, operands = gated_operands(2048, 5120, 13824, 4)
    reasons = []

    def refused(x, weight_in, weight_gate, weight_out, dy):
        reasons.append(
            mlp.groups_refusal(x, weight_in, weight_out, *groups, block=BLOCK, gated=True)
        )
        return x

    compiled(refused, operands, described("v6e")[0])
    assert "do not fit VMEM; legal: more groups" in reasons[0]
