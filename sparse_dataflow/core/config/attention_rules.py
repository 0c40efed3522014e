"""The text of `model.attention_blocks`: rules of the layout of attention, and the side of a block.

Pure Python; `layouts.attention_blocks` has the layout.
"""

import functools
from typing import NamedTuple

from sparse_dataflow.core.config.settings import MOST_SIZE
from sparse_dataflow.files.errors import UserError

RULE_NAMES = ["window", "global", "random"]
"""Legal names of rules; `layouts.attention_blocks.register` adds others."""

NUMBERS = {"block": 128, "seed": 1}
"""Terms that add no blocks, and their defaults: tokens of a block, and what draws random ones."""


class AttentionBlocks(NamedTuple):
    """Which earlier blocks of tokens a block of tokens attends to.

    Attributes:
      rules: (name, blocks) in the order in which they choose.
      block: tokens of a block.
      seed: of random blocks; not that of a run, which may go on with the weights of another.
    """

    rules: tuple[tuple[str, int], ...]
    block: int = NUMBERS["block"]
    seed: int = NUMBERS["seed"]


@functools.cache
def parse(text: str) -> AttentionBlocks:
    """Reads a value of `model.attention_blocks`, such as "window:2,global:1,random:3,block:128".

    Raises:
      UserError: a name is unknown or given twice, or a number is not legal.
    """
    numbers: dict[str, int] = {}
    for term in text.split(","):
        name, _, number = term.partition(":")
        is_named = name in (*RULE_NAMES, *NUMBERS) and name not in numbers
        legal = is_named and number.isdecimal() and len(number) < 8
        if not legal or not 1 <= int(number) <= MOST_SIZE:
            raise UserError(
                f"model.attention_blocks={text[:60]} has {term[:30]!r}; legal: each of "
                f"{', '.join(RULE_NAMES)} at most once, with its blocks, block with its tokens, "
                "and seed, as in window:2,global:1,random:3,block:128,seed:2."
            )
        numbers[name] = int(number)
    block, seed = (numbers.pop(name, default) for name, default in NUMBERS.items())
    if not numbers:
        raise UserError(
            f"model.attention_blocks={text[:60]} names no blocks; legal: one or more of "
            f"{', '.join(RULE_NAMES)}."
        )
    return AttentionBlocks(tuple(numbers.items()), block, seed)
