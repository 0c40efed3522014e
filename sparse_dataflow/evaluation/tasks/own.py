"""The project's own tasks by name: items from held-out documents, examples from training ones."""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import islice

from sparse_dataflow.data.corpora import Corpus
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.tasks import python_source, text
from sparse_dataflow.evaluation.tasks.items import Builder, Item, gather

EXAMPLES = 64
"""Items from training documents that the examples of a prompt are drawn from."""

PYTHON = "python_stdlib"
"""The corpus that has the tasks on Python source."""

_COUNTED_DOCUMENTS = 5_000  # whose words are counted


@dataclasses.dataclass(frozen=True)
class OwnTask:
    """How a task is made.

    Attributes:
      build: (corpus, tokenizer, tokens) -> builder.
      share: its items take this part of the context, so that a question and some examples fit.
      most: tokens of an item in any context.
      python: whether it needs Python source.
    """

    build: Callable[[Corpus, Tokenizer, int], Builder]
    share: int = 6
    most: int = 128
    python: bool = False


def _cloze(corpus, tokenizer, tokens):
    documents = (corpus.train[i] for i in range(len(corpus.train)))
    counted = text.WordFrequencies(islice(documents, _COUNTED_DOCUMENTS))
    return text.cloze(tokenizer, tokens, counted)


OWN: dict[str, OwnTask] = {
    "last_word": OwnTask(lambda corpus, *rest: text.last_word(*rest)),
    "continuation": OwnTask(lambda corpus, *rest: text.continuation(*rest)),
    "cloze": OwnTask(_cloze),
    "docstring_body": OwnTask(
        lambda corpus, *rest: python_source.docstring_body(*rest), 3, 256, python=True
    ),
    "call_name": OwnTask(lambda corpus, *rest: python_source.call_name(*rest), python=True),
}


def own_tasks(corpus_name: str) -> tuple[str, ...]:
    """Names of the tasks that a corpus has."""
    return tuple(name for name, task in OWN.items() if corpus_name == PYTHON or not task.python)


def item_tokens(name: str, context: int) -> int:
    """The most tokens of one item of the task in a model's context."""
    task = OWN[name]
    return min(max(context // task.share, 16), task.most)


def make(
    name: str, corpus: Corpus, tokenizer: Tokenizer, context: int, count: int, seed: int
) -> tuple[Sequence[Item], Sequence[Item]]:
    """Up to `count` items of held-out documents, and examples from training documents.

    The same corpus, tokenizer, context, count and seed give the same items.

    Args:
      name: of the task.
      corpus: of the run.
      tokenizer: measures the items.
      context: tokens that the model sees at once.
      count: items wanted.
      seed: draws them.
    """
    build = OWN[name].build(corpus, tokenizer, item_tokens(name, context))
    items = gather(corpus.validation, build, count, seed)
    return items, gather(corpus.train, build, EXAMPLES, seed)
