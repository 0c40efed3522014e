"""The tile sizes that kernels choose fit the chip at GPT-13B's shapes."""

import jax
import jax.numpy as jnp
import pytest
from simulated import targeted_tpu
from simulated_hopper import targeted_gpu

from sparse_dataflow.chips.hopper import api as pallas_hopper
from sparse_dataflow.chips.hopper import tuning as tuning_hopper
from sparse_dataflow.chips.tpu.matmul import api as pallas_tpu
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops.block_sparse_matmul import xla_tuning

PROJECTIONS = [(5120, 15360), (5120, 5120), (5120, 20480), (20480, 5120)]
PRODUCTS = ("forward", "input_gradient", "weight_gradient")


def shapes(layout, tokens, dtype=jnp.bfloat16):
    """Return (shape of x, shape of values, tables) of a layout."""
    x = jax.ShapeDtypeStruct((tokens, layout.in_features), dtype)
    values = jax.ShapeDtypeStruct((layout.nnz, layout.block, layout.block), dtype)
    return x, values, layout.tables()


def layouts(block):
    return [
        make_layout(name, *s, block, 1 / 8) for s in PROJECTIONS for name in ("monarch", "random")
    ]


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("tokens", [1, 300, 2048])
def test_tiles_of_a_tpu_fit_its_memory(tokens, block):
    with targeted_tpu("TPU v5 lite", 1):
        for layout in layouts(block):
            tiles = pallas_tpu.default_tuning(*shapes(layout, tokens))
            sides = {"forward": layout.in_features, "input_gradient": layout.out_features}
            for product, features in sides.items():
                each = getattr(tiles, product)
                resident_bytes = each.buffers * each.tokens * 2 * features
                assert resident_bytes <= 128 << 20 and each.tokens % each.rows == 0
            assert tiles.weight_gradient.tokens % 128 == 0


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("tokens", [1, 300, 2048])
def test_tiles_of_a_hopper_gpu_fit_its_shared_memory(tokens, block):
    with targeted_gpu():
        for layout in layouts(block):
            tiles = pallas_hopper.default_tuning(*shapes(layout, tokens))
            sizes = [tuning_hopper.gradient_bytes(tiles.weight_gradient, block)]
            for each in (tiles.forward, tiles.input_gradient):
                sizes.append(tuning_hopper.product_bytes(each, False))
            assert max(sizes) <= tuning_hopper.SHARED_BYTES


def test_the_tiles_of_13b_divide_the_tokens_of_a_gpu():
    layout = make_layout("random", 5120, 20480, 128, 1 / 8)
    with targeted_gpu("NVIDIA A100-SXM4-80GB", 108):
        tuning = xla_tuning.default_tuning(*shapes(layout, 8192))
    tokens = [getattr(tuning, product).tokens for product in PRODUCTS]
    assert tokens == [256, 256, 1024]
