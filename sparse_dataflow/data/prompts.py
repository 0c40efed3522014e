"""Prompts from held-out documents, with their true continuations."""

import hashlib
import itertools
from dataclasses import dataclass

from sparse_dataflow.data.corpus.splits import Corpus
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files.errors import UserError

_DOCUMENTS_CONSIDERED = 10_000
_ROUNDS = 20


@dataclass(frozen=True)
class HeldOutPrompt:
    """A passage of a held-out document.

    Attributes:
      prompt: text of `prompt_tokens` tokens.
      prompt_ids: its ids, with those in front of a text; see `Tokenizer.encode_prompts`.
      continuation: text of the `prompt_tokens` tokens that follow in the document.
    """

    document_id: str
    prompt: str
    prompt_ids: list[int]
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
        # Not the rest of the document, which may be a whole book.
        text = document.text[start : start + total * longest_token]
        cuts = tokenizer.cuts(text)
        if len(cuts) <= total:
            continue
        # Behind the next whole character.
        middle, end = (next(c for c in cuts[n:] if c >= 0) for n in (prompt_tokens, total))
        prompt = text[:middle]
        [ids] = tokenizer.encode_prompts([prompt])
        prompts[index, start] = HeldOutPrompt(document.id, prompt, ids, text[middle:end])
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
