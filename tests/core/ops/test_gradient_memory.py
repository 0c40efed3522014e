"""Temporaries of gradients on a CPU, by the compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparse_dataflow.chips.cpu import attention
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.model.shard import normalise
from sparse_dataflow.core.ops.cross_entropy import cross_entropy_op
from sparse_dataflow.core.ops.sparse_mlp.mlp_op import sparse_mlp


def temporaries(function, *shapes):
    """Bytes of the temporaries of the gradients of `function`, whose result is like its first
    operand."""

    def gradients(*operands):
        return jax.vjp(function, *operands)[1](operands[0])

    return jax.jit(gradients).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("rows", "width", "block", "density", "dtype"),
    [
        (1024, 256, 32, 1 / 4, "bfloat16"),
        (1024, 256, 32, 1 / 4, "float32"),
        (512, 512, 32, 1 / 8, "bfloat16"),
    ],
)
def test_one_group_of_an_mlp_has_its_products_in_float32(rows, width, block, density, dtype):
    layouts = [
        make_layout("monarch", *sides, block=block, density=density)
        for sides in ((width, 4 * width), (4 * width, width))
    ]
    stored = [(layout.nnz, block, block) for layout in layouts]
    shapes = (rows, width), stored[0], (4 * width,), stored[1]
    used = temporaries(
        lambda *operands: sparse_mlp(*operands, *(each.tables() for each in layouts)),
        *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes),
    )
    hidden = rows * 4 * width
    saved = hidden * jnp.dtype(dtype).itemsize
    assert used < saved + 4 * hidden


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 128, 4, 32), "bfloat16"), ((2, 128, 4, 32), "float32"), ((4, 128, 2, 64), "bfloat16")],
)
def test_attention_has_no_array_of_its_scale(shape, dtype):
    batch, tokens, heads, _ = shape
    mask = np.tril(np.ones((tokens, tokens), bool))[None, None]
    like = jax.ShapeDtypeStruct(shape, dtype)
    used = temporaries(lambda *qkv: attention.attention(*qkv, mask), like, like, like)
    assert used < 3 * 4 * batch * heads * tokens**2


@pytest.mark.parametrize(
    ("rows", "width", "vocabulary"), [(512, 256, 768), (256, 512, 1536), (512, 512, 1024)]
)
def test_the_norm_before_a_loss_waits_for_the_output_layers_gradient(rows, width, vocabulary):
    norm = nnx.LayerNorm(width, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    targets, weights = np.zeros(rows, np.int32), np.ones(rows, np.float32)

    def gradients(x, output):
        def loss(x, output):
            x = normalise(norm, x)
            return cross_entropy_op.weighted_loss(x, output, targets, weights, None, None, 0.0)

        return jax.grad(loss, (0, 1))(x, output)

    shapes = [jax.ShapeDtypeStruct((each, width), jnp.bfloat16) for each in (rows, vocabulary)]
    used = jax.jit(gradients).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    # The logits in float32 with their gradient, or the gradient of the output layer in float32.
    assert used < 1.05 * max(6 * rows * vocabulary, 4 * vocabulary * width) + 2.1 * rows * width
