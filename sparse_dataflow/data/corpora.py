"""`load_corpus`: a corpus as two random-access splits of documents.

Each corpus is stored once as array_record files in the cache folder: a local one by `stored`, a
named one by tfds, which is imported for those names alone.  `held_out` chooses the held-out
documents of corpora that ship no held-out split, and no text of theirs, nor of a split that is
shipped or named, is trained from another place.  A mixture is NAME:WEIGHT,NAME:WEIGHT,...
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sparse_dataflow.core.config import arguments
from sparse_dataflow.data import cache, held_out, hub, tfds_copies, token_files
from sparse_dataflow.data.cache import resolved
from sparse_dataflow.data.corpus.mixtures import mixed, mixture_weights
from sparse_dataflow.data.corpus.names import LEGAL_CORPORA, is_path, quiet
from sparse_dataflow.data.corpus.splits import (
    LISTED,
    Corpus,
    Options,
    combined,
    digest_of,
    split,
    without,
)
from sparse_dataflow.data.corpus.stored import load_local, records_corpus
from sparse_dataflow.data.documents import Document, PythonStdlibSource
from sparse_dataflow.data.fetched import path_of
from sparse_dataflow.data.held_out import Sides
from sparse_dataflow.data.local_files import LEGAL_EXAMPLES, LocalSource, say_once
from sparse_dataflow.data.streamed import SampleDocuments, streamed_corpus
from sparse_dataflow.data.token_files import TokenSplits, open_token_files
from sparse_dataflow.files import folders
from sparse_dataflow.files.errors import UserError


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
      name_or_path: `python_stdlib` (source of the running interpreter), a folder or file of text
        (see `local_files`), a folder that `save_to_disk` of Hugging Face `datasets` wrote, the
        address of one of these (see `fetched`), `hf:OWNER/NAME`, a tfds name, or a mixture of these
        (see `mixtures`). The first takes precedence over a folder of that name; write
        `./python_stdlib` for the folder.
      cache_dir: cache folder, created if missing. tfds corpora use the folder in the environment
        variable TFDS_DATA_DIR instead where it is set.
      examples: whether the corpus is a file or folder of prompts with answers; see `examples`.
      column: column or field with the text; "" is "text", else the only one of strings.
      validation: the corpus whose documents are held out instead of some of this one: all of a
        folder or file, the held-out split of a named corpus.

    Raises:
      UserError: the corpus does not exist, has no readable text, or cannot be downloaded or stored.
    """
    options = Options(column, examples, whole=bool(validation))
    corpus = _load(name_or_path, resolved(cache_dir), options)
    return _validated(corpus, validation, cache_dir, options) if validation else corpus


def _validated(corpus: Corpus, name: str, cache_dir: Path, options: Options) -> Corpus:
    """Returns a corpus with the held-out documents of another, whose text it does not train."""
    all_of_it = is_path(name)
    other = _load(name, resolved(cache_dir), replace(options, whole=all_of_it))
    if bool(corpus.ids) != bool(other.ids) or any(s.ids for _, s, _ in corpus.mixture):
        raise UserError(
            f"data.validation={name} with --corpus={corpus.name}: one has token ids and one "
            "text; legal: both of one kind, and no mixture of token ids."
        )
    if corpus.ids and other.ids:
        corpus = replace(corpus, ids=TokenSplits(corpus.ids.train, other.ids.train))
    digests = np.unique(other.sides.train) if all_of_it else other.sides.held_out
    corpus = without(corpus, digests)
    return replace(
        corpus,
        validation=other.train if all_of_it else other.validation,
        content_hash=combined(
            [[c.content_hash for c in (corpus, other)], "validation"], corpus, other
        ),
        own_validation=True,
        sides=Sides(corpus.sides.train, digests),
    )


def _load(name_or_path: str, cache_dir: Path, options: Options) -> Corpus:
    if options.examples:
        return _load_examples(name_or_path, cache_dir, options)
    if weights := mixture_weights(name_or_path):
        sources = {name: _load(name, cache_dir, options) for name in weights}
        return mixed(name_or_path, sources, weights)
    local = functools.partial(load_local, name=name_or_path, cache_dir=cache_dir, options=options)
    if name_or_path == "python_stdlib":
        return local(source=PythonStdlibSource.from_interpreter())
    if name_or_path.startswith(hub.PREFIX):
        return _streamed(name_or_path, options)
    path = path_of(name_or_path, cache_dir)
    # A copy that tfds prepared may be of the same kinds of files as token ids.
    if not tfds_copies.is_prepared(path) and token_files.has_token_ids(path, options.column):
        _refuse_links(path)
        return _token_corpus(name_or_path, path, options, cache_dir)
    if hub.is_saved_dataset(path):
        _refuse_links(path)
        splits = hub.saved_splits(path, options.column)
        facts = hub.identity(splits, cache_dir)
        return records_corpus(name_or_path, splits, hub.FEATURE, facts, cache_dir, options)
    if is_path(name_or_path) and not tfds_copies.is_prepared(path):
        return local(source=LocalSource(path, column=options.column))
    _refuse_links(path)
    return _load_tfds(name_or_path, cache_dir, options)


def _refuse_links(path: Path) -> None:
    """Refuses links out of a corpus that a library reads by itself."""
    if path.is_dir():
        folders.refuse_outside_links(path)


def _token_corpus(name: str, path: Path, options: Options, cache_dir: Path) -> Corpus:
    ids = open_token_files(path, options.column, cache_dir, options.whole)
    content = digest_of([token_files.identity(ids.train), token_files.identity(ids.validation)])
    return Corpus(name, [], [], content, ids=ids)


def _streamed(name: str, options: Options) -> Corpus:
    files = hub.hub_files(name.removeprefix(hub.PREFIX))
    streamed = streamed_corpus(files.name, files.splits, options.column, options.whole)
    stream, sample = streamed.stream, SampleDocuments(streamed.stream)
    content = digest_of(streamed.identity) + LISTED
    sides = Sides(held_out=stream.held_out)
    return Corpus(files.name, sample, streamed.validation, content, stream=stream, sides=sides)


def _load_examples(name: str, cache_dir: Path, options: Options) -> Corpus:
    path = path_of(name, cache_dir)
    if not is_path(name):
        raise UserError(
            f"--corpus={name} with data.loss=answers; legal: a file or folder of {LEGAL_EXAMPLES} "
            'lines with "prompt" and "answer", or "messages".'
        )
    source = LocalSource(path, examples=True)
    return load_local(name, source, cache_dir, options)


@arguments.checked
def corpus_of_texts(
    texts: Sequence[str], name: str = "texts", validation: str = "", column: str = ""
) -> Corpus:
    """A corpus of documents in memory, one a text.

    Args:
      validation: see `load_corpus`.
      column: see `load_corpus`.

    Raises:
      UserError: there is no text, or a single one too short to be split; see also `load_corpus`.
    """
    rows = enumerate(texts)
    documents = [Document(f"{name}/{number}", text) for number, text in rows if text.strip()]
    if len(documents) < len(texts):
        say_once(f"{len(texts) - len(documents):,} of {len(texts):,} texts are blank, and skipped")
    if sum(len(document.text) for document in documents) < 2:
        raise UserError("texts hold less than two characters; give more text.")
    options = Options(column, whole=bool(validation))
    content = digest_of([[d.id, d.text] for d in documents])
    corpus = split(name, documents, held_out.digests(documents), content, options)
    return _validated(corpus, validation, cache.FOLDER, options) if validation else corpus


def _load_tfds(name: str, cache_dir: Path, options: Options) -> Corpus:
    tfds_copies.refuse_unprepared(name, cache_dir)
    with quiet():
        copy = tfds_copies.opened(name, cache_dir, options.column, LEGAL_CORPORA)
    corpus = records_corpus(name, copy.records, copy.feature, copy.identity, cache_dir, options)
    return replace(corpus, content_hash=corpus.content_hash + LISTED)
