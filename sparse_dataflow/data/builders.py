"""tfds builders of local corpora.

Importing this module imports tensorflow_datasets, without tensorflow.
"""

import contextlib
import hashlib
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator

import tensorflow_datasets as tfds
from tensorflow_datasets.core import shuffle

from sparse_dataflow.data.documents import Document, PythonStdlibSource, Source
from sparse_dataflow.data.progress import with_progress
from sparse_dataflow.data.splits import Split, split_for

SPLITS = ("train", "validation")


class _LocalDatasetInfo(tfds.core.DatasetInfo):
    def initialize_from_bucket(self) -> None:
        """Does nothing: local corpora have no published metadata."""


class _Spool:
    """Serialised records in the order in which they came, in a temporary file.

    Stands in for the `Shuffler` of tfds, which keeps up to 1 GB of them in memory, and needs
    tensorflow to keep more.
    """

    def __init__(self, dirpath: str | os.PathLike, *_: object, **__: object):
        self._file = tempfile.TemporaryFile(dir=os.fspath(dirpath))
        self.size = self.num_examples = 0

    @property
    def bucket_lengths(self) -> list[int]:
        """All records are in one bucket."""
        return [self.num_examples]

    def add(self, key: int, data: bytes) -> None:
        """Appends a record."""
        self._file.write(struct.pack("=QQ", key, len(data)) + data)
        self.size += len(data)
        self.num_examples += 1

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        self._file.seek(0)
        while head := self._file.read(16):
            key, size = struct.unpack("=QQ", head)
            yield key, self._file.read(size)


@contextlib.contextmanager
def in_bounded_memory() -> Iterator[None]:
    """Inside, tfds stores records in their order, on disk until all are there."""
    before = shuffle.Shuffler
    shuffle.Shuffler = _Spool
    try:
        yield
    finally:
        shuffle.Shuffler = before


class DocumentsBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Stores the documents of a `Source` as records {"id", "text"}, split by `splits.py`.

    Records keep the order of the source. Their metadata holds the number of documents and the
    digest (`documents_digest`) of each split as read from the source, to verify the stored records.
    """

    VERSION = tfds.core.Version("1.1.0")  # Raise it when the split of the same files changes.

    def __init__(self, source: Source, **kwargs):
        self._source = source
        config = tfds.core.BuilderConfig(
            name=source.fingerprint, version=self.VERSION, description=str(source)
        )
        super().__init__(config=config, file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        return _LocalDatasetInfo(
            builder=self,
            description=type(self).__doc__,
            features=tfds.features.FeaturesDict(
                {"id": tfds.features.Text(), "text": tfds.features.Text()}
            ),
            metadata=tfds.core.MetadataDict(documents={}, digests={}),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        del dl_manager
        split = split_for(self._documents("reading"))
        return {name: self._generate_examples(name, split) for name in SPLITS}

    def _documents(self, activity: str, count: int = 0) -> Iterator[Document]:
        label = f"{activity} of the corpus {self._source.fingerprint}"
        return with_progress(self._source.documents(), label, count)

    def _generate_examples(self, name: str, split: Split) -> Iterator[tuple[int, dict]]:
        digest, count = hashlib.sha256(), 0
        for source_document in self._documents(f"storing the {name} split", split.count):
            for split_name, document in split.assign(source_document):
                if split_name == name:
                    _add_to_digest(digest, document)
                    yield count, {"id": document.id, "text": document.text}
                    count += 1
        self.info.metadata["documents"][name] = count
        self.info.metadata["digests"][name] = digest.hexdigest()


class PythonStdlib(DocumentsBuilder):
    """Source code of an interpreter's standard library without tests; one document per file."""

    def __init__(self, source: Source | None = None, **kwargs):
        super().__init__(source or PythonStdlibSource.of_this_interpreter(), **kwargs)


class Sotu(DocumentsBuilder, skip_registration=True):
    """State of the Union addresses (English, public domain); one document per speech."""


class LocalText(DocumentsBuilder, skip_registration=True):
    """Local files of text, JSON lines and Parquet."""


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
