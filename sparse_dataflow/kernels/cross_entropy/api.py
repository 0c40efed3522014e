"""Cross-entropy of a tied output layer, a chunk of tokens at a time: the logits never exist whole.

The loss is linear in its cotangent, so the forward pass of a gradient already computes dx and dE
chunk by chunk while the logits are at hand; nothing is recomputed in the backward pass (the idea
of arXiv 2411.09009 and of Liger's fused linear cross-entropy, arXiv 2410.10989).
"""

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 512
"""Tokens whose logits are held at once."""


def token_scores(
    x: jax.Array, embedding: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of each target, in nats, and whether no token is likelier.

    Args:
      x: float [tokens, d_model], normalised hidden states.
      embedding: float [vocab, d_model], the tied output layer.
      targets: int32 [tokens].

    Returns:
      float32 [tokens] and bool [tokens].
    """

    def chunk(x, targets):
        logits = _logits(x, embedding)
        target = _at(logits, targets)
        return jax.nn.logsumexp(logits, axis=1) - target, target >= jnp.max(logits, axis=1)

    losses, largest = zip(*(chunk(*c) for c in _chunks(x, targets)))
    return jnp.concatenate(losses), jnp.concatenate(largest)


def token_losses(x: jax.Array, embedding: jax.Array, targets: jax.Array) -> jax.Array:
    """The losses of `token_scores` alone, float32 [tokens]."""
    return token_scores(x, embedding, targets)[0]


@jax.custom_vjp
def weighted_loss(
    x: jax.Array, embedding: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    """Sum over tokens of weights * token_losses, float32 scalar; weights are float32 [tokens].

    Differentiable in x and embedding.
    """
    return jnp.sum(token_losses(x, embedding, targets) * weights)


def _forward(x, embedding, targets, weights):
    losses, dxs = [], []
    dembedding = jnp.zeros(embedding.shape, _wide(x.dtype))
    for xc, tc, wc in _chunks(x, targets, weights):
        logits = _logits(xc, embedding)
        lse = jax.nn.logsumexp(logits, axis=1)
        losses.append(jnp.sum((lse - _at(logits, tc)) * wc))
        hit = jnp.arange(embedding.shape[0]) == tc[:, None]
        dlogits = ((jnp.exp(logits - lse[:, None]) - hit) * wc[:, None]).astype(x.dtype)
        dxs.append(jnp.matmul(dlogits, embedding))
        dembedding += lax.dot_general(
            dlogits, xc, (((0,), (0,)), ((), ())), preferred_element_type=_wide(x.dtype)
        )
    return sum(losses), (jnp.concatenate(dxs), dembedding.astype(embedding.dtype))


def _backward(saved, cotangent):
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


def _at(logits, targets):
    return jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]


def _chunks(*arrays):
    tokens = len(arrays[0])
    return [
        tuple(lax.slice_in_dim(a, start, min(start + CHUNK, tokens)) for a in arrays)
        for start in range(0, tokens, CHUNK)
    ]
