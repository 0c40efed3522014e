"""Tasks that any text gives: its last word, how it goes on, which word is missing.

All lengths are in the run's own tokens, so that a question and some examples fit its context.
"""

import bisect
import collections
import math
import re
from collections.abc import Iterable, Iterator

import numpy as np

from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.tasks.cutting import (
    CHOICES,
    shuffled,
    shuffled_choices,
    spaced,
    words_before,
)
from sparse_dataflow.evaluation.tasks.items import Builder, Item

_WORD = re.compile(r"[^\W\d_]\w{3,}")
_NEAR = 24  # words of nearest frequency that distractors are drawn from
_CONTINUATION_SHARE = 3  # of the tokens of an item, one part in so many is the continuation
_SHORTEST = 4  # tokens of a continuation


def last_word(tokenizer: Tokenizer, tokens: int) -> Builder:
    """Items whose answer is a word that the context has already used, as in LAMBADA
    (arXiv 1606.06031); no choices are given."""

    def build(document: Document, rng: np.random.Generator) -> Iterator[Item]:
        for match in shuffled(_WORD.finditer(document.text), rng):
            context = words_before(document.text, match.start(), tokenizer, tokens)
            if re.search(rf"\b{re.escape(match[0])}\b", context):
                yield Item(*spaced(context, [match[0]]), 0, document.id)

    return build


def continuation(tokenizer: Tokenizer, tokens: int) -> Builder:
    """Items that ask how a passage goes on; the other choices are stretches of the same document,
    as many tokens long and beginning with the same kind of space."""
    length = max(_SHORTEST, tokens // _CONTINUATION_SHARE)
    before = tokens - length

    def build(document: Document, rng: np.random.Generator) -> Iterator[Item]:
        ids = tokenizer.encode(document.text)
        starts = [tokenizer.tokens[i][0] for i in ids]
        # In the tokenizer's alphabet of one character a byte, as GPT-2's: space and line feed.
        seams = {
            kind: [
                i for i, c in enumerate(starts) if c == kind and before <= i <= len(ids) - length
            ]
            for kind in ("Ġ", "Ċ")
        }
        kind_of = {i: kind for kind, places in seams.items() for i in places}
        for seam in shuffled(kind_of, rng):
            places = [i for i in seams[kind_of[seam]] if abs(i - seam) >= length]
            texts = [tokenizer.decode(ids[seam : seam + length])]
            for other in shuffled(places, rng)[: 4 * CHOICES]:
                text = tokenizer.decode(ids[other : other + length])
                if text not in texts and len(texts) < CHOICES:
                    texts.append(text)
            context = tokenizer.decode(ids[seam - before : seam])
            # A cut inside a character leaves U+FFFD, which the document does not have.
            whole = "\ufffd" not in "".join([context, *texts]) and context.strip()
            if whole and len(texts) == CHOICES:
                yield shuffled_choices(context, texts, document, rng)

    return build


def cloze(tokenizer: Tokenizer, tokens: int, frequencies: "WordFrequencies") -> Builder:
    """Items that ask which word stands in a passage; the others are about as frequent in the
    training documents and are written alike. The rest of the passage follows each choice."""

    def build(document: Document, rng: np.random.Generator) -> Iterator[Item]:
        for match in shuffled(_WORD.finditer(document.text), rng):
            context = words_before(document.text, match.start(), tokenizer, tokens * 2 // 3)
            ids = tokenizer.encode(document.text[match.end() : match.end() + 8 * tokens])
            rest = tokenizer.decode(ids[: max(2, tokens // 4)])
            passage = context + rest
            words = [w for w in frequencies.alike(match[0]) if w not in passage]
            cut = "\ufffd" in rest or not rest.strip() or not context.strip()
            if cut or len(words) < CHOICES - 1:
                continue
            others = rng.choice(words, CHOICES - 1, replace=False).tolist()
            context, texts = spaced(context, [match[0], *others])
            yield shuffled_choices(context, [text + rest for text in texts], document, rng)

    return build


class WordFrequencies:
    """How often words stand in the training documents, and which are about as frequent."""

    def __init__(self, documents: Iterable[Document]):
        """Counts every word of four characters and more in `documents`."""
        counts = collections.Counter(w for d in documents for w in _WORD.findall(d.text))
        self._counts = counts
        self._by_shape: dict[tuple, list[tuple[float, str]]] = {}
        for word, count in counts.items():
            self._by_shape.setdefault(_shape(word), []).append((math.log(count), word))
        for words in self._by_shape.values():
            words.sort()

    def alike(self, word: str) -> list[str]:
        """Other words of its shape that are nearest to its frequency, in order of frequency."""
        words = self._by_shape.get(_shape(word), [])
        place = bisect.bisect_left(words, (math.log(max(self._counts[word], 1)), word))
        near = words[max(0, place - _NEAR // 2) : place + _NEAR // 2]
        return [other for _, other in near if other != word]


def _shape(word):
    return word.islower(), word.isupper(), word.istitle(), "_" in word
