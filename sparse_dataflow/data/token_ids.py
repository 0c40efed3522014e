"""The ids of `token_files` as the tokens of a tokenizer, checked, counted and as text."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sparse_dataflow.data.cache import ChainedArray, MappedArray, atomic_write, exclusive
from sparse_dataflow.data.corpora import Corpus
from sparse_dataflow.data.documents import Document
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

_CHUNK = 2**22


@dataclass(frozen=True)
class Counts:
    """What one pass over token ids counted.

    Attributes:
      documents: ends of text, and one more for ids after the last of them.
      text_bytes: UTF-8 bytes of the tokens.
    """

    documents: int
    text_bytes: int


def mapped(
    name: str, array: ChainedArray, tokenizer: Tokenizer, cache_dir: Path, digest: str
) -> tuple[MappedArray, Counts]:
    """Returns the ids as those of a tokenizer, after a pass over all of them, of which the cache
    keeps the result.

    Raises:
      UserError: an id is not in the vocabulary.
    """
    table = tokenizer.ids_from_original if tokenizer.original else np.empty(0, np.int32)
    ids = MappedArray(array, table)
    key = hashlib.sha256(f"{digest}:{len(array)}:{tokenizer.content_hash}".encode()).hexdigest()
    path = cache_dir / "tokens" / f"counts-{key[:32]}.json"
    try:
        return ids, Counts(**json_files.parse(path.read_text()))
    except (OSError, ValueError, TypeError):
        pass
    bytes_of = np.asarray(tokenizer.token_bytes, np.int64)
    documents = text_bytes = 0
    for first in range(0, len(array), _CHUNK):
        chunk = array[first : first + _CHUNK]
        if len(chunk) and not 0 <= int(chunk.min()) <= int(chunk.max()) < tokenizer.vocab_size:
            wrong = int(chunk.max()) if chunk.max() >= tokenizer.vocab_size else int(chunk.min())
            raise UserError(
                f"{name} has the token id {wrong}, and its tokenizer has {tokenizer.vocab_size:,} "
                "tokens; name the tokenizer that wrote it with data.tokenizer, or data.tokenizer="
                "none with the vocabulary size in model.vocab_size."
            )
        chunk = ids[first : first + _CHUNK]
        documents += int((chunk == tokenizer.eot_id).sum())
        text_bytes += int(bytes_of[chunk].sum())
    if len(ids) and ids[len(ids) - 1 : len(ids)][0] != tokenizer.eot_id:
        documents += 1
    counts = Counts(documents, text_bytes)
    with exclusive(cache_dir, f"counts-{key[:32]}"), atomic_write(path) as temporary:
        temporary.write_text(json.dumps(vars(counts)))
    return ids, counts


class IdDocuments(Sequence[Document]):
    """The first documents of token ids as text, up to a few thousand tokens each."""

    LONGEST, MOST = 4096, 256

    def __init__(self, name: str, ids: Any, tokenizer: Tokenizer):
        head = ids[: self.LONGEST * self.MOST]
        ends = np.flatnonzero(head == tokenizer.eot_id)
        parts = [part[part != tokenizer.eot_id] for part in np.split(head, ends + 1)]
        parts = [part[: self.LONGEST] for part in parts if len(part)][: self.MOST]
        self._name, self._parts, self._tokenizer = name, parts, tokenizer

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> Document:  # type: ignore[override]
        text = self._tokenizer.decode(self._parts[index])
        return Document(f"{self._name}:{range(len(self))[index]}", text)


def with_text(corpus: Corpus, tokenizer: Tokenizer) -> Corpus:
    """Returns a corpus of token ids with the text of some held-out documents, any other as it is;
    an unknown tokenizer gives none."""
    if corpus.ids is None or not tokenizer.has_text:
        return corpus
    table = tokenizer.ids_from_original if tokenizer.original else np.empty(0, np.int32)
    ids = MappedArray(corpus.ids.validation, table)
    return replace(corpus, validation=IdDocuments(corpus.name, ids, tokenizer))
