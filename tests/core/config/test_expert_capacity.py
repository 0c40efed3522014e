"""Rows that a device has for the experts of another: room for the worst choices of its tokens."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core.config.expert_rows import exchanged_rows
from sparse_dataflow.core.config.expert_rows import expert_rows as capacity
from sparse_dataflow.core.config.model import ModelConfig

MODEL = ModelConfig(2, 16, 2, 32, vocab_size=40, max_len=16, experts=1, top_k=1)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.data())
def test_buffer_has_room_for_the_worst_choices_and_no_more(prototypes, group, k, tokens, data):
    count = prototypes * group
    model = dataclasses.replace(MODEL, experts=count, prototypes=prototypes, top_k=min(k, group))
    devices = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    local, worst = count // devices, 0
    groups = [range(start, start + group) for start in range(0, count, group)]
    for chosen in itertools.product(*(itertools.combinations(g, model.top_k) for g in groups)):
        counts = [0] * devices
        for expert in itertools.chain(*chosen):
            counts[expert // local] += 1
        worst = max(worst, *counts)
    assert exchanged_rows(model, tokens, devices) == tokens * worst


@given(st.integers(1, 9), st.floats(0.1, 4), st.sampled_from([1, 2, 4, 8]))
def test_capacity_bounds_the_buffer(tokens, factor, devices):
    model = dataclasses.replace(MODEL, experts=8, top_k=2, expert_capacity=factor)
    dropless = dataclasses.replace(model, expert_capacity=0.0)
    bound = 8 // devices * capacity(model, tokens)
    assert exchanged_rows(model, tokens, devices) == min(
        bound, exchanged_rows(dropless, tokens, devices)
    )


@pytest.mark.parametrize(
    ("tokens", "factor", "rows"), [(5, 1.0, 2), (4, 1.0, 1), (3, 1.5, 2), (8, 1.25, 3), (1, 0.1, 1)]
)
def test_a_capacity_is_a_share_of_the_choices_rounded_up(tokens, factor, rows):
    model = dataclasses.replace(MODEL, experts=8, top_k=2, expert_capacity=factor)
    assert capacity(model, tokens) == rows
