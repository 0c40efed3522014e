"""Pipelines over eight virtual devices: training as on one device, in the memory of the table."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.errors import UserError
from sparse_dataflow.execution import pipeline, schedules, stages

ROOT = pathlib.Path(__file__).parents[2]


def on_eight_devices(*cases):
    """What pipeline_runs.py prints of each case, in a process of eight virtual CPU devices."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/execution'}",
        # Threads of XLA's pool: devices wait for each other, each on one.
        "NPROC": "32",
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/execution/pipeline_runs.py"), json.dumps(cases)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-len(cases) :]]


def case(model, layers, schedule, micro_batches, axes, **more):
    settings = {"model": model, "layers": layers, "schedule": schedule}
    return settings | {"micro_batches": micro_batches, "axes": axes} | more


EVERYDAY = [
    # Each schedule, each way to cut a stage, dense and block-sparse, layers that divide and do not.
    case("dense", 4, "gpipe", 2, {"stage": 2, "data": 2, "tensor": 2}),
    case("dense", 4, "1f1b", 8, {"stage": 4}),
    case("mixed", 5, "interleaved", 4, {"stage": 2, "tensor": 2}, chunks=2, remat="full"),
    case("mixed", 5, "zero_bubble", 4, {"stage": 2, "fsdp": 2}, division=[2, 3], remat="dots"),
]
NIGHTLY = [
    case("dense", 8, "1f1b", 8, {"stage": 8}, remat="full"),
    case("dense", 8, "interleaved", 8, {"stage": 4, "fsdp": 2}, chunks=2),
    case("dense", 8, "zero_bubble", 2, {"stage": 4, "tensor": 2}),
    case("dense", 8, "gpipe", 1, {"stage": 1, "fsdp": 4, "data": 2}, zero=1),
    case("mixed", 5, "1f1b", 2, {"stage": 4, "data": 2}, zero=0),
    case("mixed", 5, "gpipe", 4, {"stage": 2, "fsdp": 2, "tensor": 2}, chunks=2, zero=2),
    case("mixed", 5, "zero_bubble", 4, {"stage": 4, "tensor": 2}, remat="full"),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(EVERYDAY, marks=pytest.mark.slow),
        pytest.param(NIGHTLY, marks=pytest.mark.nightly),
    ],
    ids=["everyday", "nightly"],
)
def test_a_pipeline_trains_as_one_device_does(cases):
    """Losses and gradients of three optimizer steps, and an evaluation after them."""
    for settings, found in zip(cases, on_eight_devices(*cases)):
        assert found["loss"] < 2e-6, settings
        # Of Adam's moments, after steps that Adam took from rounding errors.
        assert found["error"] < 1e-4, settings


@pytest.mark.slow
def test_gradients_of_absent_blocks_are_those_of_one_device():
    """So methods that grow blocks by gradient work over stages."""
    (found,) = on_eight_devices({"kind": "norms", "axes": {"stage": 2, "data": 2, "tensor": 2}})
    assert found["error"] < 5e-6


@pytest.mark.slow
def test_memory_follows_the_schedule_and_not_the_micro_batches():
    """Temporaries of compiled programs for 8, 16 and 32 micro-batches."""
    sizes = {"kind": "memory", "micro_batches": [8, 16, 32]}
    flat, growing = (
        np.array(found["sizes"])
        for found in on_eight_devices(sizes | {"schedule": "1f1b"}, sizes | {"schedule": "gpipe"})
    )
    assert np.ptp(flat) < 0.05 * flat[0]
    assert growing[1] > 1.4 * growing[0] and growing[2] > 1.4 * growing[1]


@pytest.mark.slow
def test_a_tick_computes_nothing_but_its_action():
    """Counts what blocks do: the compiler moves nothing out of loops that have no round."""
    (found,) = on_eight_devices({"kind": "calls", "stages": 4, "micro_batches": 4})
    assert found == {"calls": 3 * 4 * 4}


@pytest.mark.slow
def test_weights_are_gathered_once_a_step():
    (found,) = on_eight_devices({"kind": "gathers"})
    assert found["inside"] == 0 and found["outside"] > 0


@st.composite
def divisions(draw):
    counts, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    layers = tuple(draw(st.integers(1, 4)) for _ in range(counts * chunks))
    layers = draw(st.sampled_from([(), layers]))
    total = sum(layers) or counts * chunks + draw(st.integers(0, 9))
    return total, stages.divide(total, counts, chunks, layers)


@given(divisions())
def test_blocks_go_to_their_stages_and_back(drawn):
    total, division = drawn
    blocks = {"a": np.arange(total), "b": np.random.default_rng(0).normal(size=(total, 2))}
    placed = stages.to_stages(division, blocks)
    own = np.reshape(placed["a"], (division.stages, division.chunks, division.room))
    in_order = [
        own[stage, chunk, : division.held[stage, chunk]]
        for chunk in range(division.chunks)
        for stage in range(division.stages)
    ]
    np.testing.assert_array_equal(np.concatenate(in_order), np.arange(total))
    back = stages.from_stages(division, placed)
    for name, leaf in blocks.items():
        np.testing.assert_array_equal(back[name], leaf)


def test_an_even_division_leaves_no_place_empty_and_the_last_stage_has_the_head():
    assert stages.divide(12, 2, 2).layers == (3, 3, 3, 3)
    assert stages.divide(14, 4).layers == (4, 4, 3, 3)


def test_divisions_that_cannot_be_are_refused_in_words():
    with pytest.raises(UserError, match=r"5 layers.*stage:4 with 2 chunks.*legal stages: 1, 2\."):
        stages.divide(5, 4, 2)
    with pytest.raises(UserError, match="legal: 2 numbers of at least 1 whose sum is 5"):
        stages.divide(5, 2, 1, (2, 2))


def test_a_table_is_data():
    """Schedules of equal shape and buffers have rows alike, so that one program runs them."""
    division = stages.divide(4, 4)
    for name in schedules.SCHEDULES:
        plan = pipeline.make_plan(division, schedules.make(name, 4, 8))
        rows = pipeline.rows(plan)
        assert rows.shape == (4, plan.schedule.ticks, len(pipeline.Row._fields))
        assert rows.dtype == np.int32
        np.testing.assert_array_equal(rows[..., 0], plan.schedule.action)
    with pytest.raises(ValueError, match="differ in stages"):
        pipeline.make_plan(division, schedules.make("1f1b", 2, 8))
