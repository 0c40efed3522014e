"""A block of GPT-13B of equal groups compiles for GPUs into dense products and nothing else."""

import dataclasses
import functools
import re

import described_gpus
import jax
import jax.numpy as jnp
import pytest

from sparse_dataflow.compile import hlo
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.model import gpt, partition, stacks
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.runs.run_config import SIZES

pytest.importorskip(
    "jax_cuda13_plugin", reason="compiling for a GPU needs 'sparse_dataflow[cuda]': make aot-gpu"
)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

DENSE = dataclasses.replace(SIZES["13b"], num_layers=1, compute_dtype="bfloat16")
SPARSE = DENSE.with_linears(LinearSpec("block_sparse", "monarch", 1 / 8, 128))
TOKENS = (4, 2048)
WEIGHTS = 12 * DENSE.d_model**2


@functools.cache
def compiled_block(model, kind):
    """HLO text of a block's forward and backward pass, with float32 parameters."""
    params = jax.eval_shape(lambda: gpt.init_section(model, "block", jax.random.key(0)))
    stored = stacks.with_groups(stacks.stored_layouts(model))
    layouts = jax.tree.map(lambda table: table[0], stored["blocks"]) if stored else ()

    def gradients(params, x, dy):
        def block(params, x):
            return gpt.block(model, layer_weights(model, partition.merged(params, layouts)), x)[0]

        y, pullback = jax.vjp(block, params, x)
        return y, *pullback(dy)

    x = jax.ShapeDtypeStruct((*TOKENS, model.d_model), jnp.dtype(model.compute_dtype))
    return described_gpus.compiled(gradients, (params, x, x), kind=kind).as_text()


def products(text):
    entry = text[text.index("\nENTRY") :]
    return len(re.findall(r"%gemm_fusion\S* = |custom_call_target=\"__cublas", entry))


@pytest.mark.parametrize("kind", ["a100", "l4", "h100", "b200"])
def test_a_block_of_groups_is_twelve_products_without_gathers_or_copies(kind):
    text = compiled_block(SPARSE, kind)
    assert products(text) == products(compiled_block(DENSE, kind)) == 12
    entry = text[text.index("\nENTRY") :]
    assert not re.search(r" (gather|scatter|sort)\(", text)
    assert not re.search(r" (copy|transpose)\(", entry)


def test_a_block_of_groups_compiles_for_a_t4_in_float32():
    """Twelve products and those of attention, for which Turing has no fused kernel."""
    text = compiled_block(dataclasses.replace(SPARSE, compute_dtype="float32"), "t4")
    assert products(text) >= 12
    assert not re.search(r" (gather|scatter|sort)\(", text)


def traffic(text):
    """Returns the bytes that the kernels of a program read and write."""
    return sum(kernel.times * kernel.bytes for kernel in hlo.kernels(text))


@pytest.mark.parametrize("kind", ["a100", "h100"])
def test_a_block_of_groups_moves_at_most_a_tenth_more_than_it_needs(kind):
    """The dense block, less 7/8 of what its weights need: read in float32, written in bfloat16,
    read by two products, and a gradient in float32."""
    needed = traffic(compiled_block(DENSE, kind)) - 7 / 8 * WEIGHTS * (4 + 2 + 2 + 2 + 4)
    assert traffic(compiled_block(SPARSE, kind)) <= 1.1 * needed
