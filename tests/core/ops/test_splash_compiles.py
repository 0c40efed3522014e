"""Splash attention compiles ahead of time for TPUs at GPT-13B's shape."""

import functools

import jax
import jax.numpy as jnp
import pytest
from described_tpus import TOPOLOGIES, compiled, described, nightly

from sparse_dataflow.core.executors.context import zigzag
from sparse_dataflow.core.ops.attention.attention_op import self_attention, shard_attention
from sparse_dataflow.runs.run_config import SIZES

pytest.importorskip(
    "libtpu", reason="compiling for a TPU needs libtpu: pip install 'sparse_dataflow[aot]'"
)
pytestmark = pytest.mark.usefixtures("optimized")


def gradients(query, key, value, dy):
    y, pullback = jax.vjp(self_attention, query, key, value)
    return y, *pullback(dy)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "dtype"),
    [
        (2048, 40, 128, "bfloat16"),
        nightly(2048, 40, 128, "float32"),
        nightly(640, 16, 64, "bfloat16"),
        nightly(512, 8, 256, "bfloat16"),
    ],
)
def test_splash_attention_compiles_without_materializing_the_scores(
    name, tokens, heads, width, dtype
):
    shape = (1, tokens, heads, width)
    operands = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))] * 4
    program = compiled(gradients, operands, described(name)[0])
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 3
    # Transposed operands and row sums; the scores would be tokens / width times one array.
    array = tokens * heads * max(width, 128) * 4
    assert program.memory_analysis().temp_size_in_bytes <= 12 * array


def test_splash_attention_of_documents_compiles_without_materializing_the_scores():
    tokens, heads, kv_heads = 8192, 32, 8

    def packed(query, key, value, documents):
        attend = functools.partial(self_attention, window=4096, documents=documents)
        return jax.grad(lambda *a: attend(*a).astype(jnp.float32).sum(), (0, 1, 2))(
            query, key, value
        )

    shapes = [(1, tokens, n, 128) for n in (heads, kv_heads, kv_heads)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    documents = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    program = compiled(packed, [*operands, documents], described("v5p")[0])
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 3
    # Dense float32 scores are 8 GiB.
    assert program.memory_analysis().temp_size_in_bytes < 2**30


def test_splash_attention_of_a_shard_of_a_sequence_compiles():
    tokens, shards = 4096, 2
    order = zigzag(tokens, shards)

    def gradients_of_shard(query, key, value, shard):
        attend = lambda *a: shard_attention(*a, order, shard).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(attend, (0, 1, 2))(query, key, value)

    shapes = [(1, tokens // shards, 8, 128), (1, tokens, 2, 128), (1, tokens, 2, 128)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = compiled(
        gradients_of_shard, [*operands, jax.ShapeDtypeStruct((), jnp.int32)], described("v5p")[0]
    )
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 3


def test_the_shape_is_gpt_13bs():
    size = SIZES["13b"]
    assert (size.max_len, size.num_heads, size.d_model // size.num_heads) == (2048, 40, 128)


@pytest.mark.parametrize(("tokens", "width"), [(1000, 128), (2048, 512)])
def test_operands_that_splash_refuses_compile_without_it(tokens, width):
    operands = [jax.ShapeDtypeStruct((1, tokens, 2, width), jnp.bfloat16)] * 4
    program = compiled(gradients, operands, described("v5e")[0])
    assert "tpu_custom_call" not in program.as_text()
