"""Local corpora, stored once as array_record files of documents.

A stored corpus is a folder with `train.array_record`, `validation.array_record` and
`metadata.json`: the number of documents and the digest of each split as read from the source.
"""

import hashlib
import json
import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sparse_dataflow.data.documents import Document, Source
from sparse_dataflow.data.progress import with_progress
from sparse_dataflow.data.splits import split_for
from sparse_dataflow.files import json_files

SPLITS = ("train", "validation")
VERSION = 2
"""Raise it when the split of the same files or the form of a record changes."""

METADATA = "metadata.json"
_BUFFER = 2**15
_HEAD = struct.Struct("<Q")


class Records(Sequence):
    """The records {"id", "text"}, UTF-8 bytes, of a split of a stored corpus."""

    def __init__(self, path: Path):
        """Opens the file.

        Raises:
          Exception: it is missing or damaged; array_record raises errors of several types.
        """
        from array_record.python.array_record_module import ArrayRecordReader

        # Records are read in any order, so none are read ahead.
        self._reader = ArrayRecordReader(
            str(path), "readahead_buffer_size:0", file_reader_buffer_size=_BUFFER
        )

    def __len__(self) -> int:
        return self._reader.num_records()

    # Slices are not supported.
    def __getitem__(self, index: int) -> dict[str, bytes]:  # type: ignore[override]
        index = range(len(self))[index]
        # The time of a read of a list of indices is proportional to the records of the file.
        (data,) = self._reader.read(index, index + 1)
        (size,) = _HEAD.unpack_from(data)
        start = _HEAD.size
        return {"id": data[start : start + size], "text": data[start + size :]}


def store(source: Source, folder: Path) -> None:
    """Stores the documents of a source, split by `splits`, in the order of the source.

    The folder appears once all is written.  Documents are written as they are read, so memory is
    bounded.

    Raises:
      RuntimeError: array_record could not write, as on a full disk.
      OSError: another file could not be written.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    partial = folder.with_name(f"incomplete.{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        digests = {split: hashlib.sha256() for split in SPLITS}
        counts = dict.fromkeys(SPLITS, 0)
        writers = {
            split: ArrayRecordWriter(str(partial / f"{split}.array_record"), "group_size:1")
            for split in SPLITS
        }
        for split, document in _assigned(source):
            identity = document.id.encode()
            data = _HEAD.pack(len(identity)) + identity + document.text.encode()
            writers[split].write(data)
            _add_to_digest(digests[split], document)
            counts[split] += 1
        for writer in writers.values():
            writer.close()
        metadata = {"documents": counts, "digests": {s: d.hexdigest() for s, d in digests.items()}}
        (partial / METADATA).write_text(json.dumps(metadata, indent=1), encoding="utf-8")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _assigned(source: Source) -> Iterator[tuple[str, Document]]:
    """Yields (split, document) of all documents; reads the source twice."""
    split = split_for(_documents(source, "reading"))
    for document in _documents(source, "storing", split.count):
        yield from split.assign(document)


def _documents(source, activity, count=0):
    label = f"{activity} the corpus {source.fingerprint}"
    return with_progress(source.documents(), label, count)


def metadata(folder: Path) -> dict[str, Any]:
    """Returns {"documents", "digests"} by split.

    Raises:
      OSError or ValueError: the file is missing or damaged.
    """
    content = json_files.load(folder / METADATA)
    values = {key: dict(content[key]) for key in ("documents", "digests")}
    if any(set(SPLITS) - set(of_split) for of_split in values.values()):
        raise ValueError(f"{folder / METADATA} lacks a split")
    return values


def documents_digest(documents: Iterable[Document]) -> str:
    """Returns the sha256 (hex) over ids and texts in order, each prefixed by its byte length."""
    digest = hashlib.sha256()
    for document in documents:
        _add_to_digest(digest, document)
    return digest.hexdigest()


def _add_to_digest(digest, document: Document) -> None:
    for text in (document.id, document.text):
        data = text.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
