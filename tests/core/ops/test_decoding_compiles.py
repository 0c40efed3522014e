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
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.runs.run_config import SIZES

pytest.importorskip(
    "jax_cuda13_plugin", reason="compiling for a GPU needs 'sparse_dataflow[cuda]': make aot-gpu"
)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

DENSE = dataclasses.replace(SIZES["1.3b"], num_layers=2, compute_dtype="bfloat16")
CACHED = 256


@functools.cache
def compiled_tokens(pattern, batch, kind, layers=2):
    """Returns (HLO text of a loop over decoded tokens, number of its arguments)."""
    model = dataclasses.replace(DENSE, num_layers=layers)
    if pattern:
        model = model.with_linears(LinearSpec("block_sparse", pattern, 1 / 8, 128))
    layouts = stacks.stored_layouts(model)
    with topologies.tracing_for(topologies.gpu_devices(kind)[0]):
        weights = jax.eval_shape(
            lambda key: kv_cache.prepare(model, merged(gpt.init(model, key), layouts)),
            jax.random.key(0),
        )
    cache = jax.ShapeDtypeStruct((batch, model.kv_heads, CACHED, model.head_width), jnp.bfloat16)
    caches = (kv_cache.LayerCache(cache, cache),) * model.num_layers
    tokens, number = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch,), ()))

    def greedy(logits, step):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def decode(weights, caches, tokens, positions, count):
        arguments = caches, tokens, positions, greedy, 0, count
        return kv_cache.decode_tokens.__wrapped__(model, weights, *arguments, most=32)

    arguments = weights, caches, tokens, tokens, number
    text = described_gpus.compiled(decode, arguments, donated=(1,), kind=kind).as_text()
    return text, len(re.findall(r" parameter\(\d+\)", text[text.index("\nENTRY") :]))


def kernels_of_a_token(text):
    """Returns the kernels of the loop over tokens, and those outside of it that move a cache."""
    computations = hlo.read_computations(text)
    [loop] = [i for i in next(iter(computations.values())).values() if i.opcode == "while"]
    inside = computations[re.search(r"body=%([\w.\-]+)", loop.rest)[1]]
    kernels = hlo.kernels(text, counted=False)
    return [k for k in kernels if k.name in inside], [k for k in kernels if k.name not in inside]


@pytest.mark.parametrize("kind", ["a100", "h100"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("pattern", ["monarch", "butterfly"])
def test_a_token_has_no_more_kernels_than_that_of_the_dense_model(pattern, batch, kind):
    text, arguments = compiled_tokens(pattern, batch, kind)
    dense_text, dense_arguments = compiled_tokens("", batch, kind)
    kernels, dense_kernels = (kernels_of_a_token(t)[0] for t in (text, dense_text))
    assert len(kernels) <= len(dense_kernels) + 4
    if pattern == "monarch":
        assert arguments == dense_arguments


@pytest.mark.parametrize("pattern", ["monarch", "butterfly", ""])
def test_a_token_of_one_text_moves_the_weights_and_the_cache_once(pattern):
    """Bytes within a tenth of what must be read, in at most 13 kernels a layer."""
    texts = [compiled_tokens(pattern, 1, "h100", layers)[0] for layers in (2, 4)]
    shallow, deep = (kernels_of_a_token(text) for text in texts)
    in_layer = (sum(k.bytes for k in deep[0]) - sum(k.bytes for k in shallow[0])) / 2
    stored = 12 * DENSE.d_model**2 * (1 / 8 if pattern else 1) + 2 * CACHED * DENSE.d_model
    assert in_layer <= 1.1 * 2 * stored
    head = 2 * DENSE.vocab_size * DENSE.d_model
    assert sum(k.bytes for k in shallow[0]) - 2 * in_layer <= 1.01 * head
    assert (len(deep[0]) - len(shallow[0])) / 2 <= 13
    # Nothing turns the caches for the loop.
    assert all(kernel.bytes < CACHED * DENSE.d_model for kernel in deep[1])
