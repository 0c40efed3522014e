"""Batches of token windows, addressed by the global step.

Window i of a split is its tokens [i * L, i * L + L + 1): inputs are all but its last token, targets
all but its first, so every token except the split's very first is predicted exactly once. Training
windows are shuffled anew every epoch by grain. Batch s is a function of s alone: the global step is
the whole data position, on any number of processes, each of which loads rows of it.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sparse_dataflow.data.stored import Flat
from sparse_dataflow.files.errors import UserError

Batch = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class _Windows:
    """Random-access source of int32 [sequence_length + 1]; a last, partial window is left out."""

    tokens: Flat
    sequence_length: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.sequence_length
        return self.tokens[start : start + self.sequence_length + 1].astype(np.int32)


@dataclass(frozen=True, eq=False)
class TrainBatches:
    """Shuffled training batches without end.

    `batches[step]` is {"tokens": int32 [len(rows), sequence_length + 1]}, these rows of the batch.

    Attributes:
      tokens: any integer type [count].
      batch_size: rows of the global batch.
      sequence_length: targets a row.
      seed: 0 to 2**32 - 1.
      rows: of the batch that this process loads, ascending; all of them where None.

    Raises:
      UserError: too few tokens for one window, or an illegal size or seed.
    """

    tokens: Flat
    batch_size: int
    sequence_length: int
    seed: int = 0
    rows: tuple[int, ...] | None = None

    def __post_init__(self):
        _check_sizes(self.batch_size, self.sequence_length)
        if not 0 <= self.seed < 2**32:
            raise UserError(f"The data seed {self.seed} is not in 0 to {2**32 - 1}.")
        if self.windows_per_epoch == 0:
            raise UserError(
                f"The train split has {len(self.tokens)} tokens, too few for one window of "
                f"{self.sequence_length} + 1; give more text or a shorter sequence."
            )

    @property
    def windows_per_epoch(self) -> int:
        """Windows that one pass over the split has."""
        return len(_Windows(self.tokens, self.sequence_length))

    def epoch(self, step: int) -> float:
        """Passes over the split made before `step`."""
        return step * self.batch_size / self.windows_per_epoch

    @functools.cached_property
    def _shuffled(self):
        import grain

        windows = _Windows(self.tokens, self.sequence_length)
        return grain.MapDataset.source(windows).seed(self.seed).shuffle().repeat()

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(step)
        first, rows = step * self.batch_size, _rows(self)
        return {"tokens": np.stack([self._shuffled[first + row] for row in rows])}

    def iterate(self, start_step: int = 0, threads: int = 2, prefetch: int = 8) -> Iterator[Batch]:
        """Batches `start_step`, `start_step + 1`, ... without end, read ahead by threads.

        Args:
          start_step: the step to resume at, 0 or more.
          threads: that read; 0 reads in the caller's thread.
          prefetch: batches kept ready.
        """
        import grain

        ahead = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
        steps = grain.MapDataset.range(start_step, start_step + 2**48)
        return iter(steps.map(self.__getitem__).to_iter_dataset(ahead))


@dataclass(frozen=True, eq=False)
class EvalBatches:
    """All windows of a split in order, up to `max_windows`, the same at every evaluation.

    `batches[i]` is {"tokens": int32 [len(rows), sequence_length + 1], "weights": float32
    [len(rows), sequence_length]}; weights are 1 where a target counts and 0 where the last window
    or the last batch is padded. `rows` as in `TrainBatches`.

    Raises:
      UserError: fewer than two tokens, or an illegal size.
    """

    tokens: Flat
    batch_size: int
    sequence_length: int
    max_windows: int | None = None
    rows: tuple[int, ...] | None = None

    def __post_init__(self):
        _check_sizes(self.batch_size, self.sequence_length)
        if self.max_windows is not None and self.max_windows < 1:
            raise UserError(f"An evaluation needs 1 window or more, not {self.max_windows}.")
        if len(self.tokens) < 2:
            raise UserError("The validation split has fewer than two tokens; give more text.")

    @property
    def windows(self) -> int:
        """Windows evaluated by all processes together, the partial last one included."""
        every = math.ceil((len(self.tokens) - 1) / self.sequence_length)
        return every if self.max_windows is None else min(every, self.max_windows)

    @property
    def total_tokens(self) -> int:
        """Targets with weight 1 over all batches and processes."""
        return min(len(self.tokens) - 1, self.windows * self.sequence_length)

    def total_bytes(self, token_bytes: np.ndarray) -> int:
        """UTF-8 bytes of those targets; `token_bytes` is the tokenizer's, int32 [vocab_size]."""
        chunk, end = 2**22, self.total_tokens + 1
        return sum(
            int(token_bytes[self.tokens[start : min(start + chunk, end)]].sum(dtype=np.int64))
            for start in range(1, end, chunk)
        )

    def __len__(self) -> int:
        return math.ceil(self.windows / self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rows, length = _rows(self), self.sequence_length
        tokens = np.zeros((len(rows), length + 1), np.int32)
        weights = np.zeros((len(rows), length), np.float32)
        for place, row in enumerate(rows):
            number = index * self.batch_size + row
            if number < self.windows:
                window = self.tokens[number * length : (number + 1) * length + 1]
                tokens[place, : len(window)] = window
                weights[place, : len(window) - 1] = 1
        return {"tokens": tokens, "weights": weights}

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))


def bits_per_byte(total_nll_nats: float, total_bytes: int) -> float:
    """Negative log-likelihood of a text in bits per UTF-8 byte: nll / (ln 2 * bytes).

    Comparable between tokenizers, as the loss per token is not. The cost of predicting the end of
    each document counts, its bytes are none.
    """
    return total_nll_nats / (math.log(2) * total_bytes)


def _rows(batches):
    return range(batches.batch_size) if batches.rows is None else batches.rows


def _check_sizes(batch_size: int, sequence_length: int) -> None:
    if batch_size < 1 or sequence_length < 1:
        raise UserError(
            f"A batch of {batch_size} rows of {sequence_length} tokens is empty; give 1 or more."
        )
