"""Layouts of attention: what each rule adds, for any number of tokens."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core.config.attention_rules import RULE_NAMES, AttentionBlocks, parse
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.layouts import attention_blocks
from sparse_dataflow.core.layouts.attention_blocks import (
    attention_layout,
    slot_contents,
    visible_pairs,
)
from sparse_dataflow.files.errors import UserError

RULES = st.lists(
    st.tuples(st.sampled_from(["window", "global", "random"]), st.integers(1, 5)),
    min_size=1, max_size=3, unique_by=lambda rule: rule[0],
)  # fmt: skip
BLOCKS = st.builds(
    AttentionBlocks, st.builds(tuple, RULES), st.integers(1, 9), st.integers(0, 2**32)
)


def mask_of(blocks, tokens):
    layout = attention_layout(blocks, tokens)
    count = -(-tokens // blocks.block)
    return np.triu(np.ones((count, count), bool)) if layout is None else layout.mask


@given(BLOCKS, st.integers(1, 80))
def test_a_query_reads_its_own_block_the_parts_and_no_later_block(blocks, tokens):
    mask, numbers = mask_of(blocks, tokens), dict(blocks.rules)
    assert mask.diagonal().all() and not np.tril(mask, -1).any()
    for query, read in enumerate(mask.T):
        assert read[: numbers.get("global", 0)][: query + 1].all()
        assert read[max(0, query + 1 - numbers.get("window", 1)) : query + 1].all()
        earlier = min(query + 1, sum(numbers.values()) + 1)
        assert min(query + 1, max(numbers.values())) <= read.sum() <= earlier


@given(BLOCKS, st.integers(1, 60), st.integers(0, 40))
def test_the_beginning_of_a_text_has_the_beginning_of_its_layout(blocks, tokens, more):
    short, long = mask_of(blocks, tokens), mask_of(blocks, tokens + more)
    assert np.array_equal(short, long[: len(short), : len(short)])


@given(BLOCKS, st.integers(1, 60))
def test_a_cache_holds_what_later_queries_read_and_no_more_slots_than_that(blocks, tokens):
    layout = attention_layout(blocks, tokens)
    if layout is None:
        return
    contents, most = slot_contents(layout), 0
    for query, row in enumerate(contents):
        later = layout.mask[: query + 1, query:].any(1)
        most = max(most, later.sum())
        assert set(row[row >= 0]) == set(np.flatnonzero(later))
        # A block keeps its slot.
        stays = (row >= 0) & (row < query)
        assert (row == contents[query - 1])[stays].all()
    assert contents.shape == (layout.in_blocks, most)


@given(BLOCKS, st.integers(1, 60))
def test_pairs_are_those_of_the_mask_with_half_of_a_querys_own_block(blocks, tokens):
    at = np.arange(tokens) // blocks.block
    seen = mask_of(blocks, tokens)[at[None], at[:, None]] & (at[:, None] >= at)
    own = at[:, None] == at
    halves = own.sum() / 2 if attention_layout(blocks, tokens) else tokens**2 / 2
    others = (seen & ~own).sum() if attention_layout(blocks, tokens) else 0
    assert visible_pairs(blocks, tokens) == halves + others


def test_too_many_blocks_are_refused_before_their_mask_exists():
    with pytest.raises(UserError, match="legal for 1000000 tokens: blocks of 62 or more"):
        attention_layout(parse("window:1,block:1"), 10**6)


def test_random_blocks_depend_on_the_seed_of_the_text_alone():
    one, other = (mask_of(parse(f"random:2,block:1,seed:{seed}"), 40) for seed in (1, 2))
    assert one.sum() == other.sum() and not np.array_equal(one, other)
    # A run that goes on with the weights of another one may have a seed of its own.
    model = ModelConfig(num_layers=1, d_model=16, num_heads=1, d_ff=64, vocab_size=256, max_len=64,
                        attention_blocks="random:2,block:1")  # fmt: skip
    assert dataclasses.replace(model, seed=7).blocks == model.blocks == parse("random:2,block:1")


def test_a_part_of_ones_own():
    @attention_blocks.register("strided")
    def strided(query, count, free, seed):
        return free[(query - free) % count == 0]

    try:
        mask = mask_of(parse("strided:3,block:2"), 20)
        assert np.flatnonzero(mask[:, 7]).tolist() == [1, 4, 7]
    finally:
        attention_blocks.RULES.pop("strided")
        RULE_NAMES.remove("strided")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("windows:2", "has 'windows:2'; legal: each of window, global, random"),
        ("window", "has 'window'"),
        ("window:0", "has 'window:0'"),
        ("window:-1", "has 'window:-1'"),
        ("window:1.5", "has 'window:1.5'"),
        ("window:99999999999", "has 'window:99999999999'"),
        ("window:2,window:3", "at most once"),
        ("window:2,", "has ''"),
        ("block:64", "names no blocks"),
    ],
)
def test_an_illegal_text_is_refused_with_the_legal_names(text, message):
    with pytest.raises(UserError, match=message):
        parse(text)


def test_a_text_names_parts_and_the_tokens_of_a_block():
    rules = (("window", 2), ("global", 1), ("random", 3))
    assert parse("window:2,global:1,random:3,block:64,seed:5") == AttentionBlocks(rules, 64, 5)
    assert parse("window:2").block == 128
