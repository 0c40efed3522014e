"""The relay's plan: bytes of the state exactly, and figures that scale as they must."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.core.config.parallel import PINNED_SETTING
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.run import SIZES
from sparse_dataflow.core.config.training import BUILT_IN, OPTIMIZERS, TrainingConfig
from sparse_dataflow.core.executors.relay.host_state import abstract_state
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import CHIPS, GIB
from sparse_dataflow.planner import relay

PICO = SIZES["pico"]
EIGHTH = LinearSpec("block_sparse", "monarch", density=0.125, block=128)
LARGE = dataclasses.replace(SIZES["13b"], compute_dtype="bfloat16")


QUARTER = PICO.with_linears(LinearSpec("block_sparse", "monarch", density=0.25, block=16))
BY_DEPTH = dataclasses.replace(QUARTER, density_by_depth=(2.0, 1.0))


def estimate(model, batch, sequence, micro_batches=1, **options):
    given = {name: options.pop(name) for name in ("optimizer", "state_dtype") if name in options}
    training = TrainingConfig(batch=batch, sequence=sequence, micro_batches=micro_batches, **given)
    return relay.estimate(model, training, **options)


@pytest.mark.parametrize(
    ("optimizer", "state_dtype"),
    [*((o, "float32") for o in OPTIMIZERS), *((o, "bfloat16") for o in BUILT_IN)],
)
@pytest.mark.parametrize("model", [PICO, QUARTER, BY_DEPTH], ids=["dense", "sparse", "by depth"])
def test_masters_and_moments_are_those_of_the_state(model, optimizer, state_dtype):
    options = {"optimizer": optimizer, "state_dtype": state_dtype}
    state = abstract_state(model, TrainingConfig(1, 8, 64, **options))
    arrays = jax.tree.leaves((state.params, state.moments))
    # AdamW and Muon have one count for all weights, which no plan counts.
    arrays = [a for a in arrays if a.ndim or optimizer not in BUILT_IN]
    planned = estimate(model, 8, 64, **options).host["masters and moments"]
    size = sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in arrays)
    assert planned == pytest.approx(size, rel=1e-9)


def test_the_host_updates_with_its_cores_until_its_memory_bounds_it():
    """A parameter moves 12 + 12 bytes of state, a gradient and a copy of 2 bytes each."""
    model = dataclasses.replace(LARGE, num_layers=9)
    plan = lambda **options: estimate(model, 8, 2048, chip=CHIPS["h200"], **options)  # noqa: E731
    one, four, many = (plan(cores=cores) for cores in (1, 4, 10_000))
    assert one.update_seconds == pytest.approx(4 * four.update_seconds)
    assert one.update_seconds == pytest.approx(one.updated / 310e6)
    assert many.update_seconds == pytest.approx(one.updated * 28 / 100e9)
    assert one.step_seconds == pytest.approx(
        max(one.compute_seconds, one.transfer_seconds) + one.update_seconds
    )
    eager = plan(clipping="eager")
    assert eager.step_seconds == max(
        eager.compute_seconds, eager.transfer_seconds, eager.update_seconds
    )
    less = plan(copies=False)
    assert less.host_total < one.host_total and less.update_seconds > one.update_seconds
    assert f"updates {one.update_seconds:,.3g} s on the host" in one.text()


def test_the_device_has_room_for_the_layers_that_store_most():
    half = PICO.with_linears(LinearSpec("block_sparse", "monarch", density=0.5, block=16))
    by_depth, uniform = (estimate(model, 8, 64) for model in (BY_DEPTH, half))
    assert by_depth.device == uniform.device
    assert by_depth.fetched < uniform.fetched and by_depth.host_total < uniform.host_total


@given(st.integers(1, 500), st.integers(1, 500))
@settings(max_examples=20)
def test_the_device_knows_no_depth_where_the_stash_is_on_the_host(few, many):
    plans = [
        estimate(dataclasses.replace(LARGE, num_layers=n), 8, 2048, 8, stash="host")
        for n in (few, many)
    ]
    assert plans[0].device == plans[1].device
    deep = [estimate(dataclasses.replace(LARGE, num_layers=n), 8, 2048, 8) for n in (few, many)]
    grown = deep[1].device_total - deep[0].device_total
    assert grown == (many - few) * 8 * 2048 * LARGE.d_model * 2


def test_an_eighth_of_the_blocks_is_an_eighth_of_the_traffic():
    """Of the blocks: embeddings, norms and biases stay."""
    dense, sparse = (estimate(m, 8, 2048) for m in (LARGE, LARGE.with_linears(EIGHTH)))
    for field in ("fetched", "returned", "updated"):
        assert 6 < getattr(dense, field) / getattr(sparse, field) < 8
    assert 6 < dense.host_total / sparse.host_total < 8


def test_bytes_a_parameter_are_those_of_l2l():
    """6 at 16 bits: weights twice, gradients once (arXiv 2002.05645); the last block once less."""
    plan = estimate(LARGE, 8, 2048)
    shorter = dataclasses.replace(LARGE, num_layers=LARGE.num_layers - 1)
    block = plan.updated - estimate(shorter, 8, 2048).updated
    assert plan.fetched + plan.returned == 6 * plan.updated - 2 * block


def test_micro_batches_hide_transfer_where_the_plan_says():
    slow, fast = (dataclasses.replace(CHIPS["h200"], host_bandwidth=n * 50e9) for n in (1, 4))
    needed = estimate(LARGE, 1, 2048, chip=slow).micro_batches
    assert 1 < needed < 32
    assert estimate(LARGE, 1, 2048, chip=fast).micro_batches <= -(-needed // 4) + 1
    enough = estimate(LARGE, needed, 2048, needed, chip=slow)
    assert enough.transfer_seconds <= enough.compute_seconds
    assert estimate(LARGE, 1, 2048).micro_batches is None


def test_files_and_eager_clipping_relieve_host_memory():
    plan = lambda **options: estimate(LARGE, 8, 2048, 8, **options)  # noqa: E731
    assert plan(files=True).host_total < plan().host_total / 3
    assert plan(files=True).disk == 2 * plan().host["masters and moments"]
    assert plan(clipping="eager").host["gradients"] < plan().host["gradients"] / 5
    halves = estimate(LARGE, 8, 2048, 4, devices=2).device["boundaries"]
    assert halves == plan().device["boundaries"] // 2


def test_page_locked_memory_scales_with_local_devices():
    def host(**options):
        return estimate(LARGE, 8, 2048, devices=4, stash="host", **options).host

    single, four = host(), host(local_devices=4)
    for name in ("device's copies", "stash"):
        assert four[name] == 4 * single[name] > 0
    for name in ("masters and moments", "gradients"):
        assert four[name] == single[name]
    assert host(local_devices=4, pinned=False)["device's copies"] == single["device's copies"]


def test_a_host_too_small_is_refused_with_both_figures():
    step = estimate(LARGE, 8, 2048)
    relay.check_host_memory(step, 2 * step.host_total)
    with pytest.raises(
        UserError, match=r"needs .* GiB of host memory .* 64 GiB are available; parallel.server_dir"
    ):
        relay.check_host_memory(step, 64 * GIB)


def test_processes_of_one_machine_share_its_memory():
    step = estimate(LARGE, 8, 2048)
    relay.check_host_memory(step, 3 * step.host_total, processes=2)
    with pytest.raises(UserError, match=r"each of 2 processes here.*one process with all devices"):
        relay.check_host_memory(step, 2 * step.host_total, processes=2)


def test_files_have_two_slots_of_the_state():
    """Masters, moments and tables, rounded to whole pages."""
    model = PICO.with_linears(LinearSpec("block_sparse", "monarch", density=0.25, block=16))
    state = abstract_state(model, TrainingConfig(1, 8, 64))
    arrays = [a for a in jax.tree.leaves((state.params, state.moments, state.tables)) if a.ndim]
    expected = 2 * sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in arrays)
    assert estimate(model, 8, 64, files=True).disk == pytest.approx(expected, rel=0.01)


def test_the_text_names_every_figure():
    text = estimate(LARGE, 8, 2048, chip=CHIPS["h200"], files=True).text()
    for word in (
        "on the device",
        "in host memory",
        "on disk",
        "fetched",
        "transfers overlap with compute from",
    ):
        assert word in text


def test_a_batch_that_is_not_divisible_is_refused():
    with pytest.raises(UserError, match="not divisible into 2 micro-batches on 3 devices"):
        estimate(LARGE, 8, 2048, 2, devices=3)


def test_a_limit_on_page_locked_memory_is_named_with_what_is_needed():
    step = estimate(LARGE, 8, 2048, stash="host")
    relay.check_pinned_memory(step, 64)
    with pytest.raises(UserError, match=rf"set {PINNED_SETTING}=\d+ in the environment"):
        relay.check_pinned_memory(step, 8)
