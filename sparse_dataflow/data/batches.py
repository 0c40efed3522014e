"""Batches of token windows, addressed by the global step.

Window i of a split holds the tokens [i * L, i * L + L + 1). Its inputs are all tokens but the last
and its targets all but the first, so every token except the first of the split is predicted once.
grain reshuffles the training windows in every epoch. A mixture takes windows of each source by its
weight, in a fixed order, and reshuffles each source in every epoch of its own. Batch s depends on s
alone: the global step is the complete data position, on any number of processes, each of which
loads its rows of the batch.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from sparse_dataflow.files.errors import UserError

if TYPE_CHECKING:
    from sparse_dataflow.core.batch import Batch
    from sparse_dataflow.data.masking import Masking

_PREFETCHED_BATCHES = 8


class TokenArray(Protocol):
    """Concatenated tokens, in memory or in files: int [count], read in slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class _Windows:
    """Random-access source of int32 [sequence_length + 1]; drops a partial last window."""

    tokens: TokenArray
    sequence_length: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.sequence_length
        return self.tokens[start : start + self.sequence_length + 1].astype(np.int32)


@dataclass(frozen=True, eq=False)
class TokenMixture:
    """Training tokens of several sources.

    Attributes:
      sources: tokens of each source.
      weights: fraction of the training windows from each source; they add up to 1.
      rounded_weights: whether windows are drawn by small whole numbers near the weights, as in runs
        of older versions.
    """

    sources: tuple[TokenArray, ...]
    weights: tuple[float, ...]
    rounded_weights: bool = False

    def __len__(self) -> int:
        return sum(map(len, self.sources))


def drawn(weights: Sequence[float], phase: float, number: int) -> tuple[int, int]:
    """Returns (source, window of that source) of window `number` of a mixture.

    Source k has its window i at the time (i + offset) / weight, where the offset depends on the
    phase, and windows come in the order of their times: each source by its weight, evenly.

    Args:
      weights: fraction of the windows from each source; they add up to 1.
      phase: in [0, 1), by which mixtures with the same weights, the lanes of streams, differ.
    """
    if len(weights) == 1:
        return 0, number
    counts = drawn_before(weights, phase, number)
    times = _next_times(weights, phase, counts)
    source = times.index(min(times))
    return source, counts[source]


def drawn_before(weights: Sequence[float], phase: float, number: int) -> list[int]:
    """Returns how many of the first `number` windows come from each source."""
    if len(weights) == 1:
        return [number]
    # Every count is near its share, so few windows are drawn one by one.
    least = number - len(weights)
    counts = [max(0, math.floor(least * weight) - 1) for weight in weights]
    while sum(counts) < number:
        times = _next_times(weights, phase, counts)
        counts[times.index(min(times))] += 1
    return counts


def _next_times(weights, phase, counts):
    # Different offsets: sources of equal weight take turns instead of coming together.
    offsets = [(phase + source / len(weights)) % 1 for source in range(len(weights))]
    return [(c + o) / w for c, o, w in zip(counts, offsets, weights, strict=True)]


@dataclass(frozen=True, eq=False)
class TrainBatches:
    """Endless shuffled training batches.

    `batches[step]` has tokens and targets, int32 [len(rows), sequence_length].

    Attributes:
      tokens: tokens of the split, any integer dtype [count], or those of a mixture.
      batch_size: rows of the global batch.
      sequence_length: targets per row.
      seed: shuffle seed, 0 to 2**32 - 1.
      rows: ascending indices of the batch rows that this process loads; None loads all rows.
      masking: hides tokens of the inputs, which are the targets then; None for next tokens.

    Raises:
      UserError: too few tokens for one window, or an illegal size or seed.
    """

    tokens: TokenArray | TokenMixture
    batch_size: int
    sequence_length: int
    seed: int = 0
    rows: tuple[int, ...] | None = None
    masking: "Masking | None" = field(default=None, kw_only=True)

    def __post_init__(self):
        _check_sizes(self.batch_size, self.sequence_length)
        if not 0 <= self.seed < 2**32:
            raise UserError(f"The data seed {self.seed} is out of range; legal: 0 to {2**32 - 1}.")
        self._check_tokens()

    def _check_tokens(self):
        smallest = min((len(windows.tokens), len(windows)) for windows in self._sources)
        if smallest[1] == 0:
            raise UserError(
                f"The train split has {smallest[0]} tokens, too few for one window of "
                f"{self.sequence_length} + 1. Add text or shorten the sequence."
            )

    @property
    def _sources(self) -> list[_Windows]:
        tokens = self.tokens
        sources = tokens.sources if isinstance(tokens, TokenMixture) else (tokens,)
        return [_Windows(tokens, self.sequence_length) for tokens in sources]

    @functools.cached_property
    def _shuffled(self) -> list:
        """The endless shuffled windows of each source."""
        import grain

        return [
            # Shuffle before repeat, so that every epoch has each window once, in an order of its
            # own.
            grain.MapDataset.source(windows).seed((self.seed + number) % 2**32).shuffle().repeat()
            for number, windows in enumerate(self._sources)
        ]

    @functools.cached_property
    def _mixed_by_whole_numbers(self):
        import grain

        assert isinstance(self.tokens, TokenMixture)
        return grain.MapDataset.mix(self._shuffled, self.tokens.weights)

    def __getitem__(self, step: int) -> "Batch":
        if step < 0:
            raise IndexError(step)
        first = step * self.batch_size
        return self.batch([self.window(first + row) for row in local_rows(self)], step)

    def batch(self, windows: Sequence[np.ndarray] | np.ndarray, step: int) -> "Batch":
        """Returns the batch of this process's windows in a step."""
        stacked = np.stack(list(windows))
        if self.masking is None:
            return _from_windows(stacked)
        numbers = [step * self.batch_size + row for row in local_rows(self)]
        return self.masking.training_batch(stacked[:, :-1], numbers, self.batch_size)

    def window(self, number: int) -> np.ndarray:
        """Returns a shuffled window, int32 [sequence_length + 1]; step s begins with s * rows."""
        weights: Sequence[float] = (1.0,)
        if isinstance(self.tokens, TokenMixture):
            if self.tokens.rounded_weights:
                return self._mixed_by_whole_numbers[number]
            weights = self.tokens.weights
        source, window = drawn(weights, 0.0, number)
        return self._shuffled[source][window]

    @property
    def example(self) -> "Batch":
        """A batch for programs that need its shape and time alone."""
        return self[0]

    @property
    def skipped_words(self) -> str:
        """How many rows of the corpus were left out while training, and why; "" for none."""
        return ""

    def positions(self, step: int) -> object:
        """Returns what a checkpoint stores besides the step; None, as a step is all it takes."""
        return None

    def resume(self, positions: object) -> None:
        """Takes the `positions` of a checkpoint."""

    def iterate(self, start_step: int = 0, threads: int = 2) -> Iterator["Batch"]:
        """Yields batches `start_step`, `start_step + 1`, ... endlessly, prefetched by threads.

        Args:
          start_step: first step, 0 or more.
          threads: number of reader threads; 0 reads in the caller's thread.
        """
        import grain

        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=_PREFETCHED_BATCHES)
        # Endless for any run; grain's reader wants a length.
        steps = grain.MapDataset.range(start_step, start_step + 2**48)
        return iter(steps.map(self.__getitem__).to_iter_dataset(options))


@dataclass(frozen=True, eq=False)
class EvalBatches:
    """Windows of a split in order, up to `max_windows`, identical at every evaluation.

    They are the first ones, or with `spread` at equal distances over the whole split, so that few
    windows are of many documents.

    `batches[i]` has tokens, targets and their weights, [len(rows), sequence_length]. Weights are 1
    for targets and 0 for the padding of the last window and the last batch. See `TrainBatches` for
    `rows`.

    Raises:
      UserError: fewer than two tokens, or an illegal size.
    """

    tokens: TokenArray
    batch_size: int
    sequence_length: int
    max_windows: int | None = None
    rows: tuple[int, ...] | None = None
    spread: bool = False

    def __post_init__(self):
        _check_sizes(self.batch_size, self.sequence_length)
        if self.max_windows is not None and self.max_windows < 1:
            raise UserError(f"max_windows {self.max_windows} is too small; legal: 1 or more.")
        if len(self.tokens) < 2:
            raise UserError("The validation split has fewer than two tokens. Add text.")

    @property
    def available(self) -> int:
        """Number of windows of the split, including a partial last window."""
        return math.ceil((len(self.tokens) - 1) / self.sequence_length)

    @property
    def windows(self) -> int:
        """Number of windows evaluated by all processes, including a partial last window."""
        return min(self.available, self.max_windows or self.available)

    def place(self, number: int) -> int:
        """Returns which window of the split the window `number` of the evaluation is."""
        return number * self.available // self.windows if self.spread else number

    @property
    def total_tokens(self) -> int:
        """Number of targets with weight 1 over all batches and processes."""
        # Of fewer windows than there are none is the shorter last one, also where they are spread.
        return min(len(self.tokens) - 1, self.windows * self.sequence_length)

    def total_bytes(self, token_bytes: np.ndarray) -> int:
        """Returns the UTF-8 bytes of the `total_tokens` targets.

        Args:
          token_bytes: bytes of each token, int32 [vocab_size]; see `Tokenizer.token_bytes`.
        """
        length = self.sequence_length
        # The targets begin one token after the inputs.
        starts = (1 + self.place(number) * length for number in range(self.windows))
        return sum(
            int(token_bytes[self.tokens[start : start + length]].sum(dtype=np.int64))
            for start in starts
        )

    def __len__(self) -> int:
        return math.ceil(self.windows / self.batch_size)

    def __getitem__(self, index: int) -> "Batch":
        if not 0 <= index < len(self):
            raise IndexError(index)
        rows, length = local_rows(self), self.sequence_length
        tokens = np.zeros((len(rows), length + 1), np.int32)
        weights = np.zeros((len(rows), length), np.float32)
        for local_row, row in enumerate(rows):
            number = index * self.batch_size + row
            if number < self.windows:
                start = self.place(number) * length
                # One token more than the length: inputs are all but the last, targets all but the
                # first.
                window = self.tokens[start : start + length + 1]
                tokens[local_row, : len(window)] = window
                weights[local_row, : len(window) - 1] = 1
        return _from_windows(tokens, weights)

    def __iter__(self) -> Iterator["Batch"]:
        return (self[index] for index in range(len(self)))


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskedEvalBatches(EvalBatches):
    """Windows in order whose hidden tokens count, the same ones in every evaluation of any run.

    Ends of text follow a last, shorter window.  See `EvalBatches`.
    """

    masking: "Masking"

    def __getitem__(self, index: int) -> "Batch":
        batch = super().__getitem__(index)
        real = batch.token_weights > 0
        places = [self.place(index * self.batch_size + row) for row in local_rows(self)]
        # The last token of a shorter window is an input too, and no target.
        after = np.arange(real.shape[1]) > real.sum(axis=1, keepdims=True)
        inputs = np.where(after, np.int32(self.masking.end_id), batch.tokens)
        return self.masking.hidden(inputs, real, places)

    @functools.cached_property
    def targets(self) -> np.ndarray:
        """The hidden tokens of all processes, int32, in order."""
        # The rows of all processes, so that each has the same count.
        batches = replace(self, rows=None)
        return np.concatenate([batch.targets[batch.token_weights > 0] for batch in batches])

    @property
    def total_tokens(self) -> int:
        """Number of hidden tokens over all batches and processes."""
        return len(self.targets)

    def total_bytes(self, token_bytes: np.ndarray) -> int:
        """Returns the UTF-8 bytes of the hidden tokens."""
        return int(token_bytes[self.targets].sum(dtype=np.int64))


def local_rows(batches: TrainBatches | EvalBatches) -> Sequence[int]:
    """Returns the indices of the rows of a batch that this process loads."""
    return range(batches.batch_size) if batches.rows is None else batches.rows


def _from_windows(*arrays):
    from sparse_dataflow.core.batch import Batch  # Loads jax, which sizes do not need.

    return Batch.from_windows(*arrays)


def _check_sizes(batch_size: int, sequence_length: int) -> None:
    if batch_size < 1 or sequence_length < 1:
        raise UserError(
            f"A batch of {batch_size} rows of {sequence_length} tokens is empty; "
            "legal: 1 or more of each."
        )
