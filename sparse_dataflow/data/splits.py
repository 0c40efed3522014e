"""The rule that holds whole documents out for validation.

A document is held out iff the first 8 bytes of sha256(document id), read as a big-endian integer,
are divisible by 20: about one in twenty, the same ones on every machine, whatever else is added to
the corpus. A corpus so small that this leaves one split empty holds out the one document with the
smallest hash; a single document is cut at the last line break before 95% of its UTF-8 bytes.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from sparse_dataflow.data.documents import Document
from sparse_dataflow.files.errors import UserError

HELD_OUT_ONE_IN = 20
TRAIN_SHARE_OF_SINGLE_DOCUMENT = 0.95


def document_hash(document_id: str) -> int:
    """First 8 bytes of sha256(id in UTF-8), big-endian."""
    return int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:8], "big")


def is_held_out(document_id: str) -> bool:
    """Whether the hashed rule, taken alone, puts the document into validation."""
    return document_hash(document_id) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Split:
    """Which documents of one corpus are held out.

    Attributes:
      count: documents of the corpus, at least 1.
      only_held_out: the one document to hold out where the hashed rule would leave a split empty.
    """

    count: int
    only_held_out: str | None

    def parts(self, document: Document) -> list[tuple[str, Document]]:
        """The document under the name of its split, or a single document's two halves."""
        if self.count == 1:
            head, tail = cut_in_two(document)
            return [("train", head), ("validation", tail)]
        if self.only_held_out is None:
            held_out = is_held_out(document.id)
        else:
            held_out = document.id == self.only_held_out
        return [("validation" if held_out else "train", document)]


def split_for(document_ids: Iterable[str]) -> Split:
    """Reads the ids once, keeping none of them, and settles the split of that corpus.

    Raises:
      UserError: there is no document.
    """
    count, held_out, smallest = 0, 0, None
    for document_id in document_ids:
        count += 1
        held_out += is_held_out(document_id)
        key = (document_hash(document_id), document_id)
        smallest = key if smallest is None else min(smallest, key)
    if smallest is None:
        raise UserError("The corpus holds no text.")
    return Split(count, smallest[1] if held_out in (0, count) else None)


def cut_in_two(document: Document) -> tuple[Document, Document]:
    """Cuts at the last line break before 95% of the bytes, or between characters if none is there.

    Raises:
      UserError: the document has fewer than two characters.
    """
    data = document.text.encode()
    limit = int(len(data) * TRAIN_SHARE_OF_SINGLE_DOCUMENT)
    cut = data.rfind(b"\n", 0, limit) + 1
    if cut == 0:
        cut = len(data[:limit].decode(errors="ignore").encode())
    if cut == 0:
        raise UserError("The corpus is one document too short to be split; give more text.")
    return (
        Document(f"{document.id}#head", data[:cut].decode()),
        Document(f"{document.id}#tail", data[cut:].decode()),
    )
