"""Text generation with a trained model.

Shapes are rounded up to a few buckets (`bucket`), so prompts of any number and length compile few
programs.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.evaluation.sampling import Sampler, Sampling
from sparse_dataflow.evaluation.stopping import StreamDecoder
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError

SMALLEST_BUCKET = 16
"""Tokens. Shorter prompts take about the same time."""

SECONDS_UNSEEN = 0.05
"""Most seconds of tokens that one program writes, if a token takes less."""


class Decoder(Protocol):
    """What decodes with parts of a model's weights elsewhere, such as in host memory."""

    def prefill(
        self, tokens_BxT: np.ndarray, lengths_B: np.ndarray, *, cache_tokens: int
    ) -> tuple[jax.Array, Sequence[kv_cache.LayerCache]]:
        """See `kv_cache.prefill`."""

    def decode_token(
        self,
        caches: Sequence[kv_cache.LayerCache],
        tokens_B: np.ndarray,
        positions_B: np.ndarray,
    ) -> tuple[jax.Array, Sequence[kv_cache.LayerCache]]:
        """See `kv_cache.decode_token`; rows with a full cache overwrite its end."""


@dataclass(frozen=True)
class Continuation:
    """Generated continuation of a prompt.

    Attributes:
      text: generated text without the stop string.
      tokens: generated tokens, including the stop string but not the token that ends a text.
      stopped_by: "stop" (a stop string), "end" (a token of `Tokenizer.ends`), "length"
        (max_new_tokens) or "context" (the context is full).
    """

    text: str
    tokens: list[int]
    stopped_by: str


def generate(
    model: Model,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float | None = 0.0,
    top_k: int | None = 0,
    top_p: float | None = 1.0,
    stop: Sequence[str] | None = (),
    seed: int | Sequence[int] | None = 0,
    on_token: Callable[[int, str], None] | None = None,
    weights: kv_cache.Weights | Decoder | None = None,
) -> list[Continuation]:
    """Continues all prompts in one batch.

    None is the default of `temperature`, `top_k`, `top_p`, `stop` and `seed`.

    Args:
      model: see `sd.init` and `sd.load`.
      prompts: strings, in front of which an imported tokenizer may put a begin of text, or lists of
        token ids; an empty prompt starts a new document.
      max_new_tokens: maximum tokens of each continuation, at least 1.
      temperature: divisor of the logits; 0 takes the most likely token.
      top_k: number of most likely tokens to draw among; 0 is all.
      top_p: total probability of the fewest most likely tokens to draw among, in (0, 1].
      stop: a string, or strings, that end a continuation; one may be or have the text of a special
        token.
      seed: sampling seed from 0 to 4,294,967,295; the same prompts and seed give the same text.
        With a seed for each prompt, a text does not depend on the other prompts of the batch.
      on_token: callback (prompt index, text) with newly generated text. Text is withheld until its
        characters are complete and it cannot become a stop string.
      weights: the model's parameters from `kv_cache.prepare`, or what decodes with parts of them
        elsewhere; None prepares them in each call.

    Raises:
      UserError: a prompt fills the model's context, or another value is not legal.

    Examples:
        >>> model = sd.init(sd.preset("pico").change(sparsity__block=16), jax.random.key(0))
        >>> [continuation] = sd.generate(model, ["def "], max_new_tokens=5)
        >>> len(continuation.tokens), continuation.stopped_by
        (5, 'length')
    """
    # A string is a sequence too: of its characters.
    if isinstance(prompts, str):
        raise UserError(f"prompts is one text ({prompts[:40]!r}); legal: a list of texts.")
    stop = [stop] if isinstance(stop, str) and stop else stop or ()
    if not all(stop):
        raise UserError("A stop string is empty; legal: strings of at least one character.")
    tokens = [_prompt_tokens(model.tokenizer, prompt) for prompt in prompts]
    decoders = [StreamDecoder(model.tokenizer, stop, before) for before in tokens]
    seed = tuple(seed) if isinstance(seed, Sequence) else seed or 0
    if isinstance(seed, tuple) and len(seed) != len(tokens):
        raise UserError(f"{len(seed)} seeds do not fit {len(tokens)} prompts; legal: one each.")
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampling = Sampling(**{n: v for n, v in options.items() if v is not None}, seed=seed)
    if weights is None:
        weights = kv_cache.prepare(model.model, model.params)
    # Text is decoded while tokens come: a stop string may end in the middle of a token, and the
    # stream ends once all rows have met theirs.
    stream = generate_tokens(
        model.model,
        weights,
        tokens,
        max_new_tokens,
        model.context,
        sampling,
        finished=lambda: all(decoder.stopped_by for decoder in decoders),
    )

    def report(index, text):
        if text and on_token is not None:
            on_token(index, text)

    for step in stream:
        for index, (decoder, token) in enumerate(zip(decoders, step)):
            if token is None:
                decoder.end("context")
            else:
                report(index, decoder.add(token))
    for index, decoder in enumerate(decoders):
        report(index, decoder.end("length"))
    return [Continuation(d.text, d.tokens, d.stopped_by) for d in decoders]


def _prompt_tokens(tokenizer, prompt):
    if isinstance(prompt, str):
        return tokenizer.encode_prompts([prompt])[0]
    return list(prompt) or [tokenizer.start_id]


def generate_tokens(
    config: ModelConfig,
    weights: kv_cache.Weights | Decoder,
    prompts: Sequence[Sequence[int]],
    count: int,
    context: int,
    sampling: Sampling | None = None,
    finished: Callable[[], bool] = lambda: False,
) -> Iterator[list[int | None]]:
    """Yields the next token of each prompt, step by step.

    Args:
      weights: weights from `kv_cache.prepare`, or what decodes with parts of them elsewhere.
      prompts: token ids, at least one per prompt.
      count: maximum number of steps.
      context: context length in tokens, including the prompt.
      sampling: sampling parameters; greedy decoding where None.
      finished: called before each step but the first; True stops the generation.

    Yields:
      One token per prompt; None where its context is full.

    Raises:
      UserError: a prompt is empty, has unknown tokens or fills the context.
    """
    check_prompts(prompts, config.vocab_size, context)
    if count < 1:
        raise UserError(f"max_new_tokens {count} is out of range; legal: 1 or more.")
    if not prompts:
        return
    sampling = sampling or Sampling()
    lengths = [len(prompt) for prompt in prompts]
    prefill: Callable[..., Any]
    if isinstance(weights, kv_cache.Weights):
        rows = bucket(len(prompts), smallest=1)
        prefill = functools.partial(kv_cache.program(kv_cache.prefill, config), config, weights)
    else:
        # No rows of padding, which would fetch experts of their own.
        rows, prefill = len(prompts), weights.prefill
    # Buckets: prompts of any length compile few programs.
    width = min(bucket(max(lengths)), context)
    cache_tokens = min(bucket(max(lengths) + count), context)
    tokens = np.zeros((rows, width), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    # Rows of padding have one token: the place of their last token must exist.
    positions = np.ones(rows, np.int32)
    positions[: len(prompts)] = lengths
    sampler = Sampler.of(sampling, rows)
    logits, caches = prefill(tokens, positions, cache_tokens=cache_tokens)
    first = np.asarray(sampler(logits, np.int32(0)))
    del logits
    rest = _following(config, weights, caches, first, positions, sampler, count)
    for step, next_tokens in enumerate(itertools.chain([first], rest)):
        full = [length + step >= context for length in lengths]
        yield [None if f else token for f, token in zip(full, next_tokens.tolist())]
        if step == count - 1 or all(full) or finished():
            return


def _following(config, weights, caches, tokens, positions, sampler, count):
    """Yields the tokens after the first, int32 [rows] each, `count` in all.

    A program writes as many as take about SECONDS_UNSEEN, so that dispatching it costs little and
    text still streams.
    """
    decode_tokens, most = kv_cache.program(kv_cache.decode_tokens, config), kv_cache.most_tokens()
    step, at_once = 0, 1
    while step < count - 1:
        start = time.perf_counter()
        if isinstance(weights, kv_cache.Weights):
            written, caches = decode_tokens(
                config,
                weights,
                caches,
                tokens,
                positions + np.int32(step),
                sampler,
                np.int32(step),
                np.int32(at_once),
                most=most,
            )
            written = np.asarray(written)[:at_once]
        else:
            logits, caches = weights.decode_token(caches, tokens, positions + np.int32(step))
            written = np.asarray(sampler(logits, np.int32(step + 1)))[None]
        # Half, so that twice as many tokens still take no longer than SECONDS_UNSEEN.
        faster = time.perf_counter() - start < SECONDS_UNSEEN / 2
        yield from written
        tokens, step = written[-1], step + len(written)
        at_once = min(2 * at_once if faster else at_once, most, count - 1 - step)


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int, context: int) -> None:
    """Checks that all prompts can be continued; messages number them from 1.

    Raises:
      UserError: a prompt is empty, has unknown tokens or fills the context.
    """
    for number, prompt in enumerate(prompts, 1):
        if not len(prompt):
            raise UserError(f"Prompt {number} has no tokens; legal: at least 1.")
        if len(prompt) >= context:
            raise UserError(
                f"Prompt {number} has {len(prompt)} tokens and leaves no room for a new token in "
                f"the context of {context}; legal: 1 to {context - 1}."
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UserError(
                f"Prompt {number} has token ids from {min(prompt)} to {max(prompt)}; "
                f"legal: 0 to {vocab_size - 1}."
            )


def bucket(count: int, smallest: int = SMALLEST_BUCKET) -> int:
    """Returns the smallest power of two times `smallest` that is at least `count`."""
    size = smallest
    while size < count:
        size *= 2
    return size
