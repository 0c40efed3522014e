"""Cuts contexts and choices out of a document."""

import re
from collections.abc import Iterable, Sequence

import numpy as np

from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.tasks.items import Item

CHOICES = 4
"""Answers that a question offers."""

_ATTEMPTS = 400
_CHARACTERS_A_TOKEN = 16  # more than the mean of any text, so that enough of it is encoded


def words_before(text: str, end: int, tokenizer: Tokenizer, tokens: int) -> str:
    """The whole words before the place `end`, at most so many tokens of them."""
    start = max(0, end - _CHARACTERS_A_TOKEN * tokens)
    kept = text[start:end]
    ids = tokenizer.encode(kept)
    if len(ids) <= tokens and start == 0:
        return kept
    cut = int(tokenizer.token_bytes[ids[-tokens:]].sum())
    kept = kept.encode()[-cut:].decode(errors="ignore") if cut else ""
    space = re.search(r"\s", kept)
    return kept[space.end() :] if space else ""


def spaced(context: str, words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """(context, words) with a single space between them moved to the words, as tokens have it."""
    if context.endswith(" ") and not context[:-1].endswith((" ", "\n")):
        return context[:-1], tuple(f" {word}" for word in words)
    return context, tuple(words)


def shuffled(found: Iterable, rng: np.random.Generator) -> list:
    """In random order, and no more than a document is worth looking at."""
    found = list(found)
    return [found[i] for i in rng.permutation(len(found))[:_ATTEMPTS]]


def shuffled_choices(
    context: str, texts: Sequence[str], document: Document, rng: np.random.Generator
) -> Item:
    """An item whose right answer is the first of `texts`, which are put into random order."""
    order = rng.permutation(len(texts))
    choices = tuple(texts[i] for i in order)
    return Item(context, choices, int(np.argmin(order)), document.id)
