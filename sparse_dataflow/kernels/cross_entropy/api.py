"""Cross-entropy of a tied output layer, a chunk of tokens at a time: the logits never exist whole.

The loss is linear in its cotangent, so the forward pass of a gradient already computes dx and dE
chunk by chunk while the logits are at hand; nothing is recomputed in the backward pass (the idea
of arXiv 2411.09009 and of Liger's fused linear cross-entropy, arXiv 2410.10989).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.kernels import dispatch
from sparse_dataflow.kernels.cross_entropy import vocabulary

CHUNK = 512
"""Tokens whose logits are held at once."""

UNROLL_CHUNKS = 4
"""Most chunks that a program for a CPU writes out."""


def token_scores(
    x: jax.Array,
    embedding: jax.Array,
    targets: jax.Array,
    axis: str | None = None,
    size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of each target, in nats, and whether no token is likelier.

    Args:
      x: float [tokens, d_model], normalised hidden states.
      embedding: float [vocab, d_model], the tied output layer.
      targets: int32 [tokens].
      axis: of `shard_map`, where each of its members holds some rows of the embedding.
      size: of the vocabulary, where the embedding has more rows.

    Returns:
      float32 [tokens] and bool [tokens].
    """

    def chunk(x, targets):
        logits = vocabulary.known(_logits(x, embedding), size, axis)
        rows = vocabulary.own_rows(targets, len(embedding), axis)
        target = vocabulary.at(logits, rows, axis)
        largest = vocabulary.largest(logits, axis)
        return vocabulary.logsumexp(logits, axis) - target, target >= largest

    _, found = _over_chunks(lambda carry, part: (carry, chunk(*part)), (), (x, targets))
    return found


def token_losses(
    x: jax.Array,
    embedding: jax.Array,
    targets: jax.Array,
    axis: str | None = None,
    size: int | None = None,
) -> jax.Array:
    """The losses of `token_scores` alone, float32 [tokens]."""
    return token_scores(x, embedding, targets, axis, size)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def weighted_loss(
    x: jax.Array,
    embedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    axis: str | None = None,
    size: int | None = None,
) -> jax.Array:
    """Sum over tokens of weights * token_losses, float32 scalar; weights are float32 [tokens].

    Differentiable in x and embedding.  Over an axis every member has an equal share of the sum,
    and its dx is that of its own rows: the members' shares, and their dx, sum up.
    """
    losses = token_losses(x, embedding, targets, axis, size)
    return _share(jnp.sum(losses * weights), axis)


def _share(total, axis):
    return total if axis is None else total / lax.axis_size(axis)


def _forward(x, embedding, targets, weights, axis, size):
    def chunk(total, part):
        loss, dembedding = total
        xc, tc, wc = part
        logits = vocabulary.known(_logits(xc, embedding), size, axis)
        lse = vocabulary.logsumexp(logits, axis)
        rows = vocabulary.own_rows(tc, len(embedding), axis)
        loss += jnp.sum((lse - vocabulary.at(logits, rows, axis)) * wc)
        hit = jnp.arange(len(embedding)) == rows[:, None]
        dlogits = ((jnp.exp(logits - lse[:, None]) - hit) * wc[:, None]).astype(x.dtype)
        dx = jnp.matmul(dlogits, embedding)
        dembedding += lax.dot_general(
            dlogits, xc, (((0,), (0,)), ((), ())), preferred_element_type=_wide(x.dtype)
        )
        return (loss, dembedding), dx

    wide = _wide(x.dtype)
    total = jnp.zeros((), jnp.promote_types(wide, weights.dtype)), jnp.zeros(embedding.shape, wide)
    (loss, dembedding), dx = _over_chunks(chunk, total, (x, targets, weights))
    return _share(loss, axis), (dx, dembedding.astype(embedding.dtype))


def _backward(axis, size, saved, cotangent):
    dx, dembedding = saved
    return (
        dx * cotangent.astype(dx.dtype),
        dembedding * cotangent.astype(dembedding.dtype),
        None,
        None,
    )


weighted_loss.defvjp(_forward, _backward)


def _wide(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def _logits(x, embedding):
    return lax.dot_general(
        x, embedding, (((1,), (1,)), ((), ())), preferred_element_type=_wide(x.dtype)
    )


def _over_chunks(step, carry, arrays):
    """(carry, results of all tokens) of `step(carry, chunk's arrays)`, one chunk after the other.

    Scanned but for a few chunks on a CPU: chunks written out may be computed side by side, and a
    GPU's compiler then holds a gradient of the whole embedding for each.
    """
    whole = len(arrays[0]) // CHUNK
    few = UNROLL_CHUNKS if dispatch.platform() == "cpu" else 1
    parts, start = [], 0
    if whole > few:
        start = whole * CHUNK
        stacked = tuple(a[:start].reshape(whole, CHUNK, *a.shape[1:]) for a in arrays)
        carry, found = lax.scan(step, carry, stacked)
        parts.append(jax.tree.map(lambda a: a.reshape(start, *a.shape[2:]), found))
    while start < len(arrays[0]):
        end = min(start + CHUNK, len(arrays[0]))
        carry, found = step(carry, tuple(a[start:end] for a in arrays))
        parts.append(found)
        start = end
    return carry, jax.tree.map(lambda *found: jnp.concatenate(found), *parts)
