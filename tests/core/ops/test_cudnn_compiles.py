"""cuDNN attention compiles ahead of time for an H200, without materializing the scores.

XLA queries cuDNN's plans only on a GPU, so these tests cannot prove that cuDNN runs a shape.
"""

import functools

import described_gpus
import jax
import jax.numpy as jnp
import pytest
from simulated_hopper import targeted_gpu

from sparse_dataflow.core.ops.attention import dot_product
from sparse_dataflow.core.ops.attention.attention_op import self_attention

pytest.importorskip(
    "jax_cuda13_plugin", reason="compiling for a GPU needs 'sparse_dataflow[cuda]': make aot-gpu"
)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]


def gradients(query, key, value, dy):
    y, pullback = jax.vjp(self_attention, query, key, value)
    return y, *pullback(dy)


def test_cudnn_attention_compiles_without_materializing_the_scores():
    shape = (1, 2048, 40, 128)  # GPT-13B's.
    program = described_gpus.compiled(gradients, [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 4)
    text = program.as_text()
    assert "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text
    scores = 40 * 2048**2 * 2
    assert program.memory_analysis().temp_size_in_bytes < scores / 2


def test_cudnn_attention_of_documents_compiles_without_materializing_the_scores():
    tokens, heads, kv_heads = 8192, 32, 8

    def packed(query, key, value, documents):
        attend = functools.partial(self_attention, documents=documents)
        return jax.grad(lambda *a: attend(*a).astype(jnp.float32).sum(), (0, 1, 2))(
            query, key, value
        )

    shapes = [(1, tokens, n, 128) for n in (heads, kv_heads, kv_heads)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    documents = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    program = described_gpus.compiled(packed, [*operands, documents])
    assert "__cudnn$fmha" in program.as_text()
    # The mask in bfloat16 is 128 MiB; dense float32 scores are 8 GiB.
    assert program.memory_analysis().temp_size_in_bytes < 2**30


def test_a_mask_of_documents_that_is_too_large_is_refused():
    operand = jax.ShapeDtypeStruct((1, 65536, 2, 128), jnp.bfloat16)
    documents = jax.ShapeDtypeStruct((1, 65536), jnp.int32)
    with targeted_gpu():
        words = dot_product.cudnn_refusal(operand, operand, documents=documents)
    assert "mask of documents has 8.0 GiB" in words


@pytest.mark.parametrize(
    ("width", "dtype", "words"), [(300, "bfloat16", "head dim"), (128, "float32", "fp16")]
)
def test_operands_that_cudnn_refuses_compile_without_it(width, dtype, words):
    operand = jax.ShapeDtypeStruct((1, 256, 2, width), jnp.dtype(dtype))
    with targeted_gpu():
        assert words in dot_product.cudnn_refusal(operand, operand)
    assert "__cudnn$" not in described_gpus.compiled(gradients, [operand] * 4).as_text()
