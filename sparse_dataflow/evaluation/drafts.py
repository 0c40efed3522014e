"""Speculative decoding: a small model drafts tokens, and the model accepts some of them.

A round drafts a few tokens one by one, then the model reads all of them at once.  A draft d is
accepted with probability min(1, p(d) / q(d)), where p and q are its probabilities with the model
and with the drafting model.  After the first draft that is not, the next token is drawn from the
rest, max(0, p - q); after the last one, from p.  So texts have the distribution of the model alone
(arXiv 2211.17192, theorem 3.5), and greedy texts are its texts, but where two logits are equal to
rounding.

Caches need no correction: tokens that were not accepted are overwritten, and nothing sees them.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.evaluation.kv_cache import LayerCache, Weights
from sparse_dataflow.evaluation.sampling import Sampler
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError

_DRAFT, _ACCEPT, _REST = range(3)
"""Uses of the random key of a token."""


@dataclasses.dataclass
class Draft:
    """A model that drafts, and how many of its tokens were accepted.

    Attributes:
      weights: its weights from `kv_cache.prepare`.
      tokens: drafts of a round, at least 1.
      drafted: drafts so far, over all texts.
      accepted: accepted ones among them.
    """

    config: ModelConfig
    weights: Weights
    tokens: int = 4
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, model: Model, target: Model, tokens: int = 4) -> "Draft":
        """Returns a model as the draft of another.

        Args:
          model: the model that drafts.
          target: the model whose texts are written.
          tokens: drafts of a round.

        Raises:
          UserError: the models have different tokens, or the context of the draft is shorter, or a
            round is longer than a context.
        """
        if model.tokenizer.content_hash != target.tokenizer.content_hash:
            raise UserError(
                f"The draft {model.folder} has another tokenizer than {target.folder}; legal: a "
                "model with the same vocabulary, such as the sparse twin of a dense model."
            )
        if model.context < target.context:
            raise UserError(
                f"The draft {model.folder} has a context of {model.context} tokens; legal: "
                f"{target.context} or more, the context of {target.folder}."
            )
        if tokens >= target.context:
            raise UserError(
                f"{tokens} tokens drafted at a time do not fit into the context of "
                f"{target.folder}; legal: 1 to {target.context - 1}."
            )
        return cls(model.model, kv_cache.prepare(model.model, model.weights), tokens)


def following(
    config: ModelConfig,
    weights: Weights,
    caches: Sequence[LayerCache],
    draft: Draft,
    draft_caches: Sequence[LayerCache],
    previous: np.ndarray,
    first: np.ndarray,
    positions: np.ndarray,
    sampler: Sampler,
    texts: int,
) -> Iterator[np.ndarray]:
    """Yields the tokens after the first of each row, int32 [rows], without end.

    Args:
      caches: its caches of the prompts, which are donated.
      draft: the model that drafts.
      draft_caches: its caches of the prompts, which are donated.
      previous: int32 [rows], last token of each prompt.
      first: int32 [rows], first new token of each row.
      positions: int32 [rows], tokens of each prompt.
      sampler: picks tokens.
      texts: number of rows that are no padding.
    """
    rows, tokens, number = np.arange(len(first)), first, np.ones_like(positions)
    written: list[list[int]] = [[] for _ in first]
    step = 0
    while True:
        at, drafts, chances = positions + number - 1, [], []
        # The cache of the draft may lack the token before the last: the last draft of a round.
        last, begins = np.stack([previous, tokens], 1), at - 1
        for i in range(draft.tokens):
            drawn, chance, draft_caches = _draft_token(
                draft.config, draft.weights, draft_caches, last, begins, sampler, number + i
            )
            drafts.append(drawn)
            chances.append(chance)
            last, begins = drawn[:, None], at + i + 1
        new, count, caches = _accept(
            config, weights, caches, tokens, drafts, chances, at, sampler, number
        )
        new, count = np.asarray(new), np.asarray(count)
        for row, text in enumerate(written):
            text += new[row, : count[row] + 1].tolist()
        previous = np.where(count > 0, new[rows, count - 1], tokens)
        tokens, number = new[rows, count], number + count + 1
        draft.drafted += texts * draft.tokens
        draft.accepted += int(count[:texts].sum())
        while step < min(map(len, written)):
            yield np.array([text[step] for text in written], np.int32)
            step += 1


@functools.partial(jax.jit, static_argnames="config", donate_argnames="caches")
def _draft_token(config, weights, caches, tokens_BxT, positions_B, sampler, number_B):
    """Returns (int32 [B] drafts after the tokens, their distribution [B, V], caches)."""
    logits, caches = kv_cache.decode_text(config, weights, caches, tokens_BxT, positions_B)
    chances = sampler.probabilities(logits[:, -1])
    return _drawn(_keys(sampler, number_B, _DRAFT), chances), chances, caches


@functools.partial(jax.jit, static_argnames="config", donate_argnames="caches")
def _accept(config, weights, caches, tokens_B, drafts, chances, positions_B, sampler, number_B):
    """Returns (int32 [B, drafts + 1], accepted drafts and the token after them; how many drafts
    were accepted, int32 [B]; caches)."""
    drafts_BxK, q_BxKxV = jnp.stack(drafts, 1), jnp.stack(chances, 1)
    tokens_BxT = jnp.concatenate([tokens_B[:, None], drafts_BxK], 1)
    logits, caches = kv_cache.decode_text(config, weights, caches, tokens_BxT, positions_B)
    p_BxTxV = jax.vmap(sampler.probabilities, 1, 1)(logits)
    K = drafts_BxK.shape[1]

    def chance(probabilities):
        return jnp.take_along_axis(probabilities[:, :K], drafts_BxK[..., None], 2)[..., 0]

    # The next round uses the keys of drafts after the first rejected one again.  That is sound: the
    # tokens so far do not depend on those drafts.
    uniform = [_uniform(_keys(sampler, number_B + i, _ACCEPT)) for i in range(K)]
    # u q < p is u < p / q without a division.  With p = 0 it rejects even u = 0.
    accepted = jnp.stack(uniform, 1) * chance(q_BxKxV) < chance(p_BxTxV)
    count_B = jnp.sum(jnp.cumprod(accepted, 1), 1).astype(jnp.int32)
    # No draft has a chance after the last.
    q_BxTxV = jnp.pad(q_BxKxV, [(0, 0), (0, 1), (0, 0)])
    at = count_B[:, None, None]
    p_BxV, q_BxV = (jnp.take_along_axis(each, at, 1)[:, 0] for each in (p_BxTxV, q_BxTxV))
    rest = jnp.maximum(p_BxV - q_BxV, 0)
    # Where p = q no draft is rejected, but by rounding.  The rest is then zero everywhere.
    rest = jnp.where(jnp.sum(rest, 1, keepdims=True) > 0, rest, p_BxV)
    token_B = _drawn(_keys(sampler, number_B + count_B, _REST), rest)
    new = jnp.pad(drafts_BxK, [(0, 0), (0, 1)])
    return jnp.where(jnp.arange(K + 1) == count_B[:, None], token_B[:, None], new), count_B, caches


def _keys(sampler, number_B, use):
    """Returns the key of each row for a use, at the number of its token."""
    keys = jax.vmap(jax.random.fold_in)(sampler.keys_B, number_B)
    return jax.vmap(jax.random.fold_in, (0, None))(keys, use)


def _uniform(keys_B):
    return jax.vmap(jax.random.uniform)(keys_B)


def _drawn(keys_B, chances_BxV):
    """Returns a token of each row, int32 [B]; chances need not sum to 1."""
    return jax.vmap(jax.random.categorical)(keys_B, jnp.log(chances_BxV)).astype(jnp.int32)
