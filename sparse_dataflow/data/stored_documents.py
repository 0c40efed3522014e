"""The stored form of a corpus: a folder with all of its documents, and the digest of each.

`documents.array_record` has the documents in the order of their source, `digests.npy` what
`held_out.digests` returns for them.
"""

import hashlib
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sparse_dataflow.data import held_out
from sparse_dataflow.data.documents import Document, Source, add_to_digest
from sparse_dataflow.data.fetched import with_progress

STORED_VERSION = 3
"""Raise it when other documents are stored of the same files, or in another form."""

DOCUMENTS, DIGESTS = "documents.array_record", "digests.npy"
_BUFFER = 2**15
_RECORD_HEAD = struct.Struct("<Q")


class Records(Sequence):
    """The records {"id", "text"}, UTF-8 bytes, of a stored corpus."""

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
        (size,) = _RECORD_HEAD.unpack_from(data)
        start = _RECORD_HEAD.size
        return {"id": data[start : start + size], "text": data[start + size :]}


def store_documents(source: Source, folder: Path, name: str, examples: bool) -> str:
    """Stores the documents of a source in its order; returns their `documents_digest`, as read.

    Documents are written as they are read, so memory is bounded, but for 16 bytes a document.

    Args:
      folder: replaced.
      name: of the corpus, for messages.
      examples: whether the documents are examples; see `held_out.digests`.

    Raises:
      RuntimeError: array_record could not write, as on a full disk.
      OSError: another file could not be written.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    digest = hashlib.sha256()
    # A group is read whole, and documents are read in any order.
    writer = ArrayRecordWriter(str(folder / DOCUMENTS), "group_size:1")

    def written() -> Iterator[Document]:
        for document in with_progress(source.documents(), f"storing the corpus {name}"):
            number = document.id.encode()
            data = _RECORD_HEAD.pack(len(number)) + number + document.text.encode()
            writer.write(data)
            add_to_digest(digest, document)
            yield document

    digests = held_out.digests(written(), examples)
    writer.close()
    np.save(folder / DIGESTS, digests)
    return digest.hexdigest()
