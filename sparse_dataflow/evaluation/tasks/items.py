"""Questions as data, how they are gathered from documents, and a user's own file of them."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.splits import document_hash
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

_DOCUMENTS_CONSIDERED = 10_000
_LONGEST_TEXT = 2**18  # characters of a document that are read
_FIELDS = {"context": "a text", "choices": "a list of texts", "answer": "the index of one of them"}


@dataclasses.dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
      context: what comes before the answer.
      choices: texts of which one is right; a single one is an answer to be written by itself.
      answer: index of the right one.
      document: where it is from; items of one document are not independent.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    document: str


Builder = Callable[[Document, np.random.Generator], Iterator[Item]]
"""(document, random numbers) -> its items, in random order."""


def gather(documents: Sequence[Document], build: Builder, count: int, seed: int) -> list[Item]:
    """Up to `count` different items, the same for the same seed, from as many documents as can be.

    Documents give one item each in turn, so that a long one does not outweigh the others.

    Args:
      documents: to ask about; the first ten thousand are considered.
      build: makes a document's items.
      count: items wanted; fewer come where the documents have no more.
      seed: with a document's name, draws what is asked about it.
    """
    order = np.random.default_rng(seed).permutation(min(len(documents), _DOCUMENTS_CONSIDERED))
    found: dict[tuple[str, tuple[str, ...]], Item] = {}
    going: list[Iterator[Item]] = []
    waiting = iter(order.tolist())
    while len(found) < count:
        # No more documents are opened than there are items wanted.
        for index in waiting:
            document = documents[index]
            rng = np.random.default_rng([seed, document_hash(document.id)])
            text = Document(document.id, document.text[:_LONGEST_TEXT])
            going.append(build(text, rng))
            if len(going) + len(found) >= count:
                break
        if not going:
            break
        still = []
        for items in going:
            item = next(items, None)
            if item is not None and len(found) < count:
                found.setdefault((item.context, item.choices), item)
                still.append(items)
        going = still
    return list(found.values())


def read_items(path: Path) -> list[Item]:
    """A user's own task: JSON lines with "context", "choices" and "answer", maybe "document".

    Raises:
      UserError: the file cannot be read, is empty, or a line lacks a field or has a wrong one; the
        line and the field are named.
    """
    try:
        lines = json_files.read_bytes(Path(path).expanduser()).decode("utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"The task file {path} cannot be read: {error}.") from None
    items = [
        _item(f"{path}, line {number}", line, str(number))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not items:
        raise UserError(f"The task file {path} holds no item.")
    return items


def _item(where, line, number) -> Item:
    try:
        fields = json_files.parse(line)
    except ValueError as error:
        raise UserError(f"{where}, is not JSON: {getattr(error, 'msg', error)}.") from None
    if not isinstance(fields, dict):
        raise UserError(f"{where}, is not a JSON object with {', '.join(_FIELDS)}.")
    missing = [name for name in _FIELDS if name not in fields]
    if missing:
        raise UserError(
            f"{where}, lacks {' and '.join(missing)}; each line needs "
            f"{', '.join(f'{name} ({what})' for name, what in _FIELDS.items())}."
        )
    context, choices, answer = (fields[name] for name in _FIELDS)
    texts = isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices)
    wrong = {
        "context": not isinstance(context, str),
        "choices": not texts,
        "answer": type(answer) is not int or not texts or not 0 <= answer < len(choices),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(f"{where}: {name} must be {_FIELDS[name]}.")
    return Item(context, tuple(choices), answer, str(fields.get("document", number)))
