"""A corpus that is too large to store: its shards are read and tokenised beside the training.

The shards are dealt to lanes, whose number depends on the corpus and the batch alone.  A lane reads
its shards in an order drawn from the seed, again and again, and joins the tokens of their documents
to windows.  It shuffles the windows of a block, its buffer.  So window i of a lane depends on i
alone.  The place in the corpus where a block begins is a `Position`, which a checkpoint stores: a
resumed run opens the shard at that document and reads nothing before it.
"""

import collections
import functools
import hashlib
import logging
import queue
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sparse_dataflow.data.shards import Skipped
from sparse_dataflow.data.streamed import Stream
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files.errors import UserError

_LOG = logging.getLogger(__name__)

MOST_LANES = 64

BUFFER_TOKENS, BUFFER_BATCHES = 2**24, 16
"""Tokens that all lanes together shuffle at a time, and batches, where those are fewer tokens.  The
order of the windows depends on both."""

_ENCODED_CHARACTERS = 2**18
_BLOCKS_KEPT = 3
_STARTS_KEPT = 4096
_READERS = 2


class Position(NamedTuple):
    """A token of a lane: its place in the corpus.

    Attributes:
      epoch: times that the lane has read all of its shards.
      shard: number in the order of that epoch.
      row: row of its document in the file of the shard.
      token: token of the document.
    """

    epoch: int = 0
    shard: int = 0
    row: int = 0
    token: int = 0


class BlockStarts:
    """Where the blocks of lanes begin in the corpus, as far as that is known; any thread may call.

    Block 0 of every lane begins at `Position()`.  Old blocks are forgotten.
    """

    def __init__(self):
        self._starts: dict[Hashable, dict[int, Position]] = {}
        self._lock = threading.Lock()

    def add(self, lane: Hashable, block: int, start: Position) -> None:
        """Records where a block of a lane begins."""
        with self._lock:
            starts = self._starts.setdefault(lane, {})
            starts[block] = start
            if len(starts) > _STARTS_KEPT:
                # The oldest one: a dict keeps its order.
                del starts[next(iter(starts))]

    def latest(self, lane: Hashable, block: int) -> tuple[int, Position]:
        """Returns the last block up to `block` of which the beginning is known, and where it is."""
        with self._lock:
            newest = max((n for n in self._starts.get(lane, {}) if n <= block), default=0)
            return newest, self._starts.get(lane, {}).get(newest, Position())


def lane_count(streams: Sequence[Stream], batch: int) -> int:
    """Returns the number of lanes: the largest divisor of the batch for which each lane has a shard
    of each stream."""
    most = min([MOST_LANES, *(len(stream.shards) for stream in streams)])
    return max(count for count in range(1, most + 1) if batch % count == 0)


def windows_a_block(batch: int, length: int, lanes: int) -> int:
    """Returns the windows of a lane that are shuffled together, for a batch of `batch` windows."""
    return max(1, min(BUFFER_TOKENS // length, BUFFER_BATCHES * batch) // lanes)


class Lane:
    """The windows of one lane of a stream.

    Args:
      stream: the corpus.
      tokenizer: encodes the documents; see `Tokenizer.as_document`.
      seed: draws the order of shards and windows.
      length: targets of a window, which has one token more.
      windows_a_block: windows that are shuffled together; see `windows_a_block`.
      starts: where blocks begin, which the lane extends.
      key: names the lane in `starts`.
      skipped: counts rows that are left out.
    """

    def __init__(
        self,
        stream: Stream,
        number: int,
        lanes: int,
        tokenizer: Tokenizer,
        seed: int,
        length: int,
        windows_a_block: int,
        starts: BlockStarts,
        skipped: Skipped,
        key: Hashable = None,
    ):
        self._stream, self._number, self._seed = stream, number, seed
        # Every `lanes`-th shard, so that lanes have about equally many, of all parts of the corpus.
        self._shards = stream.shards[number::lanes]
        self._tokenizer, self._length = tokenizer, length
        self._starts, self._skipped, self._key = starts, skipped, key
        self.windows_a_block = windows_a_block
        self._blocks: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._reader: _Reader | None = None
        self._newest = -1

    def window(self, number: int) -> np.ndarray:
        """Returns a window, int32 [length + 1]; reads its block if that is not in memory."""
        block, place = divmod(number, self.windows_a_block)
        return self.block(block)[self._order(block)[place]]

    def first_use(self, block: int) -> bool:
        """Returns whether this is the first call with this block."""
        first, self._newest = block > self._newest, max(block, self._newest)
        return first

    def block(self, number: int) -> np.ndarray:
        """Returns the windows of a block in the order of the corpus, int32 [windows, length + 1].

        Raises:
          UserError: see `shards.texts`, or the lane has no text.
        """
        with self._lock:
            if number not in self._blocks:
                # Blocks vary in documents, so where one begins is known only by reading those
                # before it.
                known, start = self._starts.latest(self._key, number)
                if known < number - 1 and self._number == 0:
                    _LOG.info("%s: reads again from block %d", self._stream.name, known)
                for block in range(known, number + 1):
                    windows, start = self._read(block, start)
                self._blocks[number] = windows
                while len(self._blocks) > _BLOCKS_KEPT:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(number)
            return self._blocks[number]

    def _read(self, block, start):
        """Returns the windows of the block that begins at `start`, and where the next begins."""
        reader = self._reader
        if reader is None or reader.position != start:
            reader = self._reader = _Reader(functools.partial(self._documents, start), start)
        self._reader = None  # A reader that fails is not used again.
        count = self.windows_a_block * self._length
        tokens = reader.take(count)
        self._reader = reader
        self._starts.add(self._key, block + 1, reader.position)
        # [windows, length + 1]: neighbouring windows share a token, the last target of one.
        rows = np.arange(self.windows_a_block)[:, None] * self._length
        return tokens[rows + np.arange(self._length + 1)], reader.position

    @functools.lru_cache(maxsize=4)  # noqa: B019  # A lane lives as long as its run.
    def _order(self, block):
        return _permutation(self.windows_a_block, self._seed, self._number, "block", block)

    def _documents(self, start: Position) -> Iterator[tuple[Position, np.ndarray]]:
        """Yields the position and the tokens of each document from that of `start` on."""
        epoch, first, row = start.epoch, start.shard, start.row
        while True:
            count = 0
            # Drawn from the epoch's number, so a position in it is all that a checkpoint needs.
            order = _permutation(len(self._shards), self._seed, self._number, "epoch", epoch)
            for place in range(first, len(order)):
                shard = self._shards[order[place]]
                rows = self._stream.texts(shard, row, self._skipped)
                for number, tokens in self._encoded(rows):
                    yield Position(epoch, place, number), tokens
                    count += 1
                # Only the first shard begins inside.
                row = 0
            # Without this check a corpus without text would be read for ever.
            if not count and not first:
                raise UserError(
                    f"The corpus {self._stream.name} has no text in "
                    f"{', '.join(shard.address for shard in self._shards[:3])}, beside rows that "
                    "are left out as they are held out or empty; legal: text in each file."
                )
            epoch, first = epoch + 1, 0
            if self._number == 0:
                _LOG.info("corpus %s: epoch %d begins", self._stream.name, epoch + 1)

    def _encoded(self, rows):
        pending, size = [], 0
        for number, text in rows:
            pending.append((number, text))
            size += len(text)
            # Many documents at once, as the tokenizer uses all cores for a batch.
            if size >= _ENCODED_CHARACTERS:
                yield from self._encode(pending)
                pending, size = [], 0
        yield from self._encode(pending)

    def _encode(self, rows):
        encoded = self._tokenizer.encode_documents([text for _, text in rows])
        yield from zip((number for number, _ in rows), encoded, strict=True)


class _Reader:
    """Takes tokens from documents, from a position on.

    Attributes:
      position: of the next token.
    """

    def __init__(self, documents: Callable[[], Iterator], start: Position):
        self._documents, self.position = documents(), start
        self._rest: list[tuple[Position, np.ndarray]] = []
        self._skip = start.token

    def take(self, count: int) -> np.ndarray:
        """Returns the next `count` tokens and the one after them, which the next call begins
        with."""
        pieces, total = self._rest, sum(len(tokens) for _, tokens in self._rest)
        # One token more than `count`: the last target of a window is the first input of the next,
        # so neighbours share it.  It also gives the position of the next call: `_rest` is never
        # empty.
        while total <= count:
            place, tokens = next(self._documents)
            place, tokens = place._replace(token=self._skip), tokens[self._skip :]
            self._skip = 0
            pieces.append((place, tokens))
            total += len(tokens)
        taken = np.concatenate([tokens for _, tokens in pieces])[: count + 1]
        self._rest = []
        for place, tokens in pieces:
            used = min(count, len(tokens))
            count -= used
            if used < len(tokens):
                self._rest.append((place._replace(token=place.token + used), tokens[used:]))
        self.position = self._rest[0][0]
        return taken


def _permutation(count: int, *key: object) -> list[int]:
    """Returns an order of range(count) that is the same with every version of every library."""
    prefix = ":".join(map(str, key)).encode()
    digest = lambda index: hashlib.blake2b(b"%s:%d" % (prefix, index), digest_size=8).digest()  # noqa: E731
    return sorted(range(count), key=digest)


class Ahead:
    """Threads that do work before it is needed; they never keep the process alive."""

    def __init__(self):
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._started = False
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], object]) -> None:
        """Calls `work` on a thread; its error comes again where its result is needed."""
        with self._lock:
            if not self._started:
                self._started = True
                for number in range(_READERS):
                    threading.Thread(target=self._run, name=f"stream-{number}", daemon=True).start()
        self._queue.put(work)

    def _run(self):
        while True:
            work = self._queue.get()
            try:
                work()
            except Exception as error:
                _LOG.debug("reading ahead failed: %s", error)
