"""Corpora of records: local text that is stored once in the cache, and splits that tfds or Hugging
Face prepared."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparse_dataflow.data import cache, held_out
from sparse_dataflow.data.corpus.splits import Corpus, Options, digest_of, split, without
from sparse_dataflow.data.documents import Document, Source, documents_digest
from sparse_dataflow.data.fetched import with_progress
from sparse_dataflow.data.held_out import Sides
from sparse_dataflow.data.stored_documents import (
    DIGESTS,
    DOCUMENTS,
    STORED_VERSION,
    Records,
    store_documents,
)
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError, first_line


@dataclass(frozen=True)
class StoredDocuments(Sequence[Document]):
    """The documents in records.

    Attributes:
      place: of the records, for people.
      records: what is read.
      identity: names the documents.
      text_feature: of a record, with the text.
      id_prefix: an id is this and the index; None where the records have ids.
    """

    place: str
    records: Sequence[dict[str, Any]]
    identity: object
    text_feature: str = "text"
    id_prefix: str | None = None

    def __len__(self) -> int:
        return len(self.records)

    # Slices are not supported.
    def __getitem__(self, index: int) -> Document:  # type: ignore[override]
        # Counts from the end too, and raises IndexError beyond it.
        index = range(len(self))[index]
        try:
            record = storage.retry(f"Reading record {index}", lambda: self.records[index])
            name = record["id"].decode() if self.id_prefix is None else f"{self.id_prefix}{index}"
            return Document(name, record[self.text_feature].decode(errors="replace"))
        except Exception as error:  # The libraries verify checksums and raise errors of any type.
            raise UserError(
                f"Row {index} of {self.place} is damaged ({first_line(error)}). Copy it again, or "
                "delete it there if this program prepared it, and run again."
            ) from error


def load_local(name: str, source: Source, cache_dir: Path, options: Options) -> Corpus:
    """Returns the corpus of a source, which is stored in the cache the first time."""
    load = functools.partial(_load_once, name, source, cache_dir, options)
    try:
        return storage.retry(f"Reading the corpus {name}", load)
    except OSError as error:
        raise UserError(
            f"The corpus {name} cannot be read ({error.filename}: {error.strerror or error})."
        ) from error


def _load_once(name, source, cache_dir, options):
    origin = {"code": STORED_VERSION, "source": source, "files": source.files_read}
    make = functools.partial(_prepare, source, name, options.examples)
    stored = cache.derive(cache_dir, "texts", type(source).__name__, origin, make)
    digest = stored.facts["digest"]
    documents = _open(stored.path, digest)
    digests = np.load(storage.regular(stored.path / DIGESTS), allow_pickle=False)
    return split(name, documents, digests, digest, options)


def _prepare(source, name, examples, folder):
    """Stores a corpus, reads all of it back, and compares it with the digest of the source."""
    try:
        digest = store_documents(source, folder, name, examples)
    except RuntimeError as error:  # raised by the array_record writer, e.g. on a full disk
        raise UserError(
            f"The corpus could not be stored in {folder} ({first_line(error)}). "
            "Free disk space or choose another cache folder."
        ) from error
    if documents_digest(_open(folder, digest)) != digest:
        raise UserError(
            f"The documents stored in {folder} differ from their source. If the source changed "
            "while it was read, run again."
        )
    return {"digest": digest}


def _open(folder, digest: str) -> StoredDocuments:
    path = folder / DOCUMENTS
    try:
        return StoredDocuments(str(path), Records(path), digest)
    except Exception as error:
        raise UserError(
            f"The prepared corpus in {folder} cannot be read ({first_line(error)}). "
            "Delete that folder and run again."
        ) from error


def records_corpus(
    name: str,
    records: Mapping[str, Sequence],
    feature: str,
    facts: list,
    cache_dir: Path,
    options: Options,
) -> Corpus:
    """Returns the corpus of prepared splits; without a held-out one, some rows are held out.

    Args:
      feature: of the records, with the text.
      facts: identity of the records.
    """
    if not records.get("train"):
        raise UserError(
            f"The corpus '{name}' has no split 'train'; its splits: {', '.join(records)}."
        )
    stored = {
        part: StoredDocuments(f"{part} of {name}", rows, [facts, part], feature, f"{part}/")
        for part, rows in records.items()
    }
    shipped = next((part for part in ("validation", "test") if records.get(part)), "")
    train = stored["train"]
    digests = _digests(train, cache_dir)
    if options.whole or not shipped:
        return split(name, train, digests, digest_of(facts), options)
    # A shipped split may repeat documents of the training split; `without` leaves those out.
    held_digests = np.unique(_digests(stored[shipped], cache_dir)[:, 0])
    sides = Sides(digests[:, 0], held_digests)
    return without(
        Corpus(name, train, stored[shipped], digest_of(facts), sides=sides), held_digests
    )


def _digests(documents: StoredDocuments, cache_dir: Path) -> np.ndarray:
    """Returns the digests of documents, for which all of them are read the first time."""

    def write(partial):
        shown = with_progress(documents, f"reading {documents.place}", len(documents))
        with partial.open("wb") as file:
            np.save(file, held_out.digests(shown))

    origin = {"code": held_out.VERSION, "documents": documents.identity}
    stored = cache.derive(cache_dir, "texts", "digests", origin, write, ".npy")
    return np.load(storage.regular(stored.path), allow_pickle=False)
