"""Training batches from lanes: streamed corpora, and mixtures that have one.

Row r of a batch comes from lane r * lanes // batch, in which the rows of all steps take one window
after another.  So batch s depends on s alone, and a process reads the lanes of its rows.  In a
mixture each lane takes windows of each corpus by its weight.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from sparse_dataflow.core import collectives
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.data.batches import TrainBatches, drawn, drawn_before, local_rows
from sparse_dataflow.data.cache import TokenArray
from sparse_dataflow.data.lanes import (
    Ahead,
    BlockStarts,
    Lane,
    Position,
    lane_count,
    windows_a_block,
)
from sparse_dataflow.data.shards import Skipped
from sparse_dataflow.data.streamed import Stream
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files.errors import UserError

NO_TOKENS = np.empty(0, np.int32)
"""`tokens` of `StreamBatches`, whose tokens are in its sources."""

_UNKNOWN = -1


class _Windows(Protocol):
    def window(self, number: int) -> np.ndarray:
        """Returns window `number` of a lane, int32 [length + 1]."""


@dataclass(frozen=True, eq=False)
class _StoredLane:
    """A lane's share of the shuffled windows of stored tokens."""

    batches: TrainBatches
    number: int
    lanes: int

    def window(self, number: int) -> np.ndarray:
        # Lanes take the windows in turns.
        return self.batches.window(number * self.lanes + self.number)


@dataclass(frozen=True, eq=False)
class StreamBatches(TrainBatches):
    """Endless training batches of streams; see `TrainBatches` for the other attributes.

    Attributes:
      sources: a stream, or stored tokens in a mixture with one.
      weights: fraction of the windows from each source; they add up to 1.
      tokenizer: encodes the documents of the streams.
      skipped: counts the rows of the streams that were left out.
    """

    sources: tuple[Stream | TokenArray, ...] = ()
    weights: tuple[float, ...] = (1.0,)
    tokenizer: Tokenizer = field(kw_only=True)
    skipped: Skipped = field(default_factory=Skipped)
    _starts: BlockStarts = field(default_factory=BlockStarts)
    _lanes: dict[tuple[int, int], Any] = field(default_factory=dict)
    _ahead: Ahead = field(default_factory=Ahead)

    def _check_tokens(self):
        for number, source in enumerate(self.sources):
            if not isinstance(source, Stream):
                self._stored(number)  # Refuses too few tokens.

    @property
    def lanes(self) -> int:
        """Number of lanes, the same on any number of processes."""
        streams = [source for source in self.sources if isinstance(source, Stream)]
        return lane_count(streams, self.batch_size)

    @property
    def _windows_a_block(self):
        return windows_a_block(self.batch_size, self.sequence_length, self.lanes)

    @property
    def rows_a_lane(self) -> int:
        """Rows of a batch that come from a lane."""
        return self.batch_size // self.lanes

    @property
    def example(self) -> Batch:
        """A batch of random tokens, which reads nothing."""
        shape, size = (self.batch_size, self.sequence_length + 1), self.tokenizer.vocab_size
        tokens = np.random.default_rng(0).integers(0, size, shape, np.int32)
        return self.batch(tokens[list(local_rows(self))], 0)

    @property
    def skipped_words(self) -> str:
        """See `TrainBatches`."""
        return self.skipped.words()

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(step)
        return self.batch([self._row(step, row) for row in local_rows(self)], step)

    def iterate(self, start_step: int = 0, threads: int = 2) -> Iterator[Batch]:
        """Yields batches `start_step`, `start_step + 1`, ... endlessly, with lanes of its own, so
        that models that train side by side do not read each other's place."""
        own = replace(self, _lanes={}, _ahead=Ahead())
        return TrainBatches.iterate(own, start_step, threads)

    def _row(self, step, row):
        lane, place = divmod(row, self.rows_a_lane)
        number = step * self.rows_a_lane + place
        # Lanes differ in phase, so that they do not all take the same source at once.
        source, count = drawn(self.weights, lane / self.lanes, number)
        windows = self._lane(source, lane)
        if isinstance(windows, Lane):
            block = count // windows.windows_a_block
            # The next block is read while this one is trained.
            # Once per block and not per window: each call would be another task for the same block.
            if windows.first_use(block):
                self._ahead.submit(lambda: windows.block(block + 1))
        return windows.window(count)

    def _stored(self, number):
        seed = (self.seed + number) % 2**32
        return TrainBatches(self.sources[number], self.batch_size, self.sequence_length, seed)

    def _lane(self, number, lane) -> Any:
        key = number, lane
        if key not in self._lanes:
            source = self.sources[number]
            if isinstance(source, Stream):
                windows: _Windows = Lane(
                    source,
                    lane,
                    self.lanes,
                    self.tokenizer,
                    (self.seed + number) % 2**32,
                    self.sequence_length,
                    self._windows_a_block,
                    self._starts,
                    self.skipped,
                    key,
                )
            else:
                windows = _StoredLane(self._stored(number), lane, self.lanes)
            # Another thread may have made it meanwhile.
            windows = self._lanes.setdefault(key, windows)
        return self._lanes[key]

    def positions(self, step: int) -> list:
        """Returns where each lane is after `step` steps, JSON-able: for each source and each
        lane its block, epoch, shard, row and token; all processes call it.

        Each process knows the lanes that it reads.  Stored tokens need no position and have -1.
        """
        shape = len(self.sources), self.lanes, 1 + len(Position._fields)
        table = np.full(shape, _UNKNOWN, np.int32)
        streams = [n for n, source in enumerate(self.sources) if isinstance(source, Stream)]
        for lane in range(self.lanes):
            counts = drawn_before(self.weights, lane / self.lanes, step * self.rows_a_lane)
            for source in streams:
                block = counts[source] // self._windows_a_block
                newest, start = self._starts.latest((source, lane), block)
                table[source, lane] = (newest, *start)
        return collectives.newest(table).tolist()

    def resume(self, positions: object) -> None:
        """Takes the positions of a checkpoint, which are not trusted.

        Raises:
          UserError: they are not those of these sources and lanes.
        """
        shape = len(self.sources), self.lanes, 1 + len(Position._fields)
        try:
            table = np.asarray(positions)
        except ValueError:  # Lists of several lengths.
            table = np.empty(0)
        if table.shape != shape or table.dtype.kind != "i":
            raise UserError(
                f"The checkpoint has data positions of the shape {table.shape}, and this corpus "
                f"and batch have {shape}; resume with the corpus and batch of its run."
            )
        for source, lane in np.ndindex(*shape[:2]):
            block, *place = map(int, table[source, lane])
            # No process knew the others.
            if min(block, *place) >= 0:
                self._starts.add((source, lane), block, Position(*place))
