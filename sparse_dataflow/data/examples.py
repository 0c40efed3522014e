"""Prompts with answers: the lines of JSON that `data.loss=answers` trains on, and their tokens.

The lines are those of `chat.checked_example`.  With a chat template, a prompt and its answer are a
conversation of two messages.  Without one, their texts follow each other.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from sparse_dataflow.data.chat import ASSISTANT, USER, Rendered
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError


def pieces(document: Document, tokenizer: Tokenizer) -> Rendered:
    """Returns the text of an example, divided at its answers.

    Raises:
      UserError: the example needs a chat template, or the template refuses it.
    """
    record, template = json_files.parse(document.text), tokenizer.chat_template
    if template is None:
        if "messages" in record:
            raise UserError(
                f'{document.id} has "messages", and the tokenizer of run.init_from has no chat '
                'template; legal: "prompt" and "answer", or a tokenizer_config.json with a '
                "chat_template."
            )
        return Rendered([(record["prompt"], False), (record["answer"], True)])
    messages = record.get("messages") or [
        {"role": USER, "content": record["prompt"]},
        {"role": ASSISTANT, "content": record["answer"]},
    ]
    try:
        return template.answers(messages)
    except UserError as error:
        raise UserError(f"{document.id}: {error}") from None


@dataclasses.dataclass(frozen=True)
class EncodedExamples:
    """The tokens of examples, one after another.

    Attributes:
      tokens: int32 [count].
      answers: bool [count], whether a token belongs to an answer.
      starts: int64 [examples + 1], first token of each example, and the count.
      skipped: examples without an answer that the template keeps.
      changed: answers that are not trained, because the template changes them when more messages
        follow.
      unprompted: answers that are trained after another prompt than the template makes for them.
    """

    tokens: np.ndarray
    answers: np.ndarray
    starts: np.ndarray
    skipped: int
    changed: int
    unprompted: int = 0


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> EncodedExamples:
    """Encodes examples, each as one text, so that its tokens are those of its conversation.

    A token belongs to an answer if any of its characters does.  The end of text follows each
    example that does not end with it, and belongs to an answer that has no end.

    Raises:
      UserError: see `pieces`.
    """
    tokens, answers, lengths = [], [], []
    skipped = changed = unprompted = 0
    for rendered in (pieces(document, tokenizer) for document in documents):
        changed, unprompted = changed + rendered.changed, unprompted + rendered.unprompted
        if not any(is_answer for _, is_answer in rendered.pieces):
            skipped += 1
            continue
        ids, marks = _marked_tokens(rendered.pieces, tokenizer)
        if ids[-1] != tokenizer.eot_id:
            last = ids[1 + max(np.flatnonzero(~marks), default=-1) :]
            ended = any(int(number) in tokenizer.ends for number in last)
            # A template may end with text after the last answer, which then is no answer's end.
            marks = np.append(marks, rendered.pieces[-1][1] and not ended)
            ids = np.append(ids, tokenizer.eot_id)
        tokens.append(ids.astype(np.int32))
        answers.append(marks.astype(bool))
        answers[-1][0] = False  # No token comes before it.
        lengths.append(len(ids))
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    empty = np.empty(0, np.int32)
    return EncodedExamples(
        np.concatenate([empty, *tokens]),
        np.concatenate([empty.astype(bool), *answers]),
        starts,
        skipped,
        changed,
        unprompted,
    )


def _marked_tokens(pieces, tokenizer):
    """Returns the ids of a text in pieces, and whether each belongs to an answer."""
    text = "".join(text for text, _ in pieces)
    ids, places = tokenizer.encode_with_places(text, chat=bool(tokenizer.chat_template))
    if not tokenizer.chat_template:
        ids = tokenizer.as_document(ids, ends=False)
        places = np.pad(places, ((len(ids) - len(places), 0), (0, 0)))
    is_answer = np.repeat([mark for _, mark in pieces], [len(text) for text, _ in pieces])
    # A token is of the answer if any character of its span is, which two counts tell.
    count = np.concatenate([[0], np.cumsum(is_answer)])
    return ids, count[places[:, 1]] > count[places[:, 0]]


@dataclasses.dataclass(frozen=True)
class _RenderedDocuments(Sequence[Document]):
    documents: Sequence[Document]
    tokenizer: Tokenizer

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Document:  # type: ignore[override]
        document = self.documents[index]
        rendered = pieces(document, self.tokenizer)
        return Document(document.id, "".join(text for text, _ in rendered.pieces))


def as_text(corpus: Corpus, tokenizer: Tokenizer) -> Corpus:
    """Returns a corpus of examples with the rendered text of each."""
    return dataclasses.replace(
        corpus,
        train=_RenderedDocuments(corpus.train, tokenizer),
        validation=_RenderedDocuments(corpus.validation, tokenizer),
    )
