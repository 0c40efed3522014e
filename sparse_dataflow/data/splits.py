"""The rule that holds documents out for validation.

A document is held out iff the first 8 bytes of sha256(document id), as a big-endian integer, are
divisible by 20. This selects about one document in twenty, the same on every machine and for every
other content of the corpus. If it leaves a split of a small corpus empty, the document with the
smallest hash is held out. A single document is cut at the last line break before 95% of its UTF-8
bytes.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from sparse_dataflow.data.documents import Document
from sparse_dataflow.files.errors import UserError

HOLD_OUT_EVERY = 20
TRAIN_SHARE_OF_SINGLE_DOCUMENT = 0.95


def document_hash(document_id: str) -> int:
    """Returns the first 8 bytes of sha256(id in UTF-8) as a big-endian integer."""
    return int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:8], "big")


def is_held_out(document_id: str) -> bool:
    """Returns whether the hash rule alone holds the document out."""
    return document_hash(document_id) % HOLD_OUT_EVERY == 0


@dataclass(frozen=True)
class Split:
    """The split of one corpus.

    Attributes:
      count: number of documents, at least 1.
      only_held_out: id of the single held-out document, where the hash rule leaves a split empty.
    """

    count: int
    only_held_out: str | None

    def assign(self, document: Document) -> list[tuple[str, Document]]:
        """Returns [(split name, document)]; a single document yields one piece for each split."""
        if self.count == 1:
            head, tail = cut_in_two(document)
            return [("train", head), ("validation", tail)]
        if self.only_held_out is None:
            held_out = is_held_out(document.id)
        else:
            held_out = document.id == self.only_held_out
        return [("validation" if held_out else "train", document)]


def split_for(document_ids: Iterable[str]) -> Split:
    """Returns the split of the corpus with these ids, in one pass and constant memory.

    Raises:
      UserError: there are no documents.
    """
    count, held_out, smallest = 0, 0, None
    for document_id in document_ids:
        count += 1
        held_out += is_held_out(document_id)
        key = (document_hash(document_id), document_id)
        smallest = key if smallest is None else min(smallest, key)
    if smallest is None:
        raise UserError("The corpus has no text.")
    return Split(count, smallest[1] if held_out in (0, count) else None)


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
