"""Continues prompts with a trained model.

Shapes are rounded up to a few buckets (`bucket`), so that prompts of any length and number run in
a few programs.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.evaluation.sampling import Sampling, next_tokens
from sparse_dataflow.evaluation.stopping import Writer
from sparse_dataflow.evaluation.trained import Trained
from sparse_dataflow.files.errors import UserError

SMALLEST_BUCKET = 16
"""Tokens; shorter prompts cost about as much."""


@dataclass(frozen=True)
class Continuation:
    """What a model wrote after a prompt.

    Attributes:
      text: without the stop string.
      tokens: as generated, those of the stop string included, an end of text not.
      stopped_by: "stop" (a stop string), "end" (the end-of-text token), "length"
        (max_new_tokens) or "context" (the model sees no more).
    """

    text: str
    tokens: list[int]
    stopped_by: str


def generate(
    trained: Trained,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    on_token: Callable[[int, str], None] | None = None,
) -> list[Continuation]:
    """Continues all prompts in one batch.

    Args:
      trained: the model.
      prompts: token ids; an empty one begins a document.
      max_new_tokens: of each continuation, at least 1.
      temperature: see `Sampling`.
      top_k: likewise.
      top_p: likewise.
      stop: strings at whose first appearance a continuation ends.
      seed: of the draws; the same prompts with the same seed give the same text.
      on_token: told (number of the prompt, text) as soon as text is certain: characters are whole,
        and what might become a stop string is held back.

    Raises:
      UserError: a prompt leaves no room in the model's context, or another value is not legal.
    """
    if not all(stop):
        raise UserError("A stop string is empty; legal: strings of at least one character.")
    prompts = [list(prompt) or [trained.tokenizer.eot_id] for prompt in prompts]
    writers = [Writer(trained.tokenizer, stop) for _ in prompts]
    sampling = Sampling(temperature, top_k, top_p, seed)
    stream = new_tokens(
        trained.model,
        kv_cache.prepare(trained.model, trained.params, trained.tables),
        prompts,
        max_new_tokens,
        trained.context,
        sampling,
        finished=lambda: all(writer.stopped_by for writer in writers),
    )
    for tokens in stream:
        for number, (writer, token) in enumerate(zip(writers, tokens)):
            if token is None:
                writer.end("context")
            elif text := writer.add(token):
                _tell(on_token, number, text)
    for number, writer in enumerate(writers):
        if text := writer.end("length"):
            _tell(on_token, number, text)
    return [Continuation(w.text, w.tokens, w.stopped_by) for w in writers]


def _tell(on_token, number, text):
    if on_token is not None:
        on_token(number, text)


def new_tokens(
    config: ModelConfig,
    weights: kv_cache.Weights,
    prompts: Sequence[Sequence[int]],
    count: int,
    context: int,
    sampling: Sampling | None = None,
    finished: Callable[[], bool] = lambda: False,
) -> Iterator[list[int | None]]:
    """The tokens that follow each prompt, one a round.

    Args:
      config: the model.
      weights: of `kv_cache.prepare`.
      prompts: token ids, at least one each.
      count: rounds at most.
      context: tokens that the model sees at once, prompt included.
      sampling: the most likely token where None.
      finished: asked before each round but the first; True ends it.

    Yields:
      A token for each prompt; None where its context is full.

    Raises:
      UserError: a prompt of no or unknown tokens, or one that leaves no room in the context.
    """
    check_prompts(prompts, config.vocab_size, context)
    if count < 1:
        raise UserError(f"max_new_tokens {count} is not legal; legal: 1 or more.")
    if not prompts:
        return
    sampling = sampling or Sampling()
    lengths = [len(prompt) for prompt in prompts]
    rows = bucket(len(prompts), smallest=1)
    width = min(bucket(max(lengths)), context)
    cache_tokens = min(bucket(max(lengths) + count), context)
    tokens = np.zeros((rows, width), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    positions = np.ones(rows, np.int32)
    positions[: len(prompts)] = lengths
    choose = functools.partial(
        next_tokens,
        temperature=np.float32(sampling.temperature or 1),
        top_k=np.int32(sampling.top_k),
        top_p=np.float32(sampling.top_p),
        draws=sampling.draws,
        filters=sampling.filters,
    )
    keys = jax.random.split(jax.random.key(sampling.seed), rows)
    logits, caches = kv_cache.read_prompts(
        config, weights, tokens, positions, cache_tokens=cache_tokens
    )
    for number in range(count):
        chosen = choose(logits, _fold(keys, number))
        full = [length + number >= context for length in lengths]
        yield [None if past else token for past, token in zip(full, np.asarray(chosen).tolist())]
        if number == count - 1 or all(full) or finished():
            return
        logits, caches = _read_token(config, weights, caches, chosen, positions)
        positions = np.minimum(positions + 1, cache_tokens - 1)


_read_token = jax.jit(kv_cache.read_token, static_argnames="config", donate_argnames="caches")


@jax.jit
def _fold(keys, number):
    return jax.vmap(jax.random.fold_in, (0, None))(keys, jnp.asarray(number))


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int, context: int) -> None:
    """Refuses prompts that cannot be continued, with a UserError naming the first."""
    for number, prompt in enumerate(prompts, start=1):
        if not len(prompt):
            raise UserError(f"Prompt {number} has no tokens; legal: at least 1.")
        if len(prompt) >= context:
            raise UserError(
                f"Prompt {number} has {len(prompt)} tokens, and the model sees {context} at once; "
                f"legal: 1 to {context - 1}, which leaves room for one more."
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UserError(
                f"Prompt {number} has tokens from {min(prompt)} to {max(prompt)}; "
                f"legal: 0 to {vocab_size - 1}."
            )


def bucket(count: int, smallest: int = SMALLEST_BUCKET) -> int:
    """The smallest power of two times `smallest` that holds `count`."""
    size = smallest
    while size < count:
        size *= 2
    return size
