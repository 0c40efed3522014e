"""The ids of `token_files` as the tokens of a tokenizer, checked, counted and as text."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sparse_dataflow.data import token_files
from sparse_dataflow.data.cache import ChainedArray, MappedArray, Ranges, remembered
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.local_files import say_once
from sparse_dataflow.data.token_files import TokenSplits
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files.errors import UserError

_CHUNK = 2**22
_COUNTS_VERSION = 1
"""Raise it when other tokens are counted."""


@dataclass(frozen=True)
class Counts:
    """What one pass over token ids counted.

    Attributes:
      documents: ends of text, and one more for ids after the last of them.
      text_bytes: UTF-8 bytes of the tokens.
    """

    documents: int
    text_bytes: int


def mapped(
    name: str, array: ChainedArray | Ranges, tokenizer: Tokenizer, cache_dir: Path
) -> tuple[MappedArray, Counts]:
    """Returns the ids as those of a tokenizer, after a pass over all of them, of which the cache
    keeps the result.

    Raises:
      UserError: an id is not in the vocabulary.
    """
    ids = _mapped_ids(name, array, tokenizer)
    origin = {
        "code": _COUNTS_VERSION,
        "ids": token_files.identity(array),
        "tokenizer": tokenizer.content_hash,
    }
    counts = remembered(
        cache_dir, "tokens", "counts", origin, lambda: asdict(_counted(ids, tokenizer))
    )
    return ids, Counts(**counts)


def _mapped_ids(name, array, tokenizer) -> MappedArray:
    table = tokenizer.ids_from_original if tokenizer.original else np.empty(0, np.int32)
    return MappedArray(name, array, table, tokenizer.vocab_size)


def _counted(ids, tokenizer) -> Counts:
    bytes_of = np.asarray(tokenizer.token_bytes, np.int64)
    documents = text_bytes = 0
    for first in range(0, len(ids), _CHUNK):
        chunk = ids[first : first + _CHUNK]
        documents += int((chunk == tokenizer.eot_id).sum())
        text_bytes += int(bytes_of[chunk].sum())
    if len(ids) and ids[len(ids) - 1 : len(ids)][0] != tokenizer.eot_id:
        documents += 1
    return Counts(documents, text_bytes)


_RANGES_VERSION = 1
"""Raise it when other documents are left out."""


def trained(
    name: str, splits: TokenSplits, tokenizer: Tokenizer, cache_dir: Path
) -> ChainedArray | Ranges:
    """Returns the training ids without the documents that are held out, and says how many it leaves
    out; documents are those between ends of text.

    The end of an unknown tokenizer is a guess, so its ids are returned whole, with a note.

    Raises:
      UserError: no document is left.
    """
    if not tokenizer.has_text:
        say_once(
            f"{name}: which id ends a document is not known, so copies of held-out documents are "
            "trained; data.tokenizer names the tokenizer that wrote the ids"
        )
        return splits.train
    end = tokenizer.eot_id
    end = tokenizer.original_ids[end] if tokenizer.original else end
    validation = (splits.validation, *splits.elsewhere)
    # All documents are compared once, and their ranges are kept, by all that decides them.
    origin = {
        "code": _RANGES_VERSION,
        "train": token_files.identity(splits.train),
        "held out": [token_files.identity(array) for array in validation],
        "end": end,
    }
    facts = remembered(
        cache_dir,
        "tokens",
        "ranges",
        origin,
        lambda: _ranges_without(splits.train, validation, end),
    )
    # The array itself, as reading through ranges costs a search for each slice.
    if facts["apart"] and not facts["left_out"]:
        return splits.train
    if not facts["apart"]:
        say_once(
            f"{name}: no held-out id is {end}, which ends documents, so they cannot be told apart, "
            "and copies of held-out ones are trained"
        )
        return splits.train
    if not facts["ranges"]:
        raise UserError(
            f"{name}: all of its {facts['left_out']} documents are held out, so it has nothing to "
            "train on; legal: ids that are not held out."
        )
    say_once(f"{name}: {facts['left_out']:,} documents of training are held out, and left out")
    return Ranges(splits.train, np.array(facts["ranges"], np.int64).reshape(-1, 2))


def _ranges_without(train, validation, end) -> dict[str, object]:
    digests, apart = set(), False
    for array in validation:
        for _, stop, digest in _documents(array, end):
            apart = apart or int(array[stop - 1 : stop][0]) == end
            digests.add(digest)
    ranges: list[list[int]] = []
    left_out, previous = 0, 0
    for start, stop, digest in _documents(train, end) if apart else ():
        if digest in digests:
            left_out += 1
            # Documents that stay and are neighbours are one range.
            ranges += [[previous, start]] if previous < start else []
            previous = stop
    ranges += [[previous, len(train)]] if previous < len(train) else []
    return {"apart": apart, "left_out": left_out, "ranges": ranges}


def _documents(array, end) -> Iterator[tuple[int, int, bytes]]:
    """Yields the first id, the one after the last, and a digest of the ids of each document; its
    end of text is the last."""
    start, hasher = 0, hashlib.blake2b(digest_size=16)
    size = 0
    for first in range(0, len(array), _CHUNK):
        chunk = np.asarray(array[first : first + _CHUNK]).astype("<i8")
        previous = 0
        for place in np.flatnonzero(chunk == end).tolist():
            # As int64, so that copies are found between files of other dtypes.
            hasher.update(chunk[previous:place].tobytes())
            size += place - previous
            if size:
                yield start, first + place + 1, hasher.digest()
            start, previous, size = first + place + 1, place + 1, 0
            hasher = hashlib.blake2b(digest_size=16)
        hasher.update(chunk[previous:].tobytes())
        size += len(chunk) - previous
    if size:
        yield start, len(array), hasher.digest()


class IdDocuments(Sequence[Document]):
    """The first documents of token ids as text, up to a few thousand tokens each."""

    LONGEST, MOST = 4096, 256

    def __init__(self, name: str, ids: Any, tokenizer: Tokenizer):
        head = ids[: self.LONGEST * self.MOST]
        ends = np.flatnonzero(head == tokenizer.eot_id)
        documents = [row[row != tokenizer.eot_id] for row in np.split(head, ends + 1)]
        documents = [row[: self.LONGEST] for row in documents if len(row)][: self.MOST]
        self._name, self._documents, self._tokenizer = name, documents, tokenizer

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:  # type: ignore[override]
        text = self._tokenizer.decode(self._documents[index])
        return Document(f"{self._name}:{range(len(self))[index]}", text)


def with_text(corpus: Corpus, tokenizer: Tokenizer) -> Corpus:
    """Returns a corpus of token ids with the text of some held-out documents, any other as it is;
    an unknown tokenizer gives none."""
    if corpus.ids is None or not tokenizer.has_text:
        return corpus
    ids = _mapped_ids(f"The corpus {corpus.name}", corpus.ids.validation, tokenizer)
    return replace(corpus, validation=IdDocuments(corpus.name, ids, tokenizer))
