"""Cross-entropy of a tied output layer, a chunk of tokens at a time: the logits never exist whole.

The loss is linear in its cotangent, so the forward pass of a gradient already computes dx and dE
chunk by chunk while the logits are at hand; nothing is recomputed in the backward pass (the idea
of arXiv 2411.09009 and of Liger's fused linear cross-entropy, arXiv 2410.10989).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.kernels.cross_entropy import vocabulary

CHUNK = 512
"""Tokens whose logits are held at once."""


def token_scores(
    x: jax.Array, embedding: jax.Array, targets: jax.Array, axis: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of each target, in nats, and whether no token is likelier.

    Args:
      x: float [tokens, d_model], normalised hidden states.
      embedding: float [vocab, d_model], the tied output layer.
      targets: int32 [tokens].
      axis: of `shard_map`, where each of its members holds some rows of the embedding.

    Returns:
      float32 [tokens] and bool [tokens].
    """

    def chunk(x, targets):
        logits = _logits(x, embedding)
        rows = vocabulary.own_rows(targets, len(embedding), axis)
        target = vocabulary.at(logits, rows, axis)
        largest = vocabulary.largest(logits, axis)
        return vocabulary.logsumexp(logits, axis) - target, target >= largest

    losses, largest = zip(*(chunk(*c) for c in _chunks(x, targets)))
    return jnp.concatenate(losses), jnp.concatenate(largest)


def token_losses(
    x: jax.Array, embedding: jax.Array, targets: jax.Array, axis: str | None = None
) -> jax.Array:
    """The losses of `token_scores` alone, float32 [tokens]."""
    return token_scores(x, embedding, targets, axis)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def weighted_loss(
    x: jax.Array,
    embedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    axis: str | None = None,
) -> jax.Array:
    """Sum over tokens of weights * token_losses, float32 scalar; weights are float32 [tokens].

    Differentiable in x and embedding.  Over an axis every member has an equal share of the sum,
    and its dx is that of its own rows: the members' shares, and their dx, sum up.
    """
    return _share(jnp.sum(token_losses(x, embedding, targets, axis) * weights), axis)


def _share(total, axis):
    return total if axis is None else total / lax.axis_size(axis)


def _forward(x, embedding, targets, weights, axis):
    losses, dxs = [], []
    dembedding = jnp.zeros(embedding.shape, _wide(x.dtype))
    for xc, tc, wc in _chunks(x, targets, weights):
        logits = _logits(xc, embedding)
        lse = vocabulary.logsumexp(logits, axis)
        rows = vocabulary.own_rows(tc, len(embedding), axis)
        losses.append(jnp.sum((lse - vocabulary.at(logits, rows, axis)) * wc))
        hit = jnp.arange(len(embedding)) == rows[:, None]
        dlogits = ((jnp.exp(logits - lse[:, None]) - hit) * wc[:, None]).astype(x.dtype)
        dxs.append(jnp.matmul(dlogits, embedding))
        dembedding += lax.dot_general(
            dlogits, xc, (((0,), (0,)), ((), ())), preferred_element_type=_wide(x.dtype)
        )
    return _share(sum(losses), axis), (jnp.concatenate(dxs), dembedding.astype(embedding.dtype))


def _backward(axis, saved, cotangent):
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


def _chunks(*arrays):
    tokens = len(arrays[0])
    return [
        tuple(lax.slice_in_dim(a, start, min(start + CHUNK, tokens)) for a in arrays)
        for start in range(0, tokens, CHUNK)
    ]
