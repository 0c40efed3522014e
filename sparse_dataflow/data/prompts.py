"""Prompts cut from held-out documents, with how the document really goes on."""

import hashlib
import itertools
from dataclasses import dataclass

import numpy as np

from sparse_dataflow.data.corpora import Corpus
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files.errors import UserError

_DOCUMENTS_CONSIDERED = 10_000
_ROUNDS = 20


@dataclass(frozen=True)
class HeldOutPrompt:
    """A stretch of a document that training never saw.

    Attributes:
      document_id: where it is from.
      prompt_ids: int32 [prompt_tokens].
      continuation_ids: int32 [continuation_tokens], the tokens that follow in the document.
      prompt: `prompt_ids` as text.
      continuation: `continuation_ids` as text.
    """

    document_id: str
    prompt_ids: np.ndarray
    continuation_ids: np.ndarray
    prompt: str
    continuation: str


def heldout_prompts(
    corpus: Corpus,
    tokenizer: Tokenizer,
    count: int,
    prompt_tokens: int,
    continuation_tokens: int | None = None,
) -> list[HeldOutPrompt]:
    """Up to `count` prompts, the same at every call, from as many documents as possible.

    Each begins at the first line that starts after a place hashed from the document's id. Documents
    are taken in the order of a hash too, and again at another place if there are too few.

    Args:
      corpus: whose validation split is read.
      tokenizer: encodes the documents.
      count: prompts wanted; fewer come if the split is too small.
      prompt_tokens: length of each prompt.
      continuation_tokens: length of what follows; as long as the prompt if not given.

    Raises:
      UserError: no held-out document is long enough for one.
    """
    follow = prompt_tokens if continuation_tokens is None else continuation_tokens
    candidates = sorted(
        range(min(len(corpus.validation), _DOCUMENTS_CONSIDERED)),
        key=lambda index: _fraction(f"{corpus.content_hash}:{index}"),
    )
    found: dict[tuple[int, int], HeldOutPrompt] = {}
    for round_, index in itertools.product(range(_ROUNDS), candidates):
        if len(found) >= count:
            break
        document = corpus.validation[index]
        start = _line_start(document.text, _fraction(f"{document.id}:{round_}"))
        # No token is longer than this, so the slice has tokens enough if the document has.
        reach = (prompt_tokens + follow) * int(tokenizer.token_bytes.max())
        ids = tokenizer.encode(document.text[start : start + reach])
        if len(ids) < prompt_tokens + follow:
            continue
        prompt, rest = ids[:prompt_tokens], ids[prompt_tokens : prompt_tokens + follow]
        found[index, start] = HeldOutPrompt(
            document.id, prompt, rest, tokenizer.decode(prompt), tokenizer.decode(rest)
        )
    if not found and count > 0:
        raise UserError(
            f"No held-out document has {prompt_tokens + follow} tokens in a row; "
            "ask for shorter prompts or give more text."
        )
    return list(found.values())


def _fraction(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _line_start(text: str, fraction: float) -> int:
    """Start of the first line at or after that fraction of the text's first three quarters."""
    place = int(0.75 * fraction * len(text))
    return 0 if place == 0 else text.find("\n", place) + 1
