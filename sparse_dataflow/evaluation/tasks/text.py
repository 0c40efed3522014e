"""Tasks on any text: last word, continuation and missing word.

All lengths are in tokens of the run's tokenizer, so a question and its examples fit the context.
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
    move_space,
    shuffled,
    shuffled_choices,
    words_before,
)
from sparse_dataflow.evaluation.tasks.items import Builder, Item

_WORD = re.compile(r"[^\W\d_]\w{3,}")
_NEIGHBOURS = 24  # candidate distractors: words of the closest frequency
_CONTINUATION_DIVISOR = 3  # a continuation has 1/3 of the tokens of its item
_MIN_CONTINUATION = 4  # tokens


def last_word(tokenizer: Tokenizer, tokens: int) -> Builder:
    """Builds items whose answer is a word that also occurs in the context, without choices.

    See LAMBADA (arXiv 1606.06031).
    """

    def build(document: Document, rng: np.random.Generator) -> Iterator[Item]:
        for match in shuffled(_WORD.finditer(document.text), rng):
            context = words_before(document.text, match.start(), tokenizer, tokens)
            if re.search(rf"\b{re.escape(match[0])}\b", context):
                yield Item(*move_space(context, [match[0]]), 0, document.id)

    return build


def continuation(tokenizer: Tokenizer, tokens: int) -> Builder:
    """Builds items that ask for the continuation of a passage.

    The other choices are passages of the same document with the same number of tokens and the same
    leading character, a space or a line feed.
    """
    length = max(_MIN_CONTINUATION, tokens // _CONTINUATION_DIVISOR)
    before = tokens - length

    def build(document: Document, rng: np.random.Generator) -> Iterator[Item]:
        ids = tokenizer.encode(document.text)
        leading = [tokenizer.tokens[i][0] for i in ids]
        # Space and line feed in GPT-2's alphabet of one character per byte.
        starts = {
            space: [
                i for i, c in enumerate(leading) if c == space and before <= i <= len(ids) - length
            ]
            for space in ("Ġ", "Ċ")
        }
        for start in shuffled([i for indices in starts.values() for i in indices], rng):
            others = [i for i in starts[leading[start]] if abs(i - start) >= length]
            texts = [tokenizer.decode(ids[start : start + length])]
            for other in shuffled(others, rng)[: 4 * CHOICES]:
                text = tokenizer.decode(ids[other : other + length])
                if text not in texts and len(texts) < CHOICES:
                    texts.append(text)
            context = tokenizer.decode(ids[start - before : start])
            # A cut inside a character leaves U+FFFD.
            whole = "\ufffd" not in "".join([context, *texts]) and context.strip()
            if whole and len(texts) == CHOICES:
                yield shuffled_choices(context, texts, document, rng)

    return build


def cloze(tokenizer: Tokenizer, tokens: int, frequencies: "WordFrequencies") -> Builder:
    """Builds items that ask for the missing word of a passage.

    The other choices have a similar frequency in the training documents and the same case. The rest
    of the passage follows each choice.
    """

    def build(document: Document, rng: np.random.Generator) -> Iterator[Item]:
        for match in shuffled(_WORD.finditer(document.text), rng):
            context = words_before(document.text, match.start(), tokenizer, tokens * 2 // 3)
            ids = tokenizer.encode(document.text[match.end() : match.end() + 8 * tokens])
            rest = tokenizer.decode(ids[: max(2, tokens // 4)])
            passage = context + rest
            words = [w for w in frequencies.similar(match[0]) if w not in passage]
            incomplete = "\ufffd" in rest or not rest.strip() or not context.strip()
            if incomplete or len(words) < CHOICES - 1:
                continue
            others = rng.choice(words, CHOICES - 1, replace=False).tolist()
            context, texts = move_space(context, [match[0], *others])
            yield shuffled_choices(context, [text + rest for text in texts], document, rng)

    return build


class WordFrequencies:
    """Word counts of the training documents, with lookup of words of similar frequency."""

    def __init__(self, documents: Iterable[Document]):
        """Counts all words of at least four characters in `documents`."""
        counts = collections.Counter(w for d in documents for w in _WORD.findall(d.text))
        self._counts = counts
        self._by_shape: dict[tuple, list[tuple[float, str]]] = {}
        for word, count in counts.items():
            self._by_shape.setdefault(_shape(word), []).append((math.log(count), word))
        for words in self._by_shape.values():
            words.sort()

    def similar(self, word: str) -> list[str]:
        """Returns words of the same case and the closest frequency, in order of frequency."""
        words = self._by_shape.get(_shape(word), [])
        index = bisect.bisect_left(words, (math.log(max(self._counts[word], 1)), word))
        neighbours = words[max(0, index - _NEIGHBOURS // 2) : index + _NEIGHBOURS // 2]
        return [other for _, other in neighbours if other != word]


def _shape(word):
    return word.islower(), word.isupper(), word.istitle(), "_" in word
