"""Prompts with answers: the lines of JSON that `data.loss=answers` trains on, and their tokens.

The lines are those of `chat.checked_example`.  With a chat template, a prompt and its answer are a
conversation of two messages.  Without one, their texts follow each other.  The end of text follows
each example and belongs to the answer before it.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from sparse_dataflow.data.chat import ASSISTANT, USER, Rendered
from sparse_dataflow.data.corpora import Corpus
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
    """

    tokens: np.ndarray
    answers: np.ndarray
    starts: np.ndarray
    skipped: int
    changed: int


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> EncodedExamples:
    """Encodes examples; every piece of text alone, so that a prompt has the tokens that it has when
    the model answers it.

    Raises:
      UserError: see `pieces`.
    """
    tokens, answers, lengths = [], [], []
    skipped = changed = 0
    for rendered in (pieces(document, tokenizer) for document in documents):
        changed += rendered.changed
        if not any(is_answer for _, is_answer in rendered.pieces):
            skipped += 1
            continue
        texts = [text for text, _ in rendered.pieces]
        template = tokenizer.chat_template
        ids = tokenizer.encode_chat(texts) if template else tokenizer.encode_batch(texts)
        marks = [np.full(len(i), mark) for i, (_, mark) in zip(ids, rendered.pieces)]
        end = [tokenizer.eot_id]
        # A template may end with text after the last answer, which then is no answer's end.
        tokens.append(np.concatenate([*ids, end]).astype(np.int32))
        answers.append(np.concatenate([*marks, [rendered.pieces[-1][1]]]).astype(bool))
        answers[-1][0] = False  # No token comes before it.
        lengths.append(len(tokens[-1]))
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    empty = np.empty(0, np.int32)
    return EncodedExamples(
        np.concatenate([empty, *tokens]),
        np.concatenate([empty.astype(bool), *answers]),
        starts,
        skipped,
        changed,
    )


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
