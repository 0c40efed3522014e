"""The next token from logits: the most likely one, or one drawn from those that are likely."""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from sparse_dataflow.files.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
      temperature: what logits are divided by; 0 takes the most likely token.
      top_k: draws among that many most likely tokens; 0 for all.
      top_p: draws among the fewest most likely tokens that together have this probability
        (arXiv 1904.09751, section 3.1); 1 for all.
      seed: of the draws.

    Raises:
      UserError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UserError(f"temperature {self.temperature} is not legal; legal: 0 or more.")
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k} is not legal; legal: 0 or more.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} is not legal; legal: above 0, up to 1.")

    @property
    def draws(self) -> bool:
        """Whether anything is drawn at all."""
        return self.temperature > 0

    @property
    def filters(self) -> bool:
        """Whether unlikely tokens are left out, which costs a sort of the vocabulary."""
        return self.draws and (self.top_k > 0 or self.top_p < 1)


@functools.partial(jax.jit, static_argnames=("draws", "filters"))
def next_tokens(
    logits_BxV: jax.Array,
    keys_B: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    draws: bool,
    filters: bool,
) -> jax.Array:
    """Int32 [B]: see `Sampling`; its numbers are data, so that others need no other program."""
    if not draws:
        return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
    logits_BxV = logits_BxV / temperature
    if not filters:
        return jax.vmap(jax.random.categorical)(keys_B, logits_BxV).astype(jnp.int32)
    order = jnp.argsort(-logits_BxV, axis=-1, stable=True)
    logits_BxV = jnp.take_along_axis(logits_BxV, order, axis=-1)
    rank = jnp.arange(logits_BxV.shape[-1])
    within = (rank < top_k) | (top_k == 0)
    logits_BxV = jnp.where(within, logits_BxV, -jnp.inf)
    chances = jax.nn.softmax(logits_BxV, axis=-1)
    before = jnp.cumsum(chances, axis=-1) - chances
    # The most likely token stays however small top_p is.
    logits_BxV = jnp.where((before < top_p) | (rank == 0), logits_BxV, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys_B, logits_BxV)
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)
