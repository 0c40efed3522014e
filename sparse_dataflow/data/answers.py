"""Batches of prompts with answers, whose loss counts the tokens of answers alone.

A row holds one example, or as many consecutive ones as fit where attention stays within documents
(`model.mask_documents`).  The rest of it is end of text, which no target of an answer sees.
"""

import dataclasses
import math

import jax
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.data.batches import EvalBatches, TrainBatches, local_rows
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
                # A row is a span of consecutive examples, so one that is left out ends it.
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
        """Returns a row: tokens, targets and whether these count, [sequence_length]."""
        size = self.sequence_length + 1
        starts = self._starts(index)
        start, stop = starts[0], min(starts[-1], starts[0] + size)
        tokens = np.full(size, self.end_of_text, np.int32)
        tokens[: stop - start] = self.examples.tokens[start:stop]
        counts = np.zeros(size, np.float32)
        counts[: stop - start] = self.examples.answers[start:stop]
        return Batch.from_windows(tokens, counts[1:])

    def numbers(self, index: int) -> np.ndarray:
        """Returns the number of each target's example, int64 [sequence_length]."""
        starts = self._starts(index)
        # The target of position t is token t + 1, and belongs to the last example that begins there
        # or before.
        places = starts[0] + np.arange(1, self.sequence_length + 1)
        return self.spans[index, 0] + np.searchsorted(starts[1:], places, "right")

    def _starts(self, index):
        first, last = self.spans[index]
        return self.examples.starts[first : last + 1]


@dataclasses.dataclass(frozen=True, eq=False)
class AnswerBatches(TrainBatches):
    """Endless shuffled batches of rows; see `TrainBatches`, whose windows these rows replace.

    Weights of `batches[step]` are equal for each token of an answer in the whole batch, and 0 for
    all other targets.  Those of the batch add up to 1.
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
        # All rows on every process: a weight is a share of the answers of the whole batch.
        rows = [shuffled[first + row] for row in range(self.batch_size)]
        total = sum(row.token_weights.sum() for row in rows)
        batch = _stacked([rows[row] for row in local_rows(self)])
        return dataclasses.replace(batch, token_weights=batch.token_weights / total)


@dataclasses.dataclass(frozen=True, eq=False)
class AnswerEvalBatches(EvalBatches):
    """Rows in order, up to `max_windows`; the tokens of answers count.  See `EvalBatches`."""

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
        return sum(int(row.token_weights.sum()) for row in self._rows)

    def total_bytes(self, token_bytes: np.ndarray) -> int:
        """Returns the UTF-8 bytes of the `total_tokens` targets."""
        return sum(int(token_bytes[r.targets[r.token_weights > 0]].sum()) for r in self._rows)

    @property
    def examples(self) -> np.ndarray:
        """The number of the example of each of the `total_tokens` targets, in order."""
        numbers = (self.tokens.numbers(place) for place in self._places)
        pairs = zip(numbers, self._rows, strict=True)
        return np.concatenate([each[row.token_weights > 0] for each, row in pairs])

    @property
    def _places(self):
        return map(self.place, range(self.windows))

    @property
    def _rows(self):
        return map(self.tokens.__getitem__, self._places)

    def __len__(self) -> int:
        return math.ceil(self.windows / self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        numbers = [index * self.batch_size + row for row in local_rows(self)]
        # The last batch is filled up with its last row, whose copies do not count.
        rows = [self.tokens[self.place(min(number, self.windows - 1))] for number in numbers]
        batch = _stacked(rows)
        batch.token_weights[np.array(numbers) >= self.windows] = 0
        return batch


def _stacked(rows):
    return jax.tree.map(lambda *arrays: np.stack(arrays), *rows)


def _refuse_empty(batches, words):
    if not len(batches.tokens):
        raise UserError(
            f"{words} within training.sequence={batches.sequence_length} tokens; add examples or "
            "lengthen the sequence."
        )
