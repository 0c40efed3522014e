"""The relay's plan: bytes of the state exactly, and figures that scale as they must."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import BUILT_IN, OPTIMIZERS, TrainingConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import CHIPS, GIB
from sparse_dataflow.planner import efficiency, memory, relay_step, relay_time
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.step_time import step_time
from sparse_dataflow.relay import parameter_server
from sparse_dataflow.relay.host_state import abstract_state
from sparse_dataflow.relay.pinned_memory import PINNED_SETTING
from sparse_dataflow.relay.timeline import Span, hidden_share
from sparse_dataflow.runs.run_config import SIZES

RESULTS = ROOT / "experiments" / "results"

PICO = SIZES["pico"]
EIGHTH = LinearSpec("block_sparse", "monarch", density=0.125, block=128)
LARGE = dataclasses.replace(SIZES["13b"], compute_dtype="bfloat16")


QUARTER = PICO.with_linears(LinearSpec("block_sparse", "monarch", density=0.25, block=16))
BY_DEPTH = dataclasses.replace(QUARTER, density_by_depth=(2.0, 1.0))


def estimate(model, batch, sequence, micro_batches=1, **options):
    given = {name: options.pop(name) for name in ("optimizer", "state_dtype") if name in options}
    training = TrainingConfig(batch=batch, sequence=sequence, micro_batches=micro_batches, **given)
    return relay_step.estimate(model, training, **options)


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
    plan = lambda **options: estimate(  # noqa: E731
        model, 8, 2048, **{"chip": CHIPS["h200"], **options}
    )
    one, two, many, unknown = (plan(cores=cores) for cores in (1, 2, 10_000, None))
    pinning = one.updated * 2 / 12e9
    assert one.update_seconds == pytest.approx(one.updated / 310e6 + pinning)
    assert two.update_seconds == pytest.approx(one.updated / 620e6 + pinning)
    assert many.update_seconds == pytest.approx(one.updated / 696e6 + pinning)
    assert unknown.update_seconds == many.update_seconds
    less = plan(copies=False, cores=1)
    assert less.host_total < one.host_total and less.step_seconds > one.step_seconds
    assert f"updates {one.update_seconds:,.3g} s on the host" in one.text()


@pytest.mark.parametrize("clipping", ["exact", "eager"])
@pytest.mark.parametrize("layers", [1, 8, 64])
def test_a_step_takes_at_least_the_time_of_each_part_and_at_most_of_all(layers, clipping):
    model = dataclasses.replace(LARGE, num_layers=layers)
    plan = estimate(model, 8, 2048, 4, chip=CHIPS["h200"], clipping=clipping, stash="host")
    times = plan.compute_seconds, plan.transfer_seconds, plan.update_seconds
    assert max(times) <= plan.step_seconds
    if clipping == "exact":
        assert plan.step_seconds > plan.update_seconds + plan.compute_seconds
        eager = estimate(model, 8, 2048, 4, chip=CHIPS["h200"], clipping="eager", stash="host")
        assert eager.step_seconds < plan.step_seconds


def test_the_device_computes_as_fast_as_in_the_whole_executor():
    """Less the optimizer, which is on the host, for dense, sparse and low-rank weights.  The host
    starts each of the relay's programs, so their overhead is not that of one program."""
    low_rank = LARGE.with_linears(LinearSpec("low_rank", density=0.125))
    for model in (LARGE, LARGE.with_linears(EIGHTH), low_rank):
        plan = ParallelPlan(micro_batch=2, accumulation=4, remat="full", fused_attention=True)
        constants = efficiency.for_family("hopper", one_program=False)
        whole = step_time(model, 2048, plan, CHIPS["h200"], constants)
        relayed = estimate(model, 8, 2048, 4, chip=CHIPS["h200"], fused_attention=True)
        assert relayed.compute_seconds == pytest.approx(whole.total - whole.terms["optimizer"])


def test_time_and_memory_are_those_that_an_h200_measured():
    row = json.loads((RESULTS / "relay_depth_h200.json").read_text())["rows"][0]
    model = dataclasses.replace(SIZES["1.3b"], num_layers=4, compute_dtype="bfloat16")
    plan = estimate(
        model.with_linears(EIGHTH),
        *(8, 2048, 4),
        chip=CHIPS["h200"],
        stash="host",
        clipping="eager",
        fused_attention=True,
    )
    assert plan.updated == row["stored_parameters"]
    assert plan.device_total == pytest.approx(row["device_bytes"], rel=0.15)
    assert plan.step_seconds == pytest.approx(row["step_seconds"], rel=0.15)
    assert plan.compute_seconds == pytest.approx(row["compute_seconds"], rel=0.15)
    assert plan.update_seconds == pytest.approx(row["update_seconds"], rel=0.15)
    assert plan.hidden_transfer == pytest.approx(row["hidden_transfer"], abs=0.05)
    # Rates that are measured there.
    link = plan.fetched / row["fetch_seconds"] / CHIPS["h200"].host_bandwidth
    assert relay_time.LINK_SHARE == pytest.approx(link, rel=0.01)
    returned = 2 * plan.updated / row["return_seconds"]
    assert relay_time.RETURN_RATE == pytest.approx(returned, rel=0.01)


@pytest.mark.parametrize("tokens", [2**13, 2**15, 2**17, 2**20])
@pytest.mark.parametrize("layers", [4, 32])
def test_hidden_transfers_are_those_of_a_simulated_step(layers, tokens):
    """Two threads move sections in turn, and the device computes in the order of the relay."""
    model = dataclasses.replace(LARGE, num_layers=layers)
    chip = CHIPS["h200"]
    plan = estimate(model, tokens // 2048, 2048, chip=chip, fused_attention=True)
    one = ParallelPlan(micro_batch=tokens // 2048, remat="full", fused_attention=True)
    head, forward, backward = relay_time.device_seconds(model, 2048, one, chip, 1.0)
    block, rest = memory.block_and_rest(model)
    down = 2 / (relay_time.LINK_SHARE * chip.host_bandwidth)  # Seconds of a parameter.
    up = 2 / relay_time.RETURN_RATE
    spans, free = [], {"fetch": 0.0, "compute": 0.0, "return": 0.0}

    def run(kind, section, seconds, after):
        start = max(free[kind], after)
        free[kind] = start + seconds
        spans.append(Span(kind, section, start, free[kind]))
        return free[kind]

    ready = run("compute", "embed", 0, run("fetch", "embed", rest * down, 0))
    earlier = ready
    for _ in range(layers):  # A block is fetched while the one before computes.
        fetched = run("fetch", "block", block * down, earlier)
        earlier, ready = ready, run("compute", "block", forward / layers, max(fetched, ready))
    ready = run("compute", "head", head, run("fetch", "head", rest * down, ready))
    earlier = ready - head
    for number in range(layers):  # The last block is still there.
        fetched = run("fetch", "block", block * down, earlier) if number else ready
        earlier, ready = ready, run("compute", "block", backward / layers, max(fetched, ready))
        run("return", "block", block * up, ready)
    run("return", "embed", rest * up, ready)
    assert plan.hidden_transfer == pytest.approx(hidden_share(spans), abs=0.06)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_memory_is_that_of_bert_large_measured_on_a_cpu(stash):
    result = json.loads((RESULTS / "relay_bert_large_amd-epyc-2-cores.json").read_text())
    (row,) = (row for row in result["rows"] if row.get("stash") == stash)
    model = dataclasses.replace(SIZES["350m"], d_ff=4096, max_len=512, vocab_size=30522)
    plan = estimate(model, 2, 512, 2, stash=stash, pinned=False)
    assert plan.updated == row["stored_parameters"]
    assert plan.device_total == pytest.approx(row["device_bytes"], rel=0.05)
    assert plan.device_total == row["planned_device_bytes"]


@pytest.mark.parametrize(
    ("changes", "shape", "name", "compiled"),
    [
        # Arguments, results and temporaries in MB, as XLA compiles the fullest program for an H200
        # (`topologies.gpu_devices`).
        ({}, (4, 2, 2048), "inside the head", 273.1 + 273.0 + 1277.4),
        ({}, (1, 2, 2048), "inside the head", 222.7 + 222.6 + 848.8),
        ({"compute_dtype": "float32"}, (8, 1, 512), "inside the head", 445.3 + 445.3 + 531.6),
        ({"vocab_size": 128256, "d_model": 1024, "num_heads": 8, "d_ff": 4096}, (3, 2, 1024),
         "inside the head", 275.3 + 275.3 + 1587.1),
        ({"d_model": 4096, "num_heads": 32, "d_ff": 16384}, (2, 1, 2048), "sums of gradients",
         445.3 + 428.5 + 1680.4),
    ],
)  # fmt: skip
def test_the_fullest_program_has_the_bytes_that_xla_compiles(changes, shape, name, compiled):
    model = dataclasses.replace(SIZES["1.3b"], num_layers=1, compute_dtype="bfloat16")
    model = dataclasses.replace(model, **changes).with_linears(EIGHTH)
    count, rows, sequence = shape
    plan = estimate(model, count * rows, sequence, count, stash="host", fused_attention=True)
    assert name in plan.device
    # Blocks that wait beside the program are no part of it.
    beside = plan.device.get("blocks", 0) + plan.device["batch"]
    if name == "sums of gradients":
        block, _ = memory.block_and_rest(model)
        beside += 2 * block * 2
    assert plan.device_total - beside == pytest.approx(1e6 * compiled, rel=0.02)


def test_gradients_in_flight_are_those_of_the_server():
    assert relay_step.IN_FLIGHT == parameter_server.IN_FLIGHT


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_blocks_that_are_left_out_cost_no_time_and_the_same_memory(share):
    whole, fewer = (
        estimate(LARGE, 8, 2048, 4, chip=CHIPS["h200"], depth=depth) for depth in (1.0, share)
    )
    assert fewer.device == whole.device and fewer.host == whole.host
    assert fewer.step_seconds < whole.step_seconds
    block, rest = memory.block_and_rest(LARGE)
    assert fewer.updated == pytest.approx(rest + share * 40 * block, abs=1)
    assert fewer.returned == pytest.approx(2 * fewer.updated, rel=1e-6)


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
    relay_step.check_host_memory(step, 2 * step.host_total)
    with pytest.raises(
        UserError, match=r"needs .* GiB of host memory .* 64 GiB are available; parallel.server_dir"
    ):
        relay_step.check_host_memory(step, 64 * GIB)


def test_processes_of_one_machine_share_its_memory():
    step = estimate(LARGE, 8, 2048)
    relay_step.check_host_memory(step, 3 * step.host_total, processes=2)
    with pytest.raises(UserError, match=r"each of 2 processes here.*one process with all devices"):
        relay_step.check_host_memory(step, 2 * step.host_total, processes=2)


def test_files_have_two_slots_of_the_state():
    """Masters, moments and tables, rounded to whole pages."""
    model = PICO.with_linears(LinearSpec("block_sparse", "monarch", density=0.25, block=16))
    state = abstract_state(model, TrainingConfig(1, 8, 64))
    arrays = [a for a in jax.tree.leaves((state.params, state.moments, state.rest)) if a.ndim]
    expected = 2 * sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in arrays)
    assert estimate(model, 8, 64, files=True).disk == pytest.approx(expected, rel=0.01)


def test_the_text_names_every_figure():
    text = estimate(LARGE, 8, 2048, chip=CHIPS["h200"], files=True).text()
    for word in (
        "on the device",
        "in host memory",
        "on disk",
        "fetched",
        "of the transfers overlap with compute",
    ):
        assert word in text


def test_a_batch_that_is_not_divisible_is_refused():
    with pytest.raises(UserError, match="not divisible into 2 micro-batches on 3 devices"):
        estimate(LARGE, 8, 2048, 2, devices=3)


def test_a_limit_on_page_locked_memory_is_named_with_what_is_needed():
    step = estimate(LARGE, 8, 2048, stash="host")
    relay_step.check_pinned_memory(step, 64)
    with pytest.raises(UserError, match=rf"set {PINNED_SETTING}=\d+ in the environment"):
        relay_step.check_pinned_memory(step, 8)
