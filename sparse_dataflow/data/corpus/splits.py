"""A corpus: two splits of documents, of which no text is on both sides."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sparse_dataflow.data import held_out
from sparse_dataflow.data.documents import ChainedDocuments, Document, PickedDocuments
from sparse_dataflow.data.held_out import NO_DIGESTS, Sides
from sparse_dataflow.data.local_files import say_once
from sparse_dataflow.data.streamed import SampleDocuments, Stream, with_text
from sparse_dataflow.data.token_files import TokenSplits
from sparse_dataflow.files.errors import UserError


@dataclass(frozen=True)
class Corpus:
    """Documents split into train and validation.

    Attributes:
      name: name or path passed to `load_corpus`; with its revision for a dataset on the hub.
      train: random-access training documents; never empty, but for token ids.
      validation: random-access held-out documents; never empty, but for token ids.
      content_hash: sha256 (hex) over all bytes of both splits. For a corpus that tfds prepares,
        over its full name, version, feature, records per shard and bytes, and for one on the hub
        over the names and sizes of its files: reading all of their text could take a day. Its end
        then says so, `LISTED`.
      mixture: (short name, corpus, weight) of each corpus of a mixture, whose documents are then
        those of all, one corpus after another; () for one corpus. Weights are fractions of the
        training tokens and add up to 1.
      stream: the training documents of a corpus that is streamed, of which `train` has a sample.
      own_validation: whether the held-out documents are those of another corpus.
      ids: the splits of a corpus of token ids, which has no documents; None for text.
      sides: digests of the documents; those of training are empty for a mixture or a stream.
    """

    name: str
    train: Sequence[Document]
    validation: Sequence[Document]
    content_hash: str
    mixture: tuple[tuple[str, "Corpus", float], ...] = ()
    stream: Stream | None = None
    own_validation: bool = False
    ids: TokenSplits | None = None
    sides: Sides = field(default_factory=Sides)

    @property
    def streamed(self) -> bool:
        """Whether the corpus or one of a mixture is streamed."""
        return any(source.stream for source in (self, *(s for _, s, _ in self.mixture)))


LISTED = " (names and sizes of its files)"
"""End of the content hash of a corpus whose bytes are not all read for it."""


@dataclass(frozen=True)
class Options:
    """How a corpus is read.

    Attributes:
      column: `data.column`.
      examples: `data.loss` is "answers".
      whole: whether no document is held out, because other text is; `validation` may be empty.
    """

    column: str = ""
    examples: bool = False
    whole: bool = False


def digest_of(facts: object) -> str:
    """Returns the content hash that facts are, JSON-able."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def combined(facts: object, *corpora: Corpus) -> str:
    """Returns the content hash of several corpora; of names and sizes if that of one is."""
    return digest_of(facts) + LISTED * any(c.content_hash.endswith(LISTED) for c in corpora)


def without(corpus: Corpus, digests: np.ndarray) -> Corpus:
    """Returns a corpus that does not train documents with the digests, and says how many it leaves
    out; a stream leaves them out, and counts them, as it is read.

    Args:
      digests: of text that is held out, uint64, sorted.

    Raises:
      UserError: no document is left.
    """
    if corpus.mixture:
        sources = tuple((name, without(c, digests), w) for name, c, w in corpus.mixture)
        return joined(corpus.name, sources)
    if not len(digests):
        return corpus
    if corpus.stream:
        stream = replace(corpus.stream, held_out=np.union1d(corpus.stream.held_out, digests))
        stream = with_text(stream)
        if not stream.shards:
            raise _nothing_left(f"{corpus.name}: the documents of its files")
        names = [corpus.content_hash, hashlib.sha256(stream.held_out.tobytes()).hexdigest()]
        return replace(
            corpus,
            train=SampleDocuments(stream),
            content_hash=combined(names, corpus),
            stream=stream,
        )
    left_out = held_out.among(corpus.sides.train, digests)
    count = int(left_out.sum())
    if not count:
        return corpus
    if left_out.all():
        raise _nothing_left(f"{corpus.name}: all of its {count} documents")
    say_once(
        f"{corpus.name}: {count:,} of {len(left_out):,} documents of training have text that is "
        "held out, and are left out"
    )
    indices = np.flatnonzero(~left_out)
    content = [corpus.content_hash, hashlib.sha256(indices.tobytes()).hexdigest()]
    return replace(
        corpus,
        train=PickedDocuments(corpus.train, indices),
        content_hash=combined(content, corpus),
        sides=Sides(corpus.sides.train[indices], corpus.sides.held_out),
    )


def _nothing_left(what):
    return UserError(
        f"{what} are held out, so it has nothing to train on; legal: text that data.validation and "
        "the other corpora of a mixture do not hold out."
    )


def split(
    name: str,
    documents: Sequence[Document],
    digests_Nx2: np.ndarray,
    content: str,
    options: Options,
) -> Corpus:
    """Returns the corpus of documents; some are held out, or none if `options.whole`.

    Args:
      digests_Nx2: see `held_out.digests`.
      content: names the documents.
    """
    digests = digests_Nx2[:, 0]
    content = digest_of([content, options.whole, held_out.VERSION])
    if options.whole:
        return Corpus(name, documents, [], content, sides=Sides(digests))
    is_held_out = held_out.holds_out(digests)
    if is_held_out.any():
        held_out.say_near_copies(name, digests_Nx2, is_held_out)
        train, validation = (
            PickedDocuments(documents, np.flatnonzero(mark)) for mark in (~is_held_out, is_held_out)
        )
        sides = Sides(digests[~is_held_out], np.unique(digests[is_held_out]))
        return Corpus(name, train, validation, content, sides=sides)
    if options.examples:
        raise UserError(
            f"The corpus {name} has one example, {len(digests)} times; legal: two or more, as one "
            "is held out."
        )
    if len(digests) > 1:
        say_once(f"{name}: its {len(digests):,} documents are one text, which is read once")
    # There is no second text to hold out, so the end of the only one is.
    head, tail = held_out.cut_in_two(documents[0])
    # The digest of the whole too, so that no copy of it is trained in a mixture.
    sides = Sides(digests[:1], np.unique([digests[0], np.uint64(held_out.digest(tail.text))]))
    return Corpus(name, [head], [tail], content, sides=sides)


def joined(name: str, mixture: tuple[tuple[str, Corpus, float], ...]) -> Corpus:
    """Returns the mixture of corpora that train nothing of what another one holds out."""
    names, corpora, _ = zip(*mixture, strict=True)
    train = ChainedDocuments(tuple(corpus.train for corpus in corpora), names)
    validation = ChainedDocuments(tuple(corpus.validation for corpus in corpora), names)
    content = combined([[c.content_hash, weight] for _, c, weight in mixture], *corpora)
    if any(corpus.stream for corpus in corpora):  # Their names have revisions.
        name = ",".join(f"{corpus.name}:{weight!r}" for _, corpus, weight in mixture)
    held_digests = np.unique(np.concatenate([corpus.sides.held_out for corpus in corpora]))
    return Corpus(name, train, validation, content, mixture, sides=Sides(NO_DIGESTS, held_digests))
