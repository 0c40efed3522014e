"""cuDNN attention compiles ahead of time for an H200, without materializing the scores.

XLA queries cuDNN's plans only on a GPU, so these tests cannot prove that cuDNN runs a shape.
"""

import described_gpus
import jax
import jax.numpy as jnp
import pytest
from simulated_hopper import targeted_gpu

from sparse_dataflow.core.ops.attention import dot_product
from sparse_dataflow.core.ops.attention.attention_op import causal_attention

pytest.importorskip(
    "jax_cuda13_plugin", reason="compiling for a GPU needs 'sparse_dataflow[cuda]': make aot-gpu"
)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]


def gradients(query, key, value, dy):
    y, pullback = jax.vjp(causal_attention, query, key, value)
    return y, *pullback(dy)


def test_cudnn_attention_compiles_without_materializing_the_scores():
    shape = (1, 2048, 40, 128)  # GPT-13B's.
    program = described_gpus.compiled(gradients, [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 4)
    text = program.as_text()
    assert "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text
    scores = 40 * 2048**2 * 2
    assert program.memory_analysis().temp_size_in_bytes < scores / 2


@pytest.mark.parametrize(
    ("width", "dtype", "words"), [(300, "bfloat16", "head dim"), (128, "float32", "fp16")]
)
def test_operands_that_cudnn_refuses_compile_without_it(width, dtype, words):
    operand = jax.ShapeDtypeStruct((1, 256, 2, width), jnp.dtype(dtype))
    with targeted_gpu():
        assert words in dot_product.cudnn_refusal(operand, operand)
    assert "__cudnn$" not in described_gpus.compiled(gradients, [operand] * 4).as_text()
