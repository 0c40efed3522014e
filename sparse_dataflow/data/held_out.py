"""Which documents are held out: a function of their text.

The digest of a document is the first 8 bytes of the SHA-256 of its text.  White space counts as one
space, and Unicode as composed (NFC), so that copies with other line ends have one digest.  Of an
example it is that of the texts of its messages.

A document is held out iff its digest is divisible by 20: about one in twenty, the same ones
whatever else the corpus has, where it lies, in which order, and which other corpora are read.  If
the rule holds out none or most of a small corpus, the text with the smallest digest is held out
that is at most half of its documents.  A corpus of one text is cut in two at the last line break
before 95% of its UTF-8 bytes.

Text that is held out is trained from nowhere: `without` in `corpus.splits` leaves out the
documents of training whose digest is that of held-out text of any source.
"""

import array
import logging
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from sparse_dataflow.data.documents import Document, document_hash
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError, escaped

VERSION = 2
"""Raise it when other documents of the same text are held out."""

HOLD_OUT_EVERY = 20
TRAIN_SHARE_OF_SINGLE_DOCUMENT = 0.95

_LOG = logging.getLogger(__name__)
_WORDS = re.compile(r"\w+")
_NEAR_CHARACTERS = 2**16
"""Characters at the begin of a document by which near copies are counted: words are found slowly,
0.5 s for a mebibyte of one-letter words."""

NO_DIGESTS = np.empty(0, np.uint64)


def digest(text: str) -> int:
    """Returns the digest of a text, which copies with other white space share."""
    # ASCII is composed as it is, and composing is slow.
    if not text.isascii():
        text = unicodedata.normalize("NFC", text).replace("\ufeff", " ")
    return document_hash(" ".join(text.split()))


def digest_of_example(text: str) -> int:
    """Returns the digest of an example, the text of `chat.checked_example`, whichever of its forms
    it has."""
    record = json_files.parse(text)
    contents = [message["content"] for message in record.get("messages", ())]
    return digest(" ".join(contents or [record["prompt"], record["answer"]]))


def digests(documents: Iterable[Document], examples: bool = False) -> np.ndarray:
    """Returns the digest of each document, and that of the words in lower case of its beginning,
    uint64 [count, 2].

    Args:
      examples: whether the documents are examples.
    """
    rows = array.array("Q")
    text_digest = digest_of_example if examples else digest
    for document in documents:
        beginning = document.text[:_NEAR_CHARACTERS]
        # A document of punctuation alone has no words, and is compared as it is.
        words = " ".join(_WORDS.findall(beginning.lower())) or beginning
        rows.extend((text_digest(document.text), document_hash(words)))
    return np.frombuffer(rows, np.uint64).reshape(-1, 2)


def holds_out(digests_N: np.ndarray) -> np.ndarray:
    """Returns whether each document of a corpus is held out, bool [count]; none of a single text.

    Args:
      digests_N: uint64 [count].
    """
    is_held_out = digests_N % np.uint64(HOLD_OUT_EVERY) == 0
    if 0 < 2 * is_held_out.sum() <= len(is_held_out):
        return is_held_out
    values, counts = np.unique(digests_N, return_counts=True)
    # `unique` sorts, so the first of these is the smallest.
    few = values[2 * counts <= len(digests_N)]
    return digests_N == few[0] if len(few) else np.zeros(len(digests_N), bool)


def say_near_copies(name: str, digests_Nx2: np.ndarray, is_held_out: np.ndarray) -> None:
    """Says how many held-out documents differ from one of training in case and punctuation alone.

    Args:
      name: of the corpus.
      digests_Nx2: see `digests`.
      is_held_out: whether each document is held out.
    """
    words = digests_Nx2[:, 1]
    near = int(np.isin(words[is_held_out], words[~is_held_out]).sum())
    if near:
        _LOG.warning(
            "%s: %d of %d held-out documents differ from a training document in case, punctuation "
            "and spaces alone", escaped(name), near, int(is_held_out.sum()),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Sides:
    """The digests of a corpus.

    Attributes:
      train: of each training document, uint64 [count].
      held_out: of the text that is held out, uint64, sorted; of a document that is cut in two, also
        that of the whole.
    """

    train: np.ndarray = field(default_factory=lambda: NO_DIGESTS)
    held_out: np.ndarray = field(default_factory=lambda: NO_DIGESTS)


def among(digests_N: np.ndarray, held_digests: np.ndarray) -> np.ndarray:
    """Returns whether each digest is one of `held_digests`, which are sorted, bool [count]."""
    if not len(held_digests):
        return np.zeros(len(digests_N), bool)
    # A binary search: the held-out digests are few, and sorted.
    places = np.minimum(np.searchsorted(held_digests, digests_N), len(held_digests) - 1)
    return held_digests[places] == digests_N


def cut_in_two(document: Document) -> tuple[Document, Document]:
    """Cuts at the last line break before 95% of the bytes, else at the last character boundary.

    Raises:
      UserError: the document has fewer than two characters.
    """
    data = document.text.encode()
    limit = int(len(data) * TRAIN_SHARE_OF_SINGLE_DOCUMENT)
    cut = data.rfind(b"\n", 0, limit) + 1
    if cut == 0:
        # There is no line break: without the bytes of a character that the limit would cut.
        cut = len(data[:limit].decode(errors="ignore").encode())
    if cut == 0:
        raise UserError("The corpus is one document that is too short to split. Add text.")
    return (
        Document(f"{document.id}#head", data[:cut].decode()),
        Document(f"{document.id}#tail", data[cut:].decode()),
    )
