"""Cross-entropy of a tied output layer, one chunk of tokens at a time, without the full logits.

The gradient is linear in the loss's cotangent.  So the forward pass computes dx and dE from each
chunk's logits, and the backward pass only scales them (arXiv 2411.09009; Liger's fused linear
cross-entropy, arXiv 2410.10989).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.core.config import logit_chunks
from sparse_dataflow.core.ops import derivatives, dispatch
from sparse_dataflow.core.ops.cross_entropy import vocabulary
from sparse_dataflow.core.ops.cross_entropy.vocabulary import Axis
from sparse_dataflow.core.ops.wide_sums import wide

UNROLL_CHUNKS = 4
"""Most chunks that are unrolled on a CPU."""


def token_scores(
    x: jax.Array,
    embedding: jax.Array,
    targets: jax.Array,
    axis: Axis | None = None,
    size: int | None = None,
    cap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Return each target's negative log-likelihood in nats, and whether it is a likeliest token.

    Args:
      x: float [tokens, d_model], normalised hidden states.
      embedding: float [vocab, d_model], the tied output layer.
      targets: int32 [tokens].
      axis: axes of `shard_map` over which the embedding's rows are sharded, or None.
      size: vocabulary size, if the embedding has padding rows after it.
      cap: soft cap of the logits, see `capped`.

    Returns:
      (float32 [tokens], bool [tokens]).
    """

    def chunk(x, targets):
        logits = capped(logits_of(x, embedding), cap)
        logits = vocabulary.mask_padding(logits, size, axis)
        rows = vocabulary.local_rows(targets, len(embedding), axis)
        target = vocabulary.at(logits, rows, axis)
        largest = vocabulary.largest(logits, axis)
        return vocabulary.logsumexp(logits, axis) - target, target >= largest

    _, results = over_chunks(
        lambda carry, chunk_arrays: (carry, chunk(*chunk_arrays)), (), (x, targets), len(embedding)
    )
    return results


def weighted_loss(
    x: jax.Array,
    embedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    axis: Axis | None = None,
    size: int | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """Return the sum over tokens of weights * the losses of `token_scores`, a float32 scalar.

    `weights` is float32 [tokens].  Differentiable in x and embedding.  Over an axis, every device
    returns an equal share of the sum, and dx of its own rows: sum both over the devices.
    """
    return _weighted_loss((axis, size, cap), x, embedding, targets, weights)


def _value(options, x, embedding, targets, weights):
    losses, _ = token_scores(x, embedding, targets, *options)
    return _share(jnp.sum(losses * weights), options[0])


def _share(total, axis):
    return total if axis is None else total / lax.axis_size(axis)


def _forward(options, x, embedding, targets, weights):
    axis, size, cap = options

    def chunk(x, targets, weights):
        within = capped(logits_of(x, embedding), cap)
        logits = vocabulary.mask_padding(within, size, axis)
        lse = vocabulary.logsumexp(logits, axis)
        rows = vocabulary.local_rows(targets, len(embedding), axis)
        loss = jnp.sum((lse - vocabulary.at(logits, rows, axis)) * weights)
        hit = jnp.arange(len(embedding)) == rows[:, None]
        dlogits = (jnp.exp(logits - lse[:, None]) - hit) * weights[:, None]
        return loss, dlogits * (1 - jnp.square(within / cap)) if cap else dlogits

    loss, gradients = loss_and_gradients(chunk, embedding, x, targets, weights)
    return _share(loss, axis), gradients


def _backward(_, gradients, cotangent):
    return *scaled(gradients, cotangent), None, None


_weighted_loss = derivatives.differentiable(_value, _backward, forward=_forward)


def loss_and_gradients(
    chunk: Callable,
    embedding: jax.Array,
    x: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *more: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return (loss, (dx, dembedding)), one chunk of tokens at a time.

    `chunk` maps a chunk's (x, targets, weights, *more) to its loss and the gradient of its logits.
    """
    dtype = wide(x.dtype)

    def step(total, arrays):
        loss, dembedding = total
        chunk_loss, dlogits = chunk(*arrays)
        dlogits = dlogits.astype(x.dtype)
        dembedding += lax.dot_general(
            dlogits, arrays[0], (((0,), (0,)), ((), ())), preferred_element_type=dtype
        )
        return (loss + chunk_loss, dembedding), jnp.matmul(dlogits, embedding)

    zero = jnp.zeros((), jnp.promote_types(dtype, weights.dtype))
    total = zero, jnp.zeros(embedding.shape, dtype)
    arrays = x, targets, weights, *more
    (loss, dembedding), dx = over_chunks(step, total, arrays, len(embedding))
    return loss, (dx, dembedding.astype(embedding.dtype))


def scaled(gradients: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, ...]:
    """Return the gradients of a loss times its cotangent."""
    return tuple(gradient * cotangent.astype(gradient.dtype) for gradient in gradients)


def logits_of(x: jax.Array, embedding: jax.Array) -> jax.Array:
    """Return the logits x Eᵀ: [tokens, d_model], [vocab, d_model] -> [tokens, vocab]."""
    return lax.dot_general(
        x, embedding, (((1,), (1,)), ((), ())), preferred_element_type=wide(x.dtype)
    )


def capped(logits: jax.Array, cap: float) -> jax.Array:
    """Return cap * tanh(logits / cap), or the logits for a cap of 0."""
    return cap * jnp.tanh(logits / cap) if cap else logits


def over_chunks(
    step: Callable, carry: Any, arrays: tuple[jax.Array, ...], vocabulary: int
) -> tuple[Any, Any]:
    """Scan `step(carry, chunk's arrays)` over chunks; return (carry, results of all tokens).

    A chunk has `chunk_tokens` of the vocabulary on this device.  Only a CPU unrolls (few) chunks:
    unrolled chunks may run concurrently, and a GPU's compiler then allocates one gradient of the
    whole embedding per chunk.
    """
    on_cpu = dispatch.platform() == "cpu"
    chunk = logit_chunks.CPU_TOKENS if on_cpu else int(logit_chunks.chunk_tokens(vocabulary))
    chunks = len(arrays[0]) // chunk
    max_unrolled = UNROLL_CHUNKS if on_cpu else 1
    results_by_chunk, start = [], 0
    if chunks > max_unrolled:
        start = chunks * chunk
        stacked = tuple(a[:start].reshape(chunks, chunk, *a.shape[1:]) for a in arrays)
        carry, results = lax.scan(step, carry, stacked)
        results_by_chunk.append(jax.tree.map(lambda a: a.reshape(start, *a.shape[2:]), results))
    while start < len(arrays[0]):
        end = min(start + chunk, len(arrays[0]))
        carry, results = step(carry, tuple(a[start:end] for a in arrays))
        results_by_chunk.append(results)
        start = end
    return carry, jax.tree.map(lambda *results: jnp.concatenate(results), *results_by_chunk)
