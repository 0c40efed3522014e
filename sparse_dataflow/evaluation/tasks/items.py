"""Task items, sampled from documents or read from a file."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from sparse_dataflow.data.documents import Document, document_hash
from sparse_dataflow.data.local_files import say_once
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

_MAX_DOCUMENTS = 10_000
_MAX_CHARACTERS = 2**18  # per document
_QUESTION = "\nQ: "  # Of BIG-bench, where a task has no other.
_FIELDS = {"context": "a text", "choices": "a list of texts", "answer": "the index of one of them"}


@dataclasses.dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
      context: text before the answer.
      choices: answer choices; a single choice is scored by greedy decoding.
      answer: index of the correct choice.
      document: id of the document; items of one document are not independent.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    document: str


Builder = Callable[[Document, np.random.Generator], Iterator[Item]]
"""(document, random generator) -> items of the document in random order."""


def sample_items(
    documents: Sequence[Document], build: Builder, count: int, seed: int
) -> list[Item]:
    """Returns up to `count` distinct items from as many documents as possible.

    Takes one item of each document in turn, so that long documents do not dominate. The same seed
    returns the same items.

    Args:
      documents: source documents; only the first ten thousand are used.
      build: yields the items of a document.
      count: number of items; fewer are returned where the documents have no more.
      seed: random seed, combined with the document id for each document.
    """
    order = np.random.default_rng(seed).permutation(min(len(documents), _MAX_DOCUMENTS))
    items: dict[tuple[str, tuple[str, ...]], Item] = {}
    open_documents: list[Iterator[Item]] = []
    remaining = iter(order.tolist())
    while len(items) < count:
        # Opens no more documents than missing items.
        for index in remaining:
            document = documents[index]
            rng = np.random.default_rng([seed, document_hash(document.id)])
            text = Document(document.id, document.text[:_MAX_CHARACTERS])
            open_documents.append(build(text, rng))
            if len(open_documents) + len(items) >= count:
                break
        if not open_documents:
            break
        not_exhausted = []
        for document_items in open_documents:
            item = next(document_items, None)
            if item is not None and len(items) < count:
                items.setdefault((item.context, item.choices), item)
                not_exhausted.append(document_items)
        open_documents = not_exhausted
    return list(items.values())


def read_items(path: Path) -> list[Item]:
    """Reads a task from JSON lines with "context", "choices", "answer" and optional "document", or
    from a `task.json` of BIG-bench.

    Raises:
      UserError: the file cannot be read or is empty, or a question has a missing or invalid field.
    """
    try:
        content = json_files.read_bytes(Path(path).expanduser()).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"The task file {path} cannot be read: {error}.") from None
    # Split at line feeds alone: other line separators may be inside a JSON string.
    lines = [(f"line {n}", line.strip()) for n, line in enumerate(content.split("\n"), start=1)]
    items = [
        _item(f"{path}, {place}", line, str(number))
        for number, (place, line) in enumerate(_bigbench(path, content) or lines, start=1)
        if line
    ]
    if not items:
        raise UserError(f"The task file {path} is empty.")
    return items


def _bigbench(path, content):
    """Returns (place, fields of a question) of a `task.json` of BIG-bench; nothing of another file.

    A question scores several choices, or has targets, the first of which is to be generated.  The
    task's prefix stands in front of each.
    """
    try:
        task = json_files.parse(content)
        examples = list(task["examples"])
    except (ValueError, TypeError, KeyError):
        return []
    first = f"{task.get('task_prefix', '')}{task.get('example_input_prefix', _QUESTION)}"
    mark = str(task.get("choice_prefix", "\n  choice: "))
    last = task.get("example_output_prefix", "\nA: ")
    questions, several = [], 0
    for number, example in enumerate(examples, start=1):
        given = example if isinstance(example, dict) else {}
        scores, target, context = (given.get(k) for k in ("target_scores", "target", "input"))
        if isinstance(scores, dict) and scores:
            choices, values = list(scores), list(scores.values())
            are_numbers = all(isinstance(value, int | float) for value in values)
            is_one_best = are_numbers and (len(values) == 1 or max(values) > min(values))
            answer = values.index(max(values)) if is_one_best else None
            if task.get("append_choices_to_input", True):
                order = np.random.RandomState(42).permutation(sorted(choices))  # As BIG-bench.
                context = mark.join([str(context), *order])
        else:
            choices, answer = target[:1] if isinstance(target, list) else [target], 0
            several += isinstance(target, list) and len(target) > 1
        fields = {"context": f"{first}{context}{last}".lstrip()} if isinstance(context, str) else {}
        questions.append((f"example {number}", fields | {"choices": choices, "answer": answer}))
    if several:
        say_once(f"{path}: {several} questions have several targets, of which the first counts")
    return questions


def _item(location, given, number) -> Item:
    try:
        fields = json_files.parse(given) if isinstance(given, str) else given
    except ValueError as error:
        raise UserError(f"{location}, is not JSON: {getattr(error, 'msg', error)}.") from None
    if not isinstance(fields, dict):
        raise UserError(f"{location}, is not a JSON object with {', '.join(_FIELDS)}.")
    missing = [name for name in _FIELDS if name not in fields]
    if missing:
        raise UserError(
            f"{location}, lacks {' and '.join(missing)}; each line needs "
            f"{', '.join(f'{name} ({kind})' for name, kind in _FIELDS.items())}."
        )
    context, choices, answer = (fields[name] for name in _FIELDS)
    texts = isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices)
    valid = {
        "context": isinstance(context, str),
        "choices": texts,
        "answer": texts and type(answer) is int and 0 <= answer < len(choices),
    }
    for name, is_valid in valid.items():
        if not is_valid:
            raise UserError(f"{location}: {name} must be {_FIELDS[name]}.")
    return Item(context, tuple(choices), answer, str(fields.get("document", number)))
