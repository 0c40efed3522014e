"""The TPU kernels compile ahead of time for TPUs at GPT-13B's shapes.

Compilation fails if a kernel does not fit VMEM or scalar memory, or cannot be lowered.  The nightly
tests compile the remaining shapes.
"""

import jax
import jax.numpy as jnp
import pytest
from described_tpus import TOPOLOGIES, compiled, described, nightly

from sparse_dataflow.chips.tpu import mlp
from sparse_dataflow.chips.tpu.matmul import api as pallas_tpu
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops.sparse_mlp.mlp_op import Operands

pytest.importorskip(
    "libtpu", reason="compiling for a TPU needs libtpu: pip install 'sparse_dataflow[aot]'"
)
pytestmark = pytest.mark.usefixtures("optimized")

PROJECTIONS = {"qkv": (5120, 15360), "out": (5120, 5120), "in": (5120, 20480), "mlp": (20480, 5120)}
TOKENS = 2048
DENSITIES = {"1/2": 1 / 2, "1/8": 1 / 8, "3/40": 3 / 40}
MIB = 2**20


@pytest.fixture(params=list(TOPOLOGIES))
def device(request):
    return described(request.param)[0]


def operands(layout, dtype=jnp.bfloat16, tokens=TOKENS):
    """Return the shapes of (x, values, dy, bias)."""
    shapes = (
        (tokens, layout.in_features),
        (layout.nnz, layout.block, layout.block),
        (tokens, layout.out_features),
    )
    bias = jax.ShapeDtypeStruct((layout.out_features,), jnp.float32)
    return *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), bias


def products(x, values, dy, tables):
    """Return (y, dx, dvalues): three kernels."""
    y, pullback = jax.vjp(lambda x, v: pallas_tpu.block_sparse_matmul(x, v, tables), x, values)
    return y, *pullback(dy)


def fused(x, values, dy, bias, tables):
    """Return (y, dx, dvalues, dbias) of gelu(x W + bias)."""
    y, pullback = jax.vjp(
        lambda x, v, b: pallas_tpu.block_sparse_matmul(x, v, tables, bias=b, activation="gelu"),
        x,
        values,
        bias,
    )
    return y, *pullback(dy)


def kernels_in(program):
    return program.as_text().count('custom_call_target="tpu_custom_call"')


def temporary_bytes(program):
    return program.memory_analysis().temp_size_in_bytes


def padded_copies(layout):
    """Return the bytes that XLA may copy of a weight.

    XLA stores blocks of 64 without padding.  For the kernels it copies values and dW padded to 128
    lanes.  Tile tables take a little too.
    """
    return 8 * layout.nnz * layout.block**2 + 8 * MIB if layout.block < 128 else 0


EVERY_DAY = [("out", 64, "1/8"), ("in", 128, "1/8"), ("mlp", 128, "1/2")]
EVERY_SHAPE = [
    (projection, block, density)
    for projection in PROJECTIONS
    for block, densities in ((64, ("1/2", "1/8")), (128, ("1/2", "1/8", "3/40")))
    for density in densities
]
SHAPES = [*EVERY_DAY, *(nightly(*shape) for shape in EVERY_SHAPE if shape not in EVERY_DAY)]


@pytest.mark.parametrize(("projection", "block", "density"), SHAPES)
def test_three_products_compile_without_a_dense_temporary(device, projection, block, density):
    layout = make_layout("pixelfly", *PROJECTIONS[projection], block, DENSITIES[density])
    x, values, dy, _ = operands(layout)
    program = compiled(products, [x, values, dy, layout.tables()], device)
    assert kernels_in(program) == 3
    assert temporary_bytes(program) <= padded_copies(layout) + 2 * MIB


@pytest.mark.parametrize(
    ("projection", "block", "density"),
    [("in", 128, "1/8"), nightly("in", 64, "1/8"), nightly("in", 128, "1/2")],
)
def test_the_fused_product_saves_only_two_activations(device, projection, block, density):
    layout = make_layout("pixelfly", *PROJECTIONS[projection], block, DENSITIES[density])
    program = compiled(fused, [*operands(layout), layout.tables()], device)
    assert kernels_in(program) == 3
    preactivation = TOKENS * layout.out_features * 2
    assert temporary_bytes(program) <= 2 * preactivation + padded_copies(layout) + 2 * MIB


@pytest.mark.nightly
@pytest.mark.parametrize("projection", list(PROJECTIONS))
def test_every_projection_compiles_fused(device, projection):
    for block in (64, 128):
        layout = make_layout("pixelfly", *PROJECTIONS[projection], block, 1 / 2)
        compiled(fused, [*operands(layout), layout.tables()], device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "dtype", "tokens"),
    [
        (128, "float32", 2048),
        (128, "bfloat16", 1999),
        nightly(32, "bfloat16", 2048),
        nightly(256, "bfloat16", 2048),
        nightly(64, "float32", 5),
    ],
)
def test_other_blocks_dtypes_and_token_counts_compile(device, block, dtype, tokens):
    density = 1 / 10 if block == 256 else 1 / 8
    layout = make_layout("pixelfly", *PROJECTIONS["out"], block, density)
    compiled(fused, [*operands(layout, jnp.dtype(dtype), tokens), layout.tables()], device)


@pytest.mark.parametrize("name", ["v4", *map(nightly, ("v5e", "v5p", "v6e"))])
def test_concrete_tables_compile(name):
    layout = make_layout("random", *PROJECTIONS["out"], 64, 1 / 8)
    tables = layout.tables()
    compiled(lambda *o: products(*o, tables), operands(layout)[:3], described(name)[0])


def mlp_gradients(x, values_in, bias, values_out, dy, tables_in, tables_out):
    y, pullback = jax.vjp(
        lambda *o: mlp.run_sparse_mlp(Operands(*o, tables_in, tables_out)),
        x,
        values_in,
        bias,
        values_out,
    )
    return y, *pullback(dy)


@pytest.mark.parametrize(
    ("block", "dtype", "tokens", "density"),
    [
        (128, "bfloat16", 2048, "1/8"),
        nightly(64, "bfloat16", 2048, "1/8"),
        nightly(64, "bfloat16", 2048, "1/2"),
        nightly(128, "bfloat16", 2048, "1/2"),
        nightly(128, "bfloat16", 1999, "3/40"),
        nightly(128, "float32", 2048, "1/8"),
    ],
)
def test_the_sparse_mlp_compiles(device, block, dtype, tokens, density):
    first, second = (
        make_layout("pixelfly", *PROJECTIONS[name], block, DENSITIES[density])
        for name in ("in", "mlp")
    )
    x, values_in, _, bias = operands(first, jnp.dtype(dtype), tokens)
    _, values_out, dy, _ = operands(second, jnp.dtype(dtype), tokens)
    arguments = [x, values_in, bias, values_out, dy, first.tables(), second.tables()]
    program = compiled(mlp_gradients, arguments, device)
    # The activation and its derivative are in epilogues: no kernel but the six products.
    assert kernels_in(program) == 6
    # The hidden layer, its pre-activation, and their gradients; ragged tokens are padded.
    hidden = 4 * tokens * first.out_features * x.dtype.itemsize
    copies = padded_copies(first) + padded_copies(second) + 2 * MIB
    assert tokens % 16 or temporary_bytes(program) <= hidden + copies
