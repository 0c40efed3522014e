"""Tasks cut from documents.

Any text has last word, continuation and missing word; Python source the body of a docstring and the
name of a called function.  All lengths are in tokens of the run's tokenizer, so a question and its
examples fit the context.
"""

import ast
import bisect
import collections
import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.tasks.items import Builder, Item

CHOICES = 4
"""Number of answer choices of a question."""

_MAX_ATTEMPTS = 400  # candidates per document
_CHARACTERS_PER_TOKEN = 16  # above the mean of any text, so the encoded slice is long enough


def words_before(text: str, end: int, tokenizer: Tokenizer, tokens: int) -> str:
    """Returns the complete words of `text` before index `end`, at most `tokens` tokens."""
    start = max(0, end - _CHARACTERS_PER_TOKEN * tokens)
    words = text[start:end]
    cuts = tokenizer.cuts(words)
    if len(cuts) - 1 <= tokens and start == 0:
        return words
    # From the first cut that is not inside a character.
    words = words[next(cut for cut in cuts[-tokens - 1 :] if cut >= 0) :]
    space = re.search(r"\s", words)
    return words[space.end() :] if space else ""


def beginning(text: str, tokenizer: Tokenizer, tokens: int) -> str:
    """Returns the first tokens of a text as text; "" where they end inside a character."""
    return text[: max(0, tokenizer.cuts(text)[: tokens + 1][-1])]


def move_space(context: str, words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Moves a single trailing space of the context to each word, since tokens start with it."""
    if context.endswith(" ") and not context[:-1].endswith((" ", "\n")):
        return context[:-1], tuple(f" {word}" for word in words)
    return context, tuple(words)


def shuffled(candidates: Iterable, rng: np.random.Generator) -> list:
    """Returns at most `_MAX_ATTEMPTS` of the candidates in random order."""
    candidates = list(candidates)
    # By places: numpy would make an array of the candidates, and change their types.
    return [candidates[i] for i in rng.permutation(len(candidates))[:_MAX_ATTEMPTS]]


def shuffled_choices(
    context: str, texts: Sequence[str], document: Document, rng: np.random.Generator
) -> Item:
    """Returns an item with the choices `texts` in random order; the first text is correct."""
    # The right one is the first text, so its new place is that of 0.
    order = rng.permutation(len(texts))
    choices = tuple(texts[i] for i in order)
    return Item(context, choices, int(np.argmin(order)), document.id)


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
        cuts = tokenizer.cuts(document.text).tolist()

        def passage(first, last):
            """Returns the text of tokens; "" where it begins or ends inside a character."""
            return (
                document.text[cuts[first] : cuts[last]] if min(cuts[first], cuts[last]) >= 0 else ""
            )

        def leading(start):
            return document.text[cuts[start] : cuts[start] + 1] if cuts[start] >= 0 else ""

        places = range(before, len(cuts) - length)
        starts = {space: [i for i in places if leading(i) == space] for space in (" ", "\n")}
        for start in shuffled([i for indices in starts.values() for i in indices], rng):
            others = [i for i in starts[leading(start)] if abs(i - start) >= length]
            texts = [passage(start, start + length)]
            # More than needed: some repeat another, or begin inside a character.
            for other in shuffled(others, rng)[: 4 * CHOICES]:
                text = passage(other, other + length)
                if text not in texts and len(texts) < CHOICES:
                    texts.append(text)
            context = passage(start - before, start)
            if context.strip() and all(texts) and len(texts) == CHOICES:
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
            rest = beginning(
                document.text[match.end() : match.end() + 8 * tokens],
                tokenizer,
                max(2, tokens // 4),
            )
            passage = context + rest
            words = [w for w in frequencies.similar(match[0]) if w not in passage]
            if not rest.strip() or not context.strip() or len(words) < CHOICES - 1:
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


def docstring_body(tokenizer: Tokenizer, tokens: int) -> Builder:
    """Builds items that ask for the function body of a docstring's first paragraph.

    The other choices are bodies of the same file, truncated to the same number of tokens.
    """
    length = tokens // 2

    def build(document: Document, rng: np.random.Generator) -> Iterator[Item]:
        bodies = []
        for function in ast.walk(_parse(document.text)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            summary = ast.get_docstring(function)
            if summary and len(function.body) > 1:
                body = _body(document.text, function)
                summary = summary.split("\n\n")[0].strip()
                if len(tokenizer.cuts(body)) > length and (
                    text := beginning(body, tokenizer, length)
                ):
                    bodies.append((summary, text))
        for summary, body in shuffled(bodies, rng):
            context = f'"""{summary}"""'
            others = list(dict.fromkeys(b for s, b in shuffled(bodies, rng) if body != b))
            if len(others) >= CHOICES - 1 and len(tokenizer.encode(context)) <= tokens - length:
                texts = [f"\n{text}" for text in (body, *others[: CHOICES - 1])]
                yield shuffled_choices(context, texts, document, rng)

    return build


def call_name(tokenizer: Tokenizer, tokens: int) -> Builder:
    """Builds items that ask for the name of a called function or method.

    The other choices are names called in the same file, of the same kind (function or attribute).
    """

    def build(document: Document, rng: np.random.Generator) -> Iterator[Item]:
        calls = [
            node.func
            for node in ast.walk(_parse(document.text))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
        ]
        lines = document.text.split("\n")
        # ast counts bytes of a line; the text is cut by characters.
        starts = np.cumsum([0, *(len(line) + 1 for line in lines)])
        for function in shuffled(calls, rng):
            name = _name(function)
            column = len(
                lines[function.end_lineno - 1].encode()[: function.end_col_offset].decode()
            )
            end = int(starts[function.end_lineno - 1]) + column
            # Only a name with its bracket right behind it can be cut out.
            if document.text[end - len(name) : end + 1] != f"{name}(":
                continue
            others = {_name(f) for f in calls if type(f) is type(function)} - {name}
            if len(others) >= CHOICES - 1:
                texts = [name, *rng.choice(sorted(others), CHOICES - 1, replace=False).tolist()]
                context = words_before(document.text, end - len(name), tokenizer, tokens)
                if context.strip():
                    yield shuffled_choices(context, [f"{t}(" for t in texts], document, rng)

    return build


def _name(function):
    return function.id if isinstance(function, ast.Name) else function.attr


def _parse(text) -> ast.AST:
    """Returns an empty module where the text is not valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in the source
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _body(text, function):
    """Returns the dedented source of a function's body without its docstring."""
    lines = text.split("\n")[function.body[0].end_lineno : function.body[-1].end_lineno]
    return textwrap.dedent("\n".join(lines))
