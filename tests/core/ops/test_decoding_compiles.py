"""A decoded token compiles for GPUs into as few arguments and kernels as that of a dense model."""

import dataclasses
import functools
import re

import described_gpus
import jax
import jax.numpy as jnp
import pytest

from sparse_dataflow.compile import hlo, topologies
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.stacks import ModelWeights
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.runs.run_config import SIZES

pytest.importorskip(
    "jax_cuda13_plugin", reason="compiling for a GPU needs 'sparse_dataflow[cuda]': make aot-gpu"
)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

DENSE = dataclasses.replace(SIZES["1.3b"], num_layers=2, compute_dtype="bfloat16")


@functools.cache
def compiled_token(pattern, batch, kind):
    """Returns (HLO text of one decoded token, number of its arguments)."""
    model = DENSE
    if pattern:
        model = DENSE.with_linears(LinearSpec("block_sparse", pattern, 1 / 8, 128))
    tables = stacks.layout_tables(model_layouts.layouts(model))
    with topologies.tracing_for(topologies.gpu_devices(kind)[0]):
        weights = jax.eval_shape(
            lambda key: kv_cache.prepare(model, ModelWeights(gpt.init(model, key), tables)),
            jax.random.key(0),
        )
    cache = jax.ShapeDtypeStruct((batch, model.kv_heads, 256, model.head_width), jnp.bfloat16)
    caches = (kv_cache.LayerCache(cache, cache),) * model.num_layers
    tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)
    decode = functools.partial(kv_cache.decode_token, model)
    arguments = weights, caches, tokens, tokens
    text = described_gpus.compiled(decode, arguments, donated=(1,), kind=kind).as_text()
    return text, len(re.findall(r" parameter\(\d+\)", text[text.index("\nENTRY") :]))


@pytest.mark.parametrize("kind", ["a100", "h100"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("pattern", ["monarch", "butterfly"])
def test_a_token_has_no_more_kernels_than_that_of_the_dense_model(pattern, batch, kind):
    text, arguments = compiled_token(pattern, batch, kind)
    dense_text, dense_arguments = compiled_token("", batch, kind)
    assert "custom-call" not in text
    assert len(hlo.kernels(text)) <= len(hlo.kernels(dense_text)) + 4
    if pattern == "monarch":
        assert arguments == dense_arguments


@pytest.mark.parametrize("pattern", ["monarch", "butterfly"])
def test_a_token_of_one_text_moves_the_stored_weights_once(pattern):
    moved = {
        name: sum(kernel.times * kernel.bytes for kernel in hlo.kernels(text))
        for name in (pattern, "")
        for text, _ in [compiled_token(name, 1, "h100")]
    }
    weights = 2 * DENSE.num_layers * 12 * DENSE.d_model**2
    assert moved[pattern] <= 1.05 * (moved[""] - 7 / 8 * weights)
