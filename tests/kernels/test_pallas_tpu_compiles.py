"""The TPU kernels pass the TPU compiler at GPT-13B's shapes, on a machine without a TPU."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from simulated import targeted_tpu

from sparse_dataflow.kernels.block_sparse_matmul import pallas_tpu
from sparse_dataflow.sparsity.patterns import make_layout

pytest.importorskip(
    "libtpu", reason="compiling for a TPU needs libtpu: pip install 'sparse_dataflow[tpu]'"
)
pytestmark = pytest.mark.slow

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
PROJECTIONS = {"qkv": (5120, 15360), "out": (5120, 5120), "in": (5120, 20480), "mlp": (20480, 5120)}
TOKENS, DENSITY = 4096, 1 / 8


@pytest.fixture(scope="module", params=list(TOPOLOGIES))
def device(request):
    """A device of a slice that is only described."""
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            if name not in os.environ:
                patch.setenv(name, value)
        name = TOPOLOGIES[request.param]
        yield topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]


def compiled(function, arguments, device):
    """`function` compiled for the device, given arguments with shapes and dtypes."""
    sharding = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    structs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
    )
    with targeted_tpu(device.device_kind, device.num_cores):
        return jax.jit(function).trace(*structs).lower(lowering_platforms=("tpu",)).compile()


def operands(layout, dtype):
    shapes = (
        (TOKENS, layout.in_features),
        (layout.nnz, layout.block, layout.block),
        (TOKENS, layout.out_features),
    )
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def products(x, values, dy, tables):
    """(y, dx, dvalues): three kernels."""
    y, pullback = jax.vjp(lambda x, v: pallas_tpu.block_sparse_matmul(x, v, tables), x, values)
    return y, *pullback(dy)


def fused(x, values, dy, tables, bias):
    """(y, dx, dvalues, dbias) of gelu(x W + bias) + x's residual."""
    y, pullback = jax.vjp(
        lambda x, v, b, r: pallas_tpu.block_sparse_matmul(
            x, v, tables, bias=b, activation="gelu", residual=r
        ),
        x,
        values,
        bias,
        dy,
    )
    return y, *pullback(dy)


def temporary_bytes(program):
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("block", [128, 64])
@pytest.mark.parametrize("projection", list(PROJECTIONS))
def test_all_three_products_compile_without_a_dense_temporary(device, projection, block):
    layout = make_layout("pixelfly", *PROJECTIONS[projection], block, DENSITY)
    program = compiled(products, [*operands(layout, jnp.bfloat16), layout.tables()], device)
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 3
    dense = layout.in_features * layout.out_features * 2
    # The compiler keeps 64-blocks without padding, and pads its copy for the kernels to 128 lanes.
    assert temporary_bytes(program) <= (dense / 2 if block < 128 else 2**20)


def test_the_fused_product_keeps_two_activations_and_nothing_else(device):
    layout = make_layout("pixelfly", *PROJECTIONS["in"], 128, DENSITY)
    bias = jax.ShapeDtypeStruct((layout.out_features,), jnp.float32)
    arguments = [*operands(layout, jnp.bfloat16), layout.tables(), bias]
    program = compiled(fused, arguments, device)
    preactivation = TOKENS * layout.out_features * 2
    assert temporary_bytes(program) <= 2 * preactivation + 2**20


@pytest.mark.parametrize(
    ("block", "dtype"), [(32, "bfloat16"), (256, "bfloat16"), (128, "float32")]
)
def test_other_blocks_and_dtypes_compile(device, block, dtype):
    layout = make_layout("pixelfly", *PROJECTIONS["out"], block, DENSITY if block < 256 else 1 / 10)
    compiled(products, [*operands(layout, jnp.dtype(dtype)), layout.tables()], device)


def test_accumulation_takes_the_accumulators_buffer(device):
    layout = make_layout("pixelfly", *PROJECTIONS["out"], 128, DENSITY)
    x, values, dy = operands(layout, jnp.bfloat16)
    accumulator = jax.ShapeDtypeStruct(values.shape, jnp.float32)

    def add(x, dy, tables, accumulator):
        return pallas_tpu.weight_gradient(x, dy, tables, accumulator=accumulator)

    def owned(*arguments):
        return jax.jit(add, donate_argnums=3)(*arguments)

    program = compiled(owned, [x, dy, layout.tables(), accumulator], device)
    assert temporary_bytes(program) <= accumulator.size * 4 + 2**20


def test_a_layout_that_is_known_compiles_too(device):
    layout = make_layout("random", *PROJECTIONS["out"], 64, DENSITY)
    tables = layout.tables()
    compiled(lambda *o: products(*o, tables), operands(layout, jnp.bfloat16), device)
