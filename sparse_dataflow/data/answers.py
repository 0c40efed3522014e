"""Batches of prompts with answers, whose loss counts the tokens of answers alone.

A row holds one example, or as many consecutive ones as fit where attention stays within documents
(`model.mask_documents`).  The rest of it is end of text, which no target of an answer sees.
"""

import dataclasses
import math

import numpy as np

from sparse_dataflow.data.batches import Batch, EvalBatches, TrainBatches, local_rows
from sparse_dataflow.data.examples import EncodedExamples
from sparse_dataflow.files.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class AnswerRows:
    """Random-access source of rows.

    Attributes:
      examples: the tokens.
      spans: int64 [rows, 2], the first example of each row and the one after its last.
      sequence_length: targets per row.
      end_of_text: fills rows.
      truncated: examples that lost their end.
      skipped: examples that are in no row, because a row would hold no token of their answer.
    """

    examples: EncodedExamples
    spans: np.ndarray
    sequence_length: int
    end_of_text: int
    truncated: int
    skipped: int

    @classmethod
    def of(
        cls, examples: EncodedExamples, sequence_length: int, end_of_text: int, pack: bool
    ) -> "AnswerRows":
        """Returns the rows of examples.

        Raises:
          UserError: `pack`, and an example has the end of text inside, which would divide it.
        """
        spans: list[list[int]] = []
        size = sequence_length + 1
        room = truncated = skipped = 0
        for number, (start, stop) in enumerate(zip(examples.starts, examples.starts[1:])):
            if not examples.answers[start : min(stop, start + size)].any():
                skipped, room = skipped + 1, 0
                continue
            truncated += stop - start > size
            if pack and end_of_text in examples.tokens[start : stop - 1]:
                raise UserError(
                    "model.mask_documents=yes packs several examples into a row and divides them "
                    "at the end of text, which the chat template also writes inside an example; "
                    "legal: model.mask_documents=no, one example a row."
                )
            length = stop - start
            if pack and length <= room:
                spans[-1][1] = number + 1
                room -= length
            else:
                spans.append([number, number + 1])
                room = max(0, size - length)
        rows = np.array(spans, np.int64).reshape(-1, 2)
        return cls(examples, rows, sequence_length, end_of_text, int(truncated), skipped)

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Batch:
        """Returns {"tokens": int32 [sequence_length + 1], "token_weights": float32
        [sequence_length], "examples": int32 [sequence_length], the number of each target's
        example}."""
        size = self.sequence_length + 1
        first, last = self.spans[index]
        starts = self.examples.starts[first : last + 1]
        start, stop = starts[0], min(starts[-1], starts[0] + size)
        tokens = np.full(size, self.end_of_text, np.int32)
        tokens[: stop - start] = self.examples.tokens[start:stop]
        counts = np.zeros(size, np.float32)
        counts[: stop - start] = self.examples.answers[start:stop]
        # The target of position t is token t + 1, and belongs to the last example that begins there
        # or before.
        numbers = first + np.searchsorted(starts[1:] - start, np.arange(1, size), "right")
        return {"tokens": tokens, "token_weights": counts[1:], "examples": numbers.astype(np.int32)}


@dataclasses.dataclass(frozen=True, eq=False)
class AnswerBatches(TrainBatches):
    """Endless shuffled batches of rows; see `TrainBatches`, whose windows these rows replace.

    `batches[step]` also has "token_weights", float32 [len(rows), sequence_length]: equal for each
    token of an answer in the whole batch, and 0 for all other targets.  Those of the batch add up
    to 1.
    """

    tokens: AnswerRows  # type: ignore[assignment]

    def __post_init__(self):
        _refuse_empty(self, "The train split has no example with an answer")

    @property
    def _sources(self):
        return [self.tokens]

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(step)
        first = step * self.batch_size
        [shuffled] = self._shuffled
        rows = [shuffled[first + row] for row in range(self.batch_size)]
        total = sum(row["token_weights"].sum() for row in rows)
        return {
            "tokens": np.stack([rows[row]["tokens"] for row in local_rows(self)]),
            "token_weights": np.stack(
                [rows[row]["token_weights"] / total for row in local_rows(self)]
            ),
        }


@dataclasses.dataclass(frozen=True, eq=False)
class AnswerEvalBatches(EvalBatches):
    """Rows in order, up to `max_windows`, of which the tokens of answers count; see `EvalBatches`.

    Batches also have "examples", see `AnswerRows`.
    """

    tokens: AnswerRows  # type: ignore[assignment]

    def __post_init__(self):
        _refuse_empty(self, "No held-out example has an answer")

    @property
    def available(self) -> int:
        """Number of rows of the split."""
        return len(self.tokens)

    @property
    def total_tokens(self) -> int:
        """Number of targets with weight 1 over all batches and processes."""
        return sum(int(row["token_weights"].sum()) for row in self._rows)

    def total_bytes(self, token_bytes: np.ndarray) -> int:
        """Returns the UTF-8 bytes of the `total_tokens` targets."""
        rows = ((row["tokens"][1:], row["token_weights"] > 0) for row in self._rows)
        return sum(int(token_bytes[tokens[counted]].sum()) for tokens, counted in rows)

    @property
    def _rows(self):
        return (self.tokens[self.place(number)] for number in range(self.windows))

    def __len__(self) -> int:
        return math.ceil(self.windows / self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        numbers = [index * self.batch_size + row for row in local_rows(self)]
        rows = [self.tokens[self.place(min(number, self.windows - 1))] for number in numbers]
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        batch["token_weights"][np.array(numbers) >= self.windows] = 0
        return batch


def _refuse_empty(batches, words):
    if not len(batches.tokens):
        raise UserError(
            f"{words} within training.sequence={batches.sequence_length} tokens; add examples or "
            "lengthen the sequence."
        )
