"""The splits of a corpus as arrays of tokens on disk.

An end-of-text token follows each document. The files are derived files of the cache. A process that
is killed leaves a partial file with a record of its progress, and the next one continues there.
"""

import functools
import json
import logging
import os
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sparse_dataflow.data import token_ids, tokenizer_library
from sparse_dataflow.data.cache import ChainedArray, MappedArray, StoredArray, derive
from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.documents import Document, identity
from sparse_dataflow.data.fetched import with_progress
from sparse_dataflow.data.lost_text import lost_words
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import escaped

_LOG = logging.getLogger(__name__)

_FORMAT = 2
"""Raise it when the same documents become other tokens."""
_BATCH_CHARACTERS = 2**20
_CHUNK = 2**24  # tokens
_SAVED_BYTES = 2**26
"""Bytes of tokens after which the progress is recorded."""
_BATCHES_AHEAD = 2


@dataclass(frozen=True, eq=False)
class SplitTokens:
    """A tokenised split.

    Attributes:
      tokens: uint16 or uint32 [count], read slice by slice.
      text_bytes: UTF-8 bytes of all documents.
    """

    tokens: StoredArray | ChainedArray | MappedArray
    documents: int
    text_bytes: int


@dataclass(frozen=True, eq=False)
class CorpusTokens:
    """Both tokenised splits of a corpus."""

    train: SplitTokens
    validation: SplitTokens


@dataclass(frozen=True)
class _Progress:
    """What a file of tokens has of its documents."""

    count: int = 0
    documents: int = 0
    text_bytes: int = 0
    crc32: int = 0


def prepare_tokens(corpus: Corpus, tokenizer: Tokenizer, cache_dir: Path) -> CorpusTokens:
    """Opens the tokens of both splits; tokenises them the first time, in batches of a few MiB.

    The tokens of a mixture are those of its corpora, one after another.

    Raises:
      UserError: the cache folder cannot be written.
    """
    return CorpusTokens(
        *(split_tokens(corpus, split, tokenizer, cache_dir) for split in ("train", "validation"))
    )


def split_tokens(corpus: Corpus, split: str, tokenizer: Tokenizer, cache_dir: Path) -> SplitTokens:
    """Opens the tokens of a split, "train" or "validation"; see `prepare_tokens`.  The training
    tokens of a stream are those of its sample."""
    own = split == "validation" and corpus.own_validation
    if corpus.mixture and not own:
        sources = [split_tokens(s, split, tokenizer, cache_dir) for _, s, _ in corpus.mixture]
        return _chained(sources)
    if corpus.ids:
        name = f"The corpus {corpus.name}"
        array = getattr(corpus.ids, split)
        if split == "train":
            array = token_ids.trained(name, corpus.ids, tokenizer, cache_dir)
        ids, counts = token_ids.mapped(name, array, tokenizer, cache_dir)
        return SplitTokens(ids, counts.documents, counts.text_bytes)
    documents = getattr(corpus, split)
    origin = {
        "code": _FORMAT,
        "library": tokenizer_library.version(),
        "documents": identity(documents),
        "tokenizer": tokenizer.content_hash,
        "dtype": _dtype(tokenizer).str,
    }
    write = functools.partial(_write, documents, corpus.name, tokenizer)
    stored = derive(cache_dir, "tokens", split, origin, write, ".npy")
    facts = stored.facts
    return SplitTokens(StoredArray.open(stored.path), facts["documents"], facts["text_bytes"])


def _continued(partial: Path, progress: Path, dtype: np.dtype) -> _Progress:
    """Returns what a killed process left in a partial file; nothing where it is damaged."""
    try:
        done = _Progress(**json_files.load(progress))
        # The header of a partial file has no count yet.
        tokens = replace(StoredArray.open(partial), count=done.count)
        whole = partial.stat().st_size >= tokens.offset + tokens.nbytes
        if whole and tokens.dtype == dtype and _checksum(tokens) == done.crc32:
            return done
    except Exception:  # See StoredArray.open.
        pass
    return _Progress()


def _checksum(tokens: StoredArray) -> int:
    crc32 = 0
    for first in range(0, len(tokens), _CHUNK):
        crc32 = zlib.crc32(tokens[first : first + _CHUNK], crc32)
    return crc32


def _chained(splits: Sequence[SplitTokens]) -> SplitTokens:
    arrays = tuple(split.tokens for split in splits)
    documents = sum(split.documents for split in splits)
    return SplitTokens(ChainedArray(arrays), documents, sum(split.text_bytes for split in splits))


def _write(
    documents: Sequence[Document], name: str, tokenizer: Tokenizer, partial: Path
) -> dict[str, int]:
    progress, dtype = partial.with_suffix(".progress"), _dtype(tokenizer)
    done = _continued(partial, progress, dtype)
    try:
        with partial.open("r+b" if done.count else "wb") as file:
            header_size = _write_header(file, dtype, 0)
            # A killed process may have written tokens that its record does not have.
            file.truncate(header_size + done.count * dtype.itemsize)
            file.seek(0, os.SEEK_END)
            done = _append(file, documents, tokenizer, done, progress, name)
            file.seek(0)
            # numpy pads the header, so a larger count keeps its size.
            if _write_header(file, dtype, done.count) != header_size:
                raise AssertionError("the .npy header changed its size")
    except OSError as error:
        # After a transient error the next attempt goes on there; else the disk may need the space.
        if not storage.is_transient(error):
            partial.unlink(missing_ok=True)
            progress.unlink(missing_ok=True)
        raise
    progress.unlink(missing_ok=True)
    return {"documents": done.documents, "text_bytes": done.text_bytes}


def _append(
    file: BinaryIO,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    done: _Progress,
    progress: Path,
    name: str,
) -> _Progress:
    """Appends the tokens of the documents after the first `done.documents`; returns the record."""
    total, saved = len(documents), done.count
    remaining = map(documents.__getitem__, range(done.documents, total))
    shown = with_progress(remaining, f"tokenizing {name}", total, done.documents)
    dtype, begins_document, lost = _dtype(tokenizer), True, Counter[str]()
    for batch, ids_of_pieces in _encoded(_batches(shown, tokenizer), tokenizer):
        lost += tokenizer.lost([text for text, _ in batch], ids_of_pieces)
        ends = [ends_document for _, ends_document in batch]
        pieces = []
        for ids, ends_document in zip(ids_of_pieces, ends):
            pieces.append(tokenizer.as_document(ids, begins_document, ends_document))
            begins_document = ends_document
        tokens = np.concatenate(pieces).astype(dtype)
        file.write(tokens.data)
        done = replace(
            done,
            count=done.count + len(tokens),
            documents=done.documents + sum(ends),
            text_bytes=done.text_bytes + sum(len(text.encode()) for text, _ in batch),
            crc32=zlib.crc32(tokens.data, done.crc32),
        )
        # Only after a whole document: a resumed write begins with the next one.
        if ends[-1] and (done.count - saved) * dtype.itemsize >= _SAVED_BYTES:
            _flush(file)
            # After the flush, so that the record never promises tokens that are not on the disk.
            storage.replace(progress, json.dumps(asdict(done)).encode())
            saved = done.count
    if lost:
        _LOG.warning("all of %s, %d tokens: %s", escaped(name), done.count, lost_words(lost))
    return done


def _encoded(
    batches: Iterable[list[tuple[str, bool]]], tokenizer: Tokenizer
) -> Iterator[tuple[list[tuple[str, bool]], list[np.ndarray]]]:
    """Yields each batch with its ids, in order.

    The tokenizer uses all cores for a batch; threads encode the next batches during the serial work
    on one.
    """
    pending: deque[tuple[list[tuple[str, bool]], Future]] = deque()
    with ThreadPoolExecutor(_BATCHES_AHEAD, "tokenize") as threads:
        for batch in batches:
            texts = [text for text, _ in batch]
            pending.append((batch, threads.submit(tokenizer.encode_batch, texts)))
            if len(pending) > _BATCHES_AHEAD:
                first, ids = pending.popleft()
                yield first, ids.result()
        for batch, ids in pending:
            yield batch, ids.result()


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def _write_header(file, dtype: np.dtype, count: int) -> int:
    np.lib.format.write_array_header_1_0(
        file,
        {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (count,),
        },
    )
    return file.tell()


def _batches(
    documents: Iterable[Document], tokenizer: Tokenizer
) -> Iterator[list[tuple[str, bool]]]:
    """Yields lists of (piece of a document, whether it is the last piece), bounded in size."""
    batch, size = [], 0
    for document in documents:
        # An empty document has its end of text, too.
        pieces = [*tokenizer.pieces(document.text)] or [""]
        for index, piece in enumerate(pieces):
            batch.append((piece, index == len(pieces) - 1))
            size += len(piece)
            if size >= _BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
