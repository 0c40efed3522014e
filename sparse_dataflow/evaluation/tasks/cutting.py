"""Contexts and answer choices cut from documents."""

import re
from collections.abc import Iterable, Sequence

import numpy as np

from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.tasks.items import Item

CHOICES = 4
"""Number of answer choices of a question."""

_MAX_ATTEMPTS = 400  # candidates per document
_CHARACTERS_PER_TOKEN = 16  # above the mean of any text, so the encoded slice is long enough


def words_before(text: str, end: int, tokenizer: Tokenizer, tokens: int) -> str:
    """Returns the complete words of `text` before index `end`, at most `tokens` tokens."""
    start = max(0, end - _CHARACTERS_PER_TOKEN * tokens)
    words = text[start:end]
    ids = tokenizer.encode(words)
    if len(ids) <= tokens and start == 0:
        return words
    size = int(tokenizer.token_bytes[ids[-tokens:]].sum())
    words = words.encode()[-size:].decode(errors="ignore") if size else ""
    space = re.search(r"\s", words)
    return words[space.end() :] if space else ""


def move_space(context: str, words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Moves a single trailing space of the context to each word, since tokens start with it."""
    if context.endswith(" ") and not context[:-1].endswith((" ", "\n")):
        return context[:-1], tuple(f" {word}" for word in words)
    return context, tuple(words)


def shuffled(candidates: Iterable, rng: np.random.Generator) -> list:
    """Returns at most `_MAX_ATTEMPTS` of the candidates in random order."""
    candidates = list(candidates)
    return [candidates[i] for i in rng.permutation(len(candidates))[:_MAX_ATTEMPTS]]


def shuffled_choices(
    context: str, texts: Sequence[str], document: Document, rng: np.random.Generator
) -> Item:
    """Returns an item with the choices `texts` in random order; the first text is correct."""
    order = rng.permutation(len(texts))
    choices = tuple(texts[i] for i in order)
    return Item(context, choices, int(np.argmin(order)), document.id)
