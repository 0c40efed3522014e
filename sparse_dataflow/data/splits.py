"""The rule that holds documents out for validation.

A document is held out iff the first 8 bytes of sha256(document id), as a big-endian integer, are
divisible by 20. This selects about one document in twenty, the same on every machine and for every
other content of the corpus. Exact copies of a text go where the copy of the smallest hash goes, so
no held-out text is trained. If the rule leaves a split of a small corpus empty, the text with the
smallest hash is held out. A single document is cut at the last line break before 95% of its UTF-8
bytes.
"""

import array
import hashlib
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sparse_dataflow.data.documents import Document
from sparse_dataflow.files.errors import UserError

_LOG = logging.getLogger(__name__)
_WORDS = re.compile(r"\w+")

HOLD_OUT_EVERY = 20
TRAIN_SHARE_OF_SINGLE_DOCUMENT = 0.95


def document_hash(text: str) -> int:
    """Returns the first 8 bytes of sha256(text in UTF-8) as a big-endian integer."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_held_out(document_id: str) -> bool:
    """Returns whether the hash rule alone holds the document out."""
    return document_hash(document_id) % HOLD_OUT_EVERY == 0


@dataclass(frozen=True, eq=False)
class Split:
    """The split of one corpus.

    Attributes:
      count: number of documents, at least 1.
      held_out: hashes of the held-out texts, uint64, sorted; of the ids where copies of few texts
        make most of the corpus.
      by_id: whether they are of the ids.
      near_copies: held-out documents that differ from a training document in case, punctuation and
        spaces alone.
    """

    count: int
    held_out: np.ndarray
    by_id: bool
    near_copies: int

    def assign(self, document: Document) -> list[tuple[str, Document]]:
        """Returns [(split name, document)]; a single document yields one piece for each split."""
        if self.count == 1:
            head, tail = cut_in_two(document)
            return [("train", head), ("validation", tail)]
        return [("validation" if self.holds_out(document) else "train", document)]

    def holds_out(self, document: Document) -> bool:
        """Returns whether a document is held out."""
        number = np.uint64(document_hash(document.id if self.by_id else document.text))
        place = np.searchsorted(self.held_out, number)
        return bool(place < len(self.held_out) and self.held_out[place] == number)


def split_for(documents: Iterable[Document]) -> Split:
    """Returns the split of a corpus, in one pass and 24 bytes of memory a document.

    Raises:
      UserError: there are no documents.
    """
    rows = array.array("Q")
    for document in documents:
        plain = " ".join(_WORDS.findall(document.text.lower())) or document.text
        rows.extend(map(document_hash, (document.id, document.text, plain)))
    if not rows:
        raise UserError("The corpus has no text.")
    ids, texts, words = np.frombuffer(rows, np.uint64).reshape(-1, 3).T
    texts_held, of_document = _held_out(ids, texts)
    by_id = len(texts) > 1 and not 0 < 2 * of_document.sum() <= len(texts)
    if by_id and len(texts) > 2:
        _LOG.warning("copies of few texts make most of the corpus: held-out text is trained too")
    if by_id:
        texts_held, of_document = _held_out(ids, ids)
    near = int(np.isin(words[of_document], words[~of_document]).sum())
    if near:
        _LOG.warning(
            "%d of %d held-out documents differ from a training document in case, punctuation and "
            "spaces alone", near, int(of_document.sum()),
        )  # fmt: skip
    return Split(len(texts), texts_held, by_id, near)


def _held_out(ids, groups):
    """Holds out groups of documents by the smallest hash of their ids.

    Returns:
      (sorted values of `groups` that are held out, whether each document is).
    """
    order = np.lexsort((ids, groups))
    values, first, inverse = np.unique(groups[order], return_index=True, return_inverse=True)
    deciding = ids[order][first]
    held = deciding % np.uint64(HOLD_OUT_EVERY) == 0
    # In a small corpus chance holds out none, or most.
    if not 0 < 2 * held[inverse].sum() <= len(ids):
        held = np.arange(len(held)) == np.argmin(deciding)
    of_document = np.empty(len(ids), bool)
    of_document[order] = held[inverse]
    return values[held], of_document


def cut_in_two(document: Document) -> tuple[Document, Document]:
    """Cuts at the last line break before 95% of the bytes, else at the last character boundary.

    Raises:
      UserError: the document has fewer than two characters.
    """
    data = document.text.encode()
    limit = int(len(data) * TRAIN_SHARE_OF_SINGLE_DOCUMENT)
    cut = data.rfind(b"\n", 0, limit) + 1
    if cut == 0:
        cut = len(data[:limit].decode(errors="ignore").encode())
    if cut == 0:
        raise UserError("The corpus is one document that is too short to split. Add text.")
    return (
        Document(f"{document.id}#head", data[:cut].decode()),
        Document(f"{document.id}#tail", data[cut:].decode()),
    )
