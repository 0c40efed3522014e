"""Prompts from held-out documents, with their true continuations."""

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
    """A passage of a held-out document.

    Attributes:
      prompt_ids: int32 [prompt_tokens].
      prompt: `prompt_ids` as text.
      continuation: text of the `prompt_tokens` tokens that follow in the document.
    """

    document_id: str
    prompt_ids: np.ndarray
    prompt: str
    continuation: str


def held_out_prompts(
    corpus: Corpus, tokenizer: Tokenizer, count: int, prompt_tokens: int
) -> list[HeldOutPrompt]:
    """Returns up to `count` prompts from as many documents as possible; deterministic.

    A prompt begins at the first line start after a position hashed from the document id. Documents
    come in the order of a hash of their index, and repeat at other positions if there are too few.

    Args:
      corpus: corpus whose validation split is read.
      count: number of prompts; fewer are returned if the split is too small.
      prompt_tokens: tokens per prompt, and per continuation.

    Raises:
      UserError: no held-out document is long enough for one prompt.
    """
    total = 2 * prompt_tokens
    longest_token = int(tokenizer.token_bytes.max())
    candidates = sorted(
        range(min(len(corpus.validation), _DOCUMENTS_CONSIDERED)),
        key=lambda index: _fraction(f"{corpus.content_hash}:{index}"),
    )
    prompts: dict[tuple[int, int], HeldOutPrompt] = {}
    for round_, index in itertools.product(range(_ROUNDS), candidates):
        if len(prompts) >= count:
            break
        document = corpus.validation[index]
        start = _line_start(document.text, _fraction(f"{document.id}:{round_}"))
        ids = tokenizer.encode(document.text[start : start + total * longest_token])
        if len(ids) < total:
            continue
        prompt, continuation = ids[:prompt_tokens], ids[prompt_tokens:total]
        prompts[index, start] = HeldOutPrompt(
            document.id, prompt, tokenizer.decode(prompt), tokenizer.decode(continuation)
        )
    if not prompts and count > 0:
        raise UserError(
            f"No held-out document has {total} consecutive tokens. Use shorter prompts or add text."
        )
    return list(prompts.values())


def _fraction(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _line_start(text: str, fraction: float) -> int:
    """Returns the first line start at or after `fraction` of the text's first three quarters."""
    position = int(0.75 * fraction * len(text))
    return 0 if position == 0 else text.find("\n", position) + 1
