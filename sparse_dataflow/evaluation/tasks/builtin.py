"""Built-in tasks: from a rule, or from held-out documents with examples of training documents."""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import islice

from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.tasks import generated, text
from sparse_dataflow.evaluation.tasks.items import Builder, Item, sample_items

EXAMPLES = 64
"""Number of few-shot example items of a task."""

PYTHON_CORPUS = "python_stdlib"
"""The corpus of the tasks on Python source."""

_FREQUENCY_DOCUMENTS = 5_000  # training documents for word frequencies


Maker = Callable[[Corpus, Tokenizer, int, int, int], tuple[Sequence[Item], Sequence[Item]]]
"""(corpus, tokenizer, tokens, count, seed) -> up to `count` items, and examples."""


@dataclasses.dataclass(frozen=True)
class BuiltinTask:
    """Definition of a built-in task.

    Attributes:
      make: makes its items.
      items_per_context: items that fit the context, so that a prompt can have examples.
      max_tokens: maximum tokens of an item.
      python: whether the task needs Python source.
    """

    make: Maker
    items_per_context: int = 6
    max_tokens: int = 128
    python: bool = False


def _cut(builder: Callable[[Corpus, Tokenizer, int], Builder]) -> Maker:
    """Items of held-out documents, and examples of training documents."""

    def make(corpus, tokenizer, tokens, count, seed):
        build = builder(corpus, tokenizer, tokens)
        items = sample_items(corpus.validation, build, count, seed)
        return items, sample_items(corpus.train, build, EXAMPLES, seed)

    return make


def _drawn(rule: generated.Draw) -> Maker:
    return lambda corpus, tokenizer, tokens, count, seed: generated.draw_items(
        rule, tokens, count, EXAMPLES, seed
    )


def _cloze(corpus, tokenizer, tokens):
    documents = (corpus.train[i] for i in range(len(corpus.train)))
    frequencies = text.WordFrequencies(islice(documents, _FREQUENCY_DOCUMENTS))
    return text.cloze(tokenizer, tokens, frequencies)


BUILTIN_TASKS: dict[str, BuiltinTask] = {
    "last_word": BuiltinTask(_cut(lambda corpus, *args: text.last_word(*args))),
    "continuation": BuiltinTask(_cut(lambda corpus, *args: text.continuation(*args))),
    "cloze": BuiltinTask(_cut(_cloze)),
    "docstring_body": BuiltinTask(
        _cut(lambda corpus, *args: text.docstring_body(*args)), 3, 256, python=True
    ),
    "call_name": BuiltinTask(_cut(lambda corpus, *args: text.call_name(*args)), python=True),
    **{name: BuiltinTask(_drawn(rule)) for name, rule in generated.RULES.items()},
}


def task_names(corpus_name: str) -> tuple[str, ...]:
    """Returns the names of the built-in tasks that a corpus supports."""
    is_python = corpus_name == PYTHON_CORPUS
    return tuple(name for name, task in BUILTIN_TASKS.items() if is_python or not task.python)


def item_tokens(name: str, context: int) -> int:
    """Returns the maximum tokens of one item of the task for a context length."""
    task = BUILTIN_TASKS[name]
    return min(max(context // task.items_per_context, 16), task.max_tokens)


def make_items(
    name: str, corpus: Corpus, tokenizer: Tokenizer, context: int, count: int, seed: int
) -> tuple[Sequence[Item], Sequence[Item]]:
    """Returns up to `count` items, and others as examples.  The same arguments return the same.

    Args:
      name: name of the task.
      tokenizer: tokenizer that measures the items.
      context: context length in tokens.
      seed: random seed.
    """
    tokens = item_tokens(name, context)
    return BUILTIN_TASKS[name].make(corpus, tokenizer, tokens, count, seed)
