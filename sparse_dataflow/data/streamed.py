"""Corpora whose files stay where they are: what is streamed, and what is held out of it.

The held-out documents are the first ones of the validation or test split.  A corpus without one
holds out the first twentieth of what begins its first file.  Rows of training with the text of a
held-out document are left out, wherever they are.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sparse_dataflow.data import held_out, shards
from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.local_files import say_once
from sparse_dataflow.data.shards import Shard, Skipped
from sparse_dataflow.files.errors import UserError

FORMAT = 2
"""Part of a corpus's identity: raise it when other documents are held out or joined otherwise."""

HELD_OUT_CHARACTERS = 8 * 2**20
"""Most characters of held-out text."""

HELD_OUT_OF = 20
MOST_PARTS = 64
"""Shards that the files of a corpus are divided into, where they are fewer and Parquet."""


@dataclass(frozen=True)
class Stream:
    """The training documents of a corpus that is streamed.

    Attributes:
      shards: its shards, without held-out documents.
      column: column or field with the text.
      file_bytes: bytes of the files, compressed or not.
      held_out: digests of text that is not trained; see `held_out.Sides`.
    """

    name: str
    shards: tuple[Shard, ...]
    column: str
    file_bytes: int
    held_out: np.ndarray = field(default_factory=lambda: held_out.NO_DIGESTS, compare=False)

    def texts(self, shard: Shard, row: int, skipped: Skipped) -> Iterator[tuple[int, str]]:
        """Yields the number and the text of each row that is trained; see `shards.texts`."""
        rows = shards.texts(shard, self.column, row, skipped)
        if not len(self.held_out):
            yield from rows
            return
        for number, text in rows:
            if held_out.among(np.array([held_out.digest(text)], np.uint64), self.held_out)[0]:
                skipped.add("of held-out text", f"{shards.short(shard.address)}, row {number}")
            else:
                yield number, text


def with_text(stream: Stream) -> Stream:
    """Returns a stream without the shards of which no document is trained; of a stream of many
    shards all stay, or none."""

    def has_text(shard):
        return next(_beginning([shard], stream.texts, 1), None) is not None

    if len(stream.shards) <= SampleDocuments.SHARDS:
        kept = tuple(filter(has_text, stream.shards))
        left = {shards.short(s.address): None for s in stream.shards if s not in kept}
        if kept and left:
            say_once(f"{stream.name}: left out, as they have no text to train: {', '.join(left)}")
        return replace(stream, shards=kept)
    return stream if any(map(has_text, stream.shards)) else replace(stream, shards=())


class SampleDocuments(Sequence[Document]):
    """The first documents of some shards of a stream, read when first needed.

    A tokenizer is trained on them, and evaluation compares with them.
    """

    SHARDS = 16
    CHARACTERS = 4 * 2**20

    def __init__(self, stream: Stream):
        self._stream = stream

    @property
    def identity(self) -> dict[str, object]:
        """See `documents.identity`; nothing is read for it."""
        return {
            "code": FORMAT,
            "stream": self._stream,
            "held out": self._stream.held_out.tobytes(),
            "size": [self.SHARDS, self.CHARACTERS],
        }

    @functools.cached_property
    def _documents(self) -> list[Document]:
        stream = self._stream
        # Spread over the whole corpus, whose first shards may be of one kind of text.
        step = max(1, len(stream.shards) // self.SHARDS)
        documents = [
            document
            for shard in stream.shards[::step][: self.SHARDS]
            for _, document in _beginning([shard], stream.texts, self.CHARACTERS)
        ]
        if not documents:
            raise UserError(f"The corpus {stream.name} has no text.")
        return documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:  # type: ignore[override]
        return self._documents[index]


@dataclass(frozen=True)
class StreamedCorpus:
    """A stream and its held-out documents.

    Attributes:
      validation: held-out documents, in memory.
      identity: what tells the corpus from others without reading it, JSON-able.
    """

    stream: Stream
    validation: list[Document]
    identity: list


def streamed_corpus(
    name: str, splits: Mapping[str, Sequence[str]], column: str = "", whole: bool = False
) -> StreamedCorpus:
    """Opens a corpus of files that are read while training.

    Args:
      splits: {split: addresses of its files}.
      column: see `shards.text_column`.
      whole: whether no document of the split "train" is held out.

    Raises:
      UserError: there is no split "train", or a file cannot be read or has no text.
    """
    if not splits.get("train"):
        raise UserError(
            f"The corpus {name} has no split 'train'; its splits: {', '.join(splits) or 'none'}."
        )
    split = next((split for split in ("validation", "test") if splits.get(split)), "")
    held = set() if whole else set(splits.get(split, ()))
    files = [file for file in splits["train"] if file not in held]
    if not files:
        raise UserError(
            f"The corpus {name} has the same files in its splits 'train' and {split!r}."
        )
    if both := [shards.short(file) for file in splits["train"] if file in held]:
        say_once(f"{name}: held out, as 'train' and {split!r} have them: {', '.join(both)}")
    column = shards.text_column(files[0], column)
    skip, training = 0, _divided(files)
    texts = Stream(name, (), column, 0).texts
    if whole:
        validation = []
    elif split:
        rows = _beginning(map(Shard, splits[split]), texts, HELD_OUT_CHARACTERS)
        validation = [document for _, document in rows]
    else:
        validation, skip = _first_rows(name, files[0], texts)
        # A part that ends before the first row of training has nothing to train on.
        training = [
            replace(shard, skip=skip) if shard.address == files[0] else shard
            for shard in training
            if shard.address != files[0] or shard.rows is None or shard.rows[1] > skip
        ]
    sizes = {shards.short(file): shards.size(file) for file in files}
    digests = np.unique(held_out.digests(validation)[:, 0])
    stream = Stream(name, tuple(training), column, sum(sizes.values()), digests)
    # Names and sizes: to read all of the files could take a day.
    identity = [FORMAT, column, split, skip, sorted(sizes.items())]
    return StreamedCorpus(stream, validation, identity)


def _beginning(
    sources: Iterable[Shard], texts: Callable, characters: int
) -> Iterator[tuple[int, Document]]:
    """Yields rows with their documents until they have so many characters."""
    for shard in sources:
        for row, text in texts(shard, 0, Skipped()):
            yield row, Document(f"{shards.short(shard.address)}:{row}", text)
            characters -= len(text)
            if characters <= 0:
                return


def _first_rows(name, file, texts) -> tuple[list[Document], int]:
    """Returns the held-out documents of the first file, and how many of its rows they take."""
    most = HELD_OUT_OF * HELD_OUT_CHARACTERS // 2
    documents = list(_beginning([Shard(file)], texts, most))
    if len(documents) < 2:
        raise UserError(
            f"The first file of {name} has {len(documents)} documents; legal: 2 or more, as one is "
            "held out."
        )
    count = math.ceil(len(documents) / HELD_OUT_OF)
    return [document for _, document in documents[:count]], documents[count][0]


def _divided(files) -> list[Shard]:
    """Returns the files as shards; the row groups of a few Parquet files are many shards."""
    parts = math.ceil(MOST_PARTS / len(files))
    if parts == 1:
        return [Shard(file) for file in files]
    return [
        shard
        for file in files
        for shard in (shards.parts(file, parts) if shards.is_parquet(file) else [Shard(file)])
    ]
