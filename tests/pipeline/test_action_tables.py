"""Pipeline schedules: correct, with the bubble and memory of the closed forms."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.pipeline import action_tables
from sparse_dataflow.pipeline.action_tables import (
    BACKWARD,
    FORWARD,
    IDLE,
    RECOMPUTE,
    RULES,
    WEIGHTS,
    make,
)
from sparse_dataflow.pipeline.table_slots import allocate


@st.composite
def counts(draw, name=None, recompute=None):
    """Legal arguments of `make`."""
    name = name or draw(st.sampled_from(sorted(RULES)))
    stages, chunks = draw(st.integers(1, 6)), 1
    micro_batches = draw(st.integers(1, 14))
    if name in action_tables.CHUNKED:
        chunks = draw(st.integers(1, 3))
    if name == "interleaved":
        micro_batches = stages * draw(st.integers(1, 3))
    recompute = draw(st.booleans()) if recompute is None else recompute
    return name, stages, micro_batches, chunks, recompute


def ticks_of(table):
    """Returns {(action, micro-batch, virtual stage): tick}, read from the table cell by cell."""
    ticks = {}
    for stage, tick in np.ndindex(table.action.shape):
        cell = [int(t[stage, tick]) for t in (table.action, table.micro_batch)]
        number = int(table.chunk[stage, tick]) * table.stages + stage
        if cell[0] != IDLE:
            assert (*cell, number) not in ticks, "twice"
            ticks[*cell, number] = tick
    return ticks


@given(counts())
def test_every_action_comes_after_its_inputs(arguments):
    table = make(*arguments)
    ticks, last = ticks_of(table), table.virtual_stages - 1
    recompute = RECOMPUTE in table.actions
    assert recompute == arguments[-1]
    assert len(ticks) == (3 + recompute) * table.micro_batches * table.virtual_stages
    for (action, i, number), tick in ticks.items():
        before = []
        if action == FORWARD and number:
            before.append((FORWARD, i, number - 1))
        if action != FORWARD:
            before.append((FORWARD, i, number))
        if action == BACKWARD and number < last:
            before.append((BACKWARD, i, number + 1))
        if action == BACKWARD and recompute:
            before.append((RECOMPUTE, i, number))
        if action == WEIGHTS:
            before.append((BACKWARD, i, number))
        assert all(ticks[other] < tick for other in before)


@given(counts(recompute=False))
def test_the_bubble_equals_the_closed_forms(arguments):
    """With actions of equal length, so that a backward (B and W) is twice a forward."""
    name, p, m, v, _ = arguments
    bubble = make(*arguments).bubble()
    if name == "gpipe" and m < p:
        # A stage waits for the last one between its chunks.
        assert bubble <= (p - 1) / (m + p - 1) + 1e-9
    elif name == "zero_bubble":
        if m >= p:
            # 3 m + p - 1 ticks: the gradient alone travels (arXiv 2401.10241, table 1).
            assert bubble == pytest.approx((p - 1) / (3 * m + p - 1))
        assert bubble <= (p - 1) / (m + p - 1) + 1e-9
    else:
        assert bubble == pytest.approx((p - 1) / (m * v + p - 1))


@given(counts(recompute=True))
def test_recomputing_in_the_bubble_costs_no_time(arguments):
    _, p, m, v, _ = arguments
    v = v if m >= p else 1
    assert make(*arguments).bubble() <= (p - 1) / (m * v + p - 1) + 1e-9


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 3))
def test_chunks_and_split_gradients_shrink_the_bubble(p, groups, v):
    m = p * groups
    whole = make("1f1b", p, m).bubble()
    assert make("interleaved", p, m, v).bubble() < whole
    assert make("zero_bubble", p, m).bubble() < whole


@given(counts(), st.tuples(*[st.floats(0.1, 9)] * 4))
def test_a_tick_lasts_as_long_as_its_longest_action(arguments, lengths):
    table, seconds = make(*arguments), (0, *lengths)
    total = 0.0
    for tick in range(table.ticks):
        total += max(seconds[a] for a in table.action[:, tick])
    assert table.duration(seconds) == pytest.approx(total)
    busy = sum(seconds[a] for a in table.action.reshape(-1))
    assert table.bubble(seconds) == pytest.approx(1 - busy / table.stages / total, abs=1e-9)


def stored(table):
    """Returns the maximum number of stored (micro-batch, virtual stage) pairs of each stage."""
    most = []
    for stage in range(table.stages):
        delta = np.zeros(table.ticks + 1, int)
        delta[:-1] += table.action[stage] == FORWARD
        delta[1:] -= table.action[stage] == WEIGHTS
        most.append(np.cumsum(delta).max())
    return most


@given(counts())
def test_stored_activations_are_as_few_as_the_schedule_allows(arguments):
    name, p, m, v, _ = arguments
    table = make(*arguments)
    peak = allocate(table).peak
    np.testing.assert_array_equal(peak["saved"], stored(table))
    if name == "gpipe":
        assert set(peak["saved"]) == {m * v}
    if name == "1f1b":
        np.testing.assert_array_equal(peak["saved"], [min(m, p - s) for s in range(p)])
        assert max(peak["pending"]) == 1
    if name == "zero_bubble":
        assert max(peak["saved"]) <= p
    if name == "interleaved":
        # The forwards before the first backward, as arXiv 2104.04473, section 2.2, orders them.
        np.testing.assert_array_equal(
            peak["saved"], [min(m * v, 2 * (p - 1 - s) + (v - 1) * p + 1) for s in range(p)]
        )


@given(counts())
def test_slots_hold_the_content_that_actions_read(arguments):
    """Runs the table on labels instead of arrays."""
    table = make(*arguments)
    slots, last = allocate(table), table.virtual_stages - 1
    empty = lambda name: [dict() for _ in range(table.stages)]  # noqa: E731
    buffers = {name: empty(name) for name in slots.peak}
    sent = {name: [(-1, -1)] * table.stages for name in ("activation", "gradient")}
    for tick in range(table.ticks):
        arriving = {
            "activation": [sent["activation"][s - 1] for s in range(table.stages)],
            "gradient": [sent["gradient"][(s + 1) % table.stages] for s in range(table.stages)],
        }
        for stage in range(table.stages):
            at = lambda name: getattr(slots, name)[stage, tick]  # noqa: B023, E731
            for name in arriving:
                if at(name + "_arrives") >= 0:
                    buffers[name][stage][at(name + "_arrives")] = arriving[name][stage]
            action, i = table.action[stage, tick], table.micro_batch[stage, tick]
            number = table.chunk[stage, tick] * table.stages + stage
            slot = lambda name: buffers[name][stage][at(name)]  # noqa: B023, E731
            if action == FORWARD:
                assert number == 0 or list(slot("activation")) == [i, number - 1]
                buffers["saved"][stage][at("saved")] = (i, number)
                sent["activation"][stage] = (i, number)
                if number == last:
                    buffers["gradient"][stage][at("gradient")] = (i, number + 1)
            if action == RECOMPUTE:
                assert slot("saved") == (i, number)
                buffers["recomputed"][stage][at("recomputed")] = (i, number)
            if action == BACKWARD:
                assert tuple(slot("gradient")) == (i, number + 1) and slot("saved") == (i, number)
                assert RECOMPUTE not in table.actions or slot("recomputed") == (i, number)
                buffers["pending"][stage][at("pending")] = (i, number)
                sent["gradient"][stage] = (i, number)
            if action == WEIGHTS:
                assert slot("pending") == slot("saved") == (i, number)
                assert RECOMPUTE not in table.actions or slot("recomputed") == (i, number)
    for name, contents in buffers.items():
        assert [len(c) for c in contents] == list(slots.peak[name])


@given(st.integers(1, 6), st.integers(1, 14), st.integers(1, 3))
def test_an_evaluation_has_forward_actions_alone(p, m, v):
    table = action_tables.forward_only(p, m, v)
    slots = allocate(table)
    assert set(np.unique(table.action)) <= {IDLE, FORWARD}
    assert table.ticks >= m * v + p - 1
    assert (table.ticks == m * v + p - 1) or m < p
    assert np.all(slots.gradient_arrives < 0) and not slots.peak["saved"].any()


@given(counts(), st.data())
def test_a_damaged_table_is_refused(arguments, data):
    table = make(*arguments)
    busy = np.argwhere(table.action != IDLE)
    stage, tick = data.draw(st.sampled_from([tuple(cell) for cell in busy.tolist()]))
    action = table.action.copy()
    action[stage, tick] = data.draw(
        st.sampled_from([a for a in range(5) if a != action[stage, tick]])
    )
    with pytest.raises(ValueError, match="does not happen once"):
        dataclasses.replace(table, action=action)


@given(counts())
def test_a_reversed_table_is_refused(arguments):
    table = make(*arguments)
    turned = {name: getattr(table, name)[:, ::-1] for name in ("action", "micro_batch", "chunk")}
    with pytest.raises(ValueError, match="comes before"):
        dataclasses.replace(table, **turned)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 4), "legal: gpipe, 1f1b, interleaved, zero_bubble"),
        (("1f1b", 0, 4), "legal: each at least 1"),
        (("1f1b", 2, 4, 2), "stages of 1f1b hold one chunk; legal: 1f1b, or interleaved:2"),
        (("interleaved", 4, 6, 2), "6 micro-batches.*legal: multiples of 4, such as 8"),
        (("interleaved", 4, 2, 2), "2 micro-batches.*legal: multiples of 4, such as 4"),
    ],
)
def test_illegal_counts_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        make(*arguments)
