"""The splits of a corpus as arrays of tokens on disk.

An end-of-text token follows each document. Files are named by the hashes of corpus and tokenizer,
written atomically, and verified when opened.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sparse_dataflow.data.cache import atomic_write, exclusive, resolved
from sparse_dataflow.data.corpora import Corpus
from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.stored import StoredArray
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files import json_files, storage
from sparse_dataflow.files.errors import UserError

_FORMAT = 1
_BATCH_CHARACTERS = 2**21
# Larger files are verified by length only, to keep the start of a run short.
_CHECKSUM_BYTES = 2**30
_CHUNK = 2**24  # tokens


@dataclass(frozen=True, eq=False)
class SplitTokens:
    """A tokenised split.

    Attributes:
      tokens: uint16 or uint32 [count], read slice by slice.
      documents: number of documents.
      text_bytes: UTF-8 bytes of all documents.
    """

    tokens: StoredArray
    documents: int
    text_bytes: int


@dataclass(frozen=True, eq=False)
class CorpusTokens:
    """Both tokenised splits of a corpus."""

    train: SplitTokens
    validation: SplitTokens


@dataclass(frozen=True)
class _Meta:
    format: int
    corpus: str
    tokenizer: str
    count: int
    documents: int
    text_bytes: int
    crc32: int


def prepare_tokens(corpus: Corpus, tokenizer: Tokenizer, cache_dir: Path) -> CorpusTokens:
    """Opens the tokens of both splits; tokenises them the first time, in batches of a few MiB.

    Raises:
      UserError: the cache folder cannot be written.
    """
    cache_dir = resolved(cache_dir)
    key = f"{corpus.content_hash[:16]}-{tokenizer.content_hash[:16]}"
    folder = cache_dir / "tokens" / key
    return CorpusTokens(
        *(
            _open_or_write(getattr(corpus, split), split, corpus, tokenizer, cache_dir, folder)
            for split in ("train", "validation")
        )
    )


def _open_or_write(documents, split, corpus, tokenizer, cache_dir, folder) -> SplitTokens:
    array, meta = folder / f"{split}.npy", folder / f"{split}.json"
    opened = _open(array, meta, corpus, tokenizer)
    if opened is None:
        with exclusive(cache_dir, f"tokens-{folder.name}-{split}"):
            opened = _open(array, meta, corpus, tokenizer)
            if opened is None:
                storage.retry(
                    f"Writing {array}", lambda: _write(documents, array, meta, corpus, tokenizer)
                )
                opened = _open(array, meta, corpus, tokenizer)
    if opened is None:
        raise UserError(f"The tokens written to {array} cannot be read back. Check the disk.")
    return opened


def _open(array: Path, meta: Path, corpus: Corpus, tokenizer: Tokenizer) -> SplitTokens | None:
    """Returns None where the files are missing, damaged or stale and must be written again."""
    try:
        recorded = _Meta(**json_files.load(meta))
        tokens = StoredArray.open(array)
    except Exception:  # See StoredArray.open.
        return None
    expected = (_FORMAT, corpus.content_hash, tokenizer.content_hash)
    if (recorded.format, recorded.corpus, recorded.tokenizer) != expected:
        return None
    if tokens.shape != (recorded.count,) or tokens.dtype != _dtype(tokenizer):
        return None
    if tokens.nbytes <= _CHECKSUM_BYTES and _checksum(tokens) != recorded.crc32:
        return None
    return SplitTokens(tokens, recorded.documents, recorded.text_bytes)


def _checksum(tokens: StoredArray) -> int:
    crc32 = 0
    for first in range(0, len(tokens), _CHUNK):
        crc32 = zlib.crc32(tokens[first : first + _CHUNK], crc32)
    return crc32


def _write(
    documents: Iterable[Document], array: Path, meta: Path, corpus: Corpus, tokenizer: Tokenizer
) -> None:
    dtype = _dtype(tokenizer)
    count = number = text_bytes = crc32 = 0
    with atomic_write(array) as temporary:
        with temporary.open("wb") as file:
            header_size = _write_header(file, dtype, 0)
            for batch in _batches(documents, tokenizer):
                ids_of_pieces = tokenizer.encode_batch([text for text, _ in batch])
                for (text, ends_document), ids in zip(batch, ids_of_pieces):
                    ids = np.append(ids, tokenizer.eot_id) if ends_document else ids
                    data = ids.astype(dtype).tobytes()
                    file.write(data)
                    crc32 = zlib.crc32(data, crc32)
                    count += len(ids)
                    number += ends_document
                    text_bytes += len(text.encode())
            file.seek(0)
            # numpy pads the header, so a larger count keeps its size.
            if _write_header(file, dtype, count) != header_size:
                raise AssertionError("the .npy header changed its size")
    record = _Meta(
        format=_FORMAT,
        corpus=corpus.content_hash,
        tokenizer=tokenizer.content_hash,
        count=count,
        documents=number,
        text_bytes=text_bytes,
        crc32=crc32,
    )
    with atomic_write(meta) as temporary:
        temporary.write_text(json.dumps(asdict(record)))


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
        pieces = [*tokenizer.pieces(document.text)] or [""]
        for index, piece in enumerate(pieces):
            batch.append((piece, index == len(pieces) - 1))
            size += len(piece)
            if size >= _BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
