"""What each block does with its activations until the backward pass: one kind for every block.

A text such as "offload+full:4,none:8" is four times the pattern (offload, full), then eight blocks
"none", in order of depth.  A kind alone, "full", is that of all blocks.  Logits are computed again
in chunks of `chunk_tokens`.

Importing this module loads no jax.
"""

import itertools
import re
from typing import Any

import numpy as np

from sparse_dataflow.files.errors import UserError

AUTO = "auto"
"""The planner chooses; only a `RunConfig` that it has not settled has this text."""

KINDS = ("none", "keep", "full", "offload")
"""none keeps all activations, keep the outputs of products and of attention, full recomputes all of
a block, offload copies the block's input and the outputs of products to host memory."""

PROJECTION_OUTPUT = "projection_output"
"""Checkpoint name of every projection's output, also within an op that is a whole MLP."""

ATTENTION_OUTPUT = "attention_output"
"""Checkpoint name of attention's output, and of the statistics of its softmax."""

KEYS_VALUES = "gathered_keys_values"
"""Checkpoint name of keys and values that come from other devices."""

_FORMER = re.compile(r"\bdots\b")

MOST_PATTERN = 8
"""Most blocks in a pattern: a loop's body has the program of each of them."""

_TERM = re.compile(r"([a-z]+(?:\+[a-z]+)*):(\d{1,6})")
_SHOWN = 60


def current(text: str) -> str:
    """Returns the text of a file of any version; "keep" was "dots" until attention was kept."""
    return _FORMER.sub("keep", text)


Terms = tuple[tuple[tuple[str, ...], int], ...]
"""(pattern, repeats) in order of depth."""


def terms(text: str) -> Terms:
    """Returns the terms of a text that is not AUTO; (((kind,), 0),) for a kind alone.

    Raises:
      UserError: the text is not legal.
    """
    if text in KINDS:
        return (((text,), 0),)
    result = []
    for part in text.split(","):
        match = _TERM.fullmatch(part)
        pattern = tuple(match[1].split("+")) if match else ()
        if not match or not set(pattern) <= set(KINDS) or not int(match[2]):
            raise UserError(
                f"model.remat={text[:_SHOWN]} is unknown. Legal: {', '.join(KINDS)}, or counts of "
                "blocks as in offload+full:4,none:8."
            )
        if len(pattern) > MOST_PATTERN:
            raise UserError(
                f"model.remat={text[:_SHOWN]} has a pattern of {len(pattern)} blocks; legal: 1 to "
                f"{MOST_PATTERN}."
            )
        result.append((pattern, int(match[2])))
    return tuple(result)


def kinds(text: str, layers: int) -> tuple[str, ...]:
    """Returns the kind of each block, in order of depth.

    Raises:
      UserError: the text is not legal, or describes another number of blocks.
    """
    if text in KINDS:
        return (text,) * layers
    listed = terms(text)
    count = sum(len(pattern) * repeats for pattern, repeats in listed)
    if count != layers:
        raise UserError(
            f"model.remat={text[:_SHOWN]} has {count} blocks, and the model {layers}; legal: "
            f"counts that add up to {layers}, or one of {', '.join(KINDS)}."
        )
    return tuple(itertools.chain.from_iterable(pattern * repeats for pattern, repeats in listed))


def loops(text: str, layers: int, part: range | None = None) -> Terms:
    """Returns the terms that describe the blocks of `part`, each the loop that runs them.

    They are the terms of the text.  Where one reaches beyond the part, they are few others.

    Args:
      text: for all blocks.
      layers: number of blocks.
      part: of the blocks; None for all.

    Raises:
      UserError: see `kinds`.
    """
    layer_kinds = kinds(text, layers)
    part = range(layers) if part is None else part
    if text in KINDS:
        return (((text,), len(part)),)
    result, start = [], 0
    for pattern, repeats in terms(text):
        stop = start + len(pattern) * repeats
        if part.start <= start and stop <= part.stop:
            result.append((pattern, repeats))
        elif part.start < stop and start < part.stop:
            return segments(layer_kinds[part.start : part.stop])
        start = stop
    return tuple(result)


def segments(layer_kinds: tuple[Any, ...]) -> tuple[tuple[tuple[Any, ...], int], ...]:
    """Returns what blocks have as few (pattern, repeats): from each on, the term that covers most.

    Of equal covers it takes the shortest pattern.
    """
    result, start = [], 0
    while start < len(layer_kinds):
        best: tuple[tuple[Any, ...], int] = (layer_kinds[start : start + 1], 1)
        for period in range(1, MOST_PATTERN + 1):
            pattern, repeats = layer_kinds[start : start + period], 1
            while layer_kinds[start + period * repeats :][:period] == pattern:
                repeats += 1
            # A pattern that does not repeat is no loop: it counts as its first block.
            covers = period * repeats if repeats > 1 else 1
            if covers > len(best[0]) * best[1]:
                best = (pattern, repeats)
        result.append(best)
        start += len(best[0]) * best[1]
    return tuple(result)


def text(loop_terms: Terms) -> str:
    """Returns the text of terms; a kind alone where all blocks have it."""
    used = {kind for pattern, _ in loop_terms for kind in pattern}
    if len(used) == 1:
        return used.pop()
    return ",".join(f"{'+'.join(pattern)}:{repeats}" for pattern, repeats in loop_terms)


CPU_TOKENS = 512
"""Tokens of a chunk on a CPU, and the fewest elsewhere.  The planner counts those of a GPU or TPU
for a CPU too: at most half a GiB more."""

MOST_TOKENS = 4096
LOGITS_BYTES = 2**29
"""Most bytes of a chunk's float32 logits on a GPU or TPU.  Each chunk reads and writes the gradient
of the whole embedding, and pads the embedding, so few long chunks are faster: on an H100 chunks of
512 tokens took 39 ms of a 256 ms step of 6.7B, 60% of it in these passes."""


def chunk_tokens(vocabulary: object) -> Any:
    """Returns the tokens of a chunk on a GPU or TPU, a power of two.

    Args:
      vocabulary: rows of the output layer on a device, a number or an array of numbers.
    """
    # A logit takes 4 bytes.
    fitting = 2 ** np.floor(np.log2(LOGITS_BYTES / (4 * np.asarray(vocabulary))))
    return np.clip(fitting, CPU_TOKENS, MOST_TOKENS).astype(int)
