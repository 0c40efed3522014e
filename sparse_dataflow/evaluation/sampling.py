"""Next-token selection from logits: greedy, temperature, top-k and top-p sampling."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sparse_dataflow.evaluation.sampling_settings import SEEDS, SamplingSettings
from sparse_dataflow.files.errors import UserError


@dataclass(frozen=True)
class Sampling(SamplingSettings):
    """Sampling parameters.

    Attributes:
      seed: random seed of a batch, whose rows then differ, or one of each row.

    Raises:
      UserError: a value is not legal.
    """

    seed: int | tuple[int, ...] = 0

    def __post_init__(self):
        super().__post_init__()
        words, legal = SEEDS
        for seed in self.seed if isinstance(self.seed, tuple) else (self.seed,):
            if not legal(seed):
                raise UserError(f"seed={seed} is not legal: it must be {words}.")

    @property
    def stochastic(self) -> bool:
        """Whether tokens are sampled; False for greedy decoding."""
        return self.temperature > 0

    @property
    def filters(self) -> bool:
        """Whether top_k or top_p excludes tokens, which costs a sort of the vocabulary."""
        return self.stochastic and (self.top_k > 0 or self.top_p < 1)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys_B", "temperature", "top_k", "top_p"),
    meta_fields=("stochastic", "filters"),
)
@dataclass(frozen=True)
class Sampler:
    """Picks the next tokens of some rows; a pytree, of which programs trace the numbers.

    Attributes:
      keys_B: random key of each row.
      temperature: float32 []; see `Sampling`, also for the others.
      top_k: int32 [].
      top_p: float32 [].
    """

    keys_B: jax.Array
    temperature: ArrayLike
    top_k: ArrayLike
    top_p: ArrayLike
    stochastic: bool
    filters: bool

    @classmethod
    def of(cls, sampling: Sampling, rows: int) -> "Sampler":
        """Returns the sampler of a batch; rows without a seed of their own are padding."""
        return cls(
            row_keys(sampling.seed, rows),
            # A greedy sampler divides by nothing; 1 keeps the number finite.
            np.float32(sampling.temperature or 1),
            np.int32(sampling.top_k),
            np.float32(sampling.top_p),
            sampling.stochastic,
            sampling.filters,
        )

    @jax.jit
    def __call__(self, logits_BxV: jax.Array, step: jax.Array) -> jax.Array:
        """Returns int32 [B], the token of each row at a step, int32 []."""
        keys = self.keys_B
        if self.stochastic:
            # Folded with the step alone: a row draws the same in any batch and any split into
            # programs.
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, jnp.asarray(step))
        return sample_tokens(
            logits_BxV,
            keys,
            self.temperature,
            self.top_k,
            self.top_p,
            stochastic=self.stochastic,
            filters=self.filters,
        )

    def probabilities(self, logits_BxV: jax.Array) -> jax.Array:
        """Returns the float32 distribution [B, V] that tokens are drawn from."""
        size = logits_BxV.shape[-1]
        if not self.stochastic:
            return jax.nn.one_hot(jnp.argmax(logits_BxV, axis=-1), size)
        logits_BxV = logits_BxV / self.temperature
        if self.filters:
            ranked, order = _filtered(logits_BxV, self.top_k, self.top_p)
            # The inverse of the sort puts each logit back at its token.
            rank_of_token = jnp.argsort(order, axis=-1)
            logits_BxV = jnp.take_along_axis(ranked, rank_of_token, axis=-1)
        return jax.nn.softmax(logits_BxV, axis=-1)


def row_keys(seed: int | Sequence[int], rows: int) -> jax.Array:
    """Returns a random key of each row; rows without a seed of their own are padding.

    A key of Threefry is two words, here (row, seed), or (0, seed) where each row has a seed.
    """
    words = np.zeros((rows, 2), np.uint32)
    if isinstance(seed, int):
        words[:, 0], words[:, 1] = np.arange(rows), seed
    else:
        words[: len(seed), 1] = seed
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


@functools.partial(jax.jit, static_argnames=("stochastic", "filters"))
def sample_tokens(
    logits_BxV: jax.Array,
    keys_B: jax.Array,
    temperature: ArrayLike,
    top_k: ArrayLike,
    top_p: ArrayLike,
    *,
    stochastic: bool,
    filters: bool,
) -> jax.Array:
    """Returns the next tokens, int32 [B]; see `Sampling` for the parameters.

    Temperature, top_k and top_p are traced: changing them does not recompile.
    """
    if not stochastic:
        return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
    logits_BxV = logits_BxV / temperature
    if not filters:
        return jax.vmap(jax.random.categorical)(keys_B, logits_BxV).astype(jnp.int32)
    logits_BxV, order = _filtered(logits_BxV, top_k, top_p)
    # Drawn among ranks: the sorted logits need not be put back.
    ranks = jax.vmap(jax.random.categorical)(keys_B, logits_BxV)
    return jnp.take_along_axis(order, ranks[:, None], axis=-1)[:, 0].astype(jnp.int32)


def _filtered(logits_BxV, top_k, top_p):
    """Returns (logits from the largest on, -inf for excluded ones; their tokens)."""
    order = jnp.argsort(-logits_BxV, axis=-1, stable=True)
    logits_BxV = jnp.take_along_axis(logits_BxV, order, axis=-1)
    rank = jnp.arange(logits_BxV.shape[-1])
    in_top_k = (rank < top_k) | (top_k == 0)
    logits_BxV = jnp.where(in_top_k, logits_BxV, -jnp.inf)
    probabilities = jax.nn.softmax(logits_BxV, axis=-1)
    # A token stays while the likelier ones have less than top_p together (nucleus sampling, arXiv
    # 1904.09751).
    mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The most likely token stays for any top_p.
    # Sums round, so 1 is no bound of theirs but stands for all tokens.
    stays = (mass_before < top_p) | (rank == 0) | (top_p >= 1)
    return jnp.where(stays, logits_BxV, -jnp.inf), order
