"""Pipelines over eight virtual devices, in the schedule's memory."""

import itertools

import numpy as np
import pytest
from eight_devices import on_eight_devices
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.pipeline import action_tables, pipeline, stages


@pytest.mark.slow
def test_memory_follows_the_schedule_and_not_the_micro_batches():
    """Temporaries of compiled programs for 8 and 32 micro-batches."""
    texts = [f"stage:8/3/{m}/{schedule}/1" for schedule in ("1f1b", "gpipe") for m in (8, 32)]
    results = on_eight_devices("core/executors/pipeline_runs.py", "memory", *texts)
    *flat, few, many = (results[text] for text in texts)
    assert np.ptp(flat) < 0.05 * flat[0]
    assert many > 1.9 * few


@pytest.mark.slow
def test_a_tick_computes_its_action_alone():
    """The compiler hoists no block out of a loop with trip count zero."""
    assert on_eight_devices("core/executors/pipeline_runs.py", "calls", "4x4") == {"4x4": 3 * 4 * 4}


@pytest.mark.slow
def test_weights_are_gathered_once_per_step():
    (results,) = on_eight_devices(
        "core/executors/pipeline_runs.py", "gathers", "stage:2,fsdp:4/3/4/1f1b/1"
    ).values()
    assert results["inside"] == 0 and results["outside"] > 0


@st.composite
def divisions(draw):
    counts, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    layers = tuple(draw(st.integers(1, 4)) for _ in range(counts * chunks))
    even = stages.divide(counts * chunks + draw(st.integers(0, 9)), counts, chunks)
    return draw(st.sampled_from([even, stages.Division(counts, chunks, layers)]))


@given(divisions())
def test_blocks_go_to_their_stages_and_back(division):
    total = sum(division.layers)
    blocks = {"a": np.arange(total), "b": np.random.default_rng(0).normal(size=(total, 2))}
    placed = stages.to_stages(division, blocks)
    by_stage = np.reshape(placed["a"], (division.stages, division.chunks, division.capacity))
    in_order = [
        by_stage[stage, chunk, : division.chunk_layers[stage, chunk]]
        for chunk in range(division.chunks)
        for stage in range(division.stages)
    ]
    np.testing.assert_array_equal(np.concatenate(in_order), np.arange(total))
    back = stages.from_stages(division, placed)
    for name, leaf in blocks.items():
        np.testing.assert_array_equal(back[name], leaf)


@given(divisions(), st.data())
def test_a_stage_finds_each_block_of_each_group(division, data):
    """Groups are arrays of their own, each divided as the blocks are."""
    total = sum(division.layers)
    cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=3))) if total > 1 else []
    groups = [range(*ends) for ends in itertools.pairwise([0, *cuts, total])]
    kinds = [data.draw(st.integers(0, 2)) for _ in range(total)]
    places = stages.block_places(division, kinds, groups)
    arrays = [
        np.reshape(
            stages.to_stages(stages.part(division, layers), np.asarray(layers)),
            (division.stages, -1),
        )
        for layers in groups
    ]
    for place, block in np.ndenumerate(division.block_indices.reshape(places.shape[:3])):
        if block >= 0:
            kind, index = places[place]
            [group] = [g for g, layers in enumerate(groups) if block in layers]
            assert kind == kinds[block] and arrays[group][place[0], index] == block


def test_the_first_stages_get_the_remainder():
    assert stages.divide(12, 2, 2).layers == (3, 3, 3, 3)
    assert stages.divide(14, 4).layers == (4, 4, 3, 3)


def test_illegal_divisions_are_refused():
    with pytest.raises(UserError, match=r"5 layers.*stage:4 with 2 chunks.*legal stages: 1, 2\."):
        stages.divide(5, 4, 2)


def test_tables_of_equal_shape_share_a_program():
    """Their tables differ in values alone."""
    division = stages.divide(4, 4)
    for name in action_tables.RULES:
        plan = pipeline.make_plan(division, action_tables.make(name, 4, 8))
        rows = pipeline.rows(plan)
        assert rows.shape == (4, plan.table.ticks, len(pipeline.Row._fields))
        assert rows.dtype == np.int32
        np.testing.assert_array_equal(rows[..., 0], plan.table.action)
    with pytest.raises(ValueError, match="differ in stages"):
        pipeline.make_plan(division, action_tables.make("1f1b", 2, 8))
