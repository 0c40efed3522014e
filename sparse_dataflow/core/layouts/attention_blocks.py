"""Which blocks of keys each block of queries reads: a layout of attention.

Attention is a matrix [keys, queries], and a `BlockLayout` says which of its blocks are computed.
Keys are the inputs and queries are the outputs, both in blocks of tokens.  Rules add blocks, as in
Big Bird (arXiv 2007.14062, section 2): a sliding window, global blocks and random blocks.  Every
query reads its own block, and no later one.
"""

import functools
from collections.abc import Callable

import numpy as np

from sparse_dataflow.core.config.attention_rules import RULE_NAMES, AttentionBlocks
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.files.errors import UserError

Rule = Callable[[int, int, np.ndarray, int], np.ndarray]
"""(block of queries, count, earlier blocks that no rule has added yet, seed) -> blocks to add.

What a block of queries reads does not depend on later blocks, so that a text and its beginning have
one layout.
"""

RULES: dict[str, Rule] = {}

MOST_ROWS = 2**14
"""Most blocks of a row of text: its mask has so many rows and columns."""


def register(name: str) -> Callable[[Rule], Rule]:
    """Returns a decorator that registers a rule of `model.attention_blocks`."""

    def add(rule: Rule) -> Rule:
        RULES[name] = rule
        if name not in RULE_NAMES:
            RULE_NAMES.append(name)
        return rule

    return add


@register("window")
def _window(query, count, free, seed):
    """The last `count` blocks, of which the query's own is one."""
    return free[free > query - count]


@register("global")
def _global(query, count, free, seed):
    """The first `count` blocks."""
    return free[free < count]


@register("random")
def _random(query, count, free, seed):
    """Drawn blocks, as many as there are up to `count`."""
    rng = np.random.default_rng((seed, query))
    return rng.choice(free, min(count, len(free)), replace=False)


@functools.lru_cache(64)
def attention_layout(blocks: AttentionBlocks | BlockLayout, tokens: int) -> BlockLayout | None:
    """Returns the layout of attention over a number of tokens; None if it has all earlier blocks.

    Args:
      blocks: the rules of the layout, or a layout, which may be of more tokens.
      tokens: of a row of text; the last block may have fewer than others.

    Raises:
      UserError: there are too many blocks, or a given layout is for fewer tokens, has a later
        block, or lacks a query's own.
    """
    count = -(-tokens // blocks.block)
    if count > MOST_ROWS:
        raise UserError(
            f"Attention to blocks of {blocks.block} tokens has {count} of them; legal for {tokens} "
            f"tokens: blocks of {-(-tokens // MOST_ROWS)} or more."
        )
    is_layout = isinstance(blocks, BlockLayout)
    mask = _checked_mask(blocks, count) if is_layout else _mask(blocks, count)
    everything = np.triu(np.ones_like(mask))
    return None if np.array_equal(mask, everything) else BlockLayout.from_mask(mask, blocks.block)


def _mask(blocks, count):
    mask = np.eye(count, dtype=bool)
    for query in range(count):
        read = mask[:, query]
        for name, number in blocks.rules:
            read[RULES[name](query, number, np.flatnonzero(~read[:query]), blocks.seed)] = True
    return mask


def _checked_mask(layout, count):
    mask = layout.mask[:count, :count]
    square = layout.in_blocks == layout.out_blocks >= count
    if not square or not mask.diagonal().all() or np.tril(mask, -1).any():
        raise UserError(
            f"A layout of attention is {layout!r}; legal for {count} blocks of tokens: as many "
            "blocks of keys as of queries, each query with its own block and none after it."
        )
    return mask


@functools.lru_cache(64)
def slot_contents(layout: BlockLayout) -> np.ndarray:
    """Returns which block of keys each slot of a cache has while each block of queries is written.

    A block stays from its own queries to the last that read it; then the next one takes its slot.

    Args:
      layout: as of `attention_layout`.

    Returns:
      int32 [blocks of queries, slots]; -1 where a slot has none.
    """
    last = [int(np.flatnonzero(layout.mask[block])[-1]) for block in range(layout.in_blocks)]
    slots: list[int] = []
    rows = []
    for query in range(layout.in_blocks):
        slots = [block if block >= 0 and last[block] >= query else -1 for block in slots]
        if -1 not in slots:
            slots.append(-1)
        slots[slots.index(-1)] = query
        rows.append(list(slots))
    contents = np.full((len(rows), len(slots)), -1, np.int32)
    for row, blocks in zip(contents, rows):
        row[: len(blocks)] = blocks
    return contents


def visible_pairs(blocks: AttentionBlocks, tokens: int) -> float:
    """Returns how many pairs of a query and a key the layout has; of a query's own block, half."""
    layout = attention_layout(blocks, tokens)
    if layout is None:
        return tokens**2 / 2
    # Tokens of each block; the last one may have fewer.
    sizes = np.full(layout.in_blocks, layout.block)
    sizes[-1] -= sizes.sum() - tokens
    pairs = sizes[layout.rows] * sizes[layout.cols]
    return float(np.where(layout.rows == layout.cols, pairs / 2, pairs).sum())
