"""The relay beyond the contract: memory, clipping, copies, depth, lost devices, programs."""

import dataclasses
import functools
import gc
import itertools
import math
import time
import weakref

import jax
import numpy as np
import pytest
import small_models
from executor_runs import MODELS
from marks import some

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.depth import DepthSchedule
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import OPTIMIZERS, TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.optim.optimizers import learning_rate_schedule
from sparse_dataflow.core.training.step import initial_state, make_train_step
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner import relay_step as planning
from sparse_dataflow.relay import host_optimizer, parameter_server
from sparse_dataflow.relay import relay as relay_module
from sparse_dataflow.relay import relay_programs as programs
from sparse_dataflow.relay.host_state import abstract_state, fresh_state
from sparse_dataflow.relay.pinned_memory import PINNED_SETTING
from sparse_dataflow.relay.relay import Relay, RelayConfig
from sparse_dataflow.relay.server_files import MappedFiles
from sparse_dataflow.relay.timeline import KINDS, hidden_share
from sparse_dataflow.runs.parallel import CLIPPINGS

STEPS = 20
DENSE = dataclasses.replace(small_models.DENSE, num_layers=3)
SPARSE = DENSE.with_linears(small_models.QUARTER)


def training(**changes):
    settings = dict(steps=STEPS, batch=4, sequence=11, learning_rate=5e-3, clip=0.7)
    return TrainingConfig(**settings | changes)


def batch_of(seed, rows=4):
    windows = np.random.default_rng(seed).integers(0, DENSE.vocab_size, (rows, 12), np.int32)
    return Batch.from_windows(windows)


@functools.cache
def whole_run(model, training, steps=STEPS):
    """Returns [(loss, gradient norms)] of the whole executor."""
    state, rate = initial_state(model, training), learning_rate_schedule(training)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "UNROLL_CHANGING_LAYERS", 0)  # A loop compiles faster.
        step = (
            jax.jit(make_train_step(model, training))
            .lower(state, batch_of(0), np.float32(0))
            .compile()
        )
    reports = []
    for number in range(steps):
        state, report = step(state, batch_of(number), np.float32(rate(number)))
        reports.append((float(report.loss), jax.device_get(report.gradient_norms)))
    return reports


def relay_run(relay, state, steps=STEPS):
    rate, reports = learning_rate_schedule(relay.training), []
    for number in range(steps):
        state, report = relay.train_step(state, batch_of(number), rate(number))
        reports.append((float(report.loss), report.gradient_norms))
    return state, reports


def assert_same_reports(mine, theirs, rtol):
    for number, ((loss, norms), (other, others)) in enumerate(zip(mine, theirs, strict=True)):
        np.testing.assert_allclose(loss, other, rtol=rtol, err_msg=f"step {number}")
        assert norms.keys() == others.keys()
        for group in norms:
            np.testing.assert_allclose(norms[group], others[group], rtol=100 * rtol, err_msg=group)


@pytest.mark.parametrize("clipping", some(CLIPPINGS, "exact"))
def test_copies_that_are_not_kept_change_no_bit(clipping):
    model, how = dataclasses.replace(DENSE, compute_dtype="bfloat16"), training()
    runs = []
    for copies in (True, False):
        relay = Relay(model, how, RelayConfig(clipping=clipping, copies=copies))
        runs.append(relay_run(relay, fresh_state(model, how)))
        assert bool(relay.server._copies) == copies
    (with_copies, expected), (without_copies, reports) = runs
    assert reports == expected
    for mine, theirs in zip(
        *map(jax.tree.leaves, (without_copies.params, with_copies.params)), strict=True
    ):
        assert mine.tobytes() == theirs.tobytes()


def test_the_products_of_groups_are_quantised():
    """The contract compares their losses; here they differ from those that are not quantised."""
    pytest.importorskip("qwix", reason="quantised products need the extra quantized")
    groups = LinearSpec("block_sparse", "monarch", density=0.5, block=8)
    losses = {}
    for precision in ("compute_dtype", "int8"):
        model = dataclasses.replace(DENSE, precision=precision)
        model, how = model.with_linears(groups, ["mlp_in", "mlp_out"]), training()
        state = fresh_state(model, how)
        state = state._replace(rest=stacks.with_groups(state.rest))
        _, reports = relay_run(Relay(model, how, changing=False), state, steps=2)
        losses[precision] = [loss for loss, _ in reports]
    assert losses["int8"] != losses["compute_dtype"]
    np.testing.assert_allclose(losses["int8"], losses["compute_dtype"], rtol=1e-2)


@pytest.mark.parametrize("optimizer", some(OPTIMIZERS, "muon", "adafactor"))
@pytest.mark.parametrize("name", some(["sparse_rank", "sparse_depth", "shared"], "sparse_depth"))
def test_initial_state_equals_that_of_the_whole_executor(name, optimizer):
    model, how = MODELS[name], training(optimizer=optimizer)
    mine, theirs = fresh_state(model, how), initial_state(model, how)
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), mine) == jax.tree.map(
        lambda a: (a.shape, a.dtype), theirs
    )
    for actual, expected in zip(jax.tree.leaves(mine.params), jax.tree.leaves(theirs.params)):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


def test_each_weight_draws_its_own_noise_and_the_same_under_every_executor():
    """A state that is made for each weight alone would have the same random key everywhere."""
    model, how = MODELS["sparse_depth"], training(optimizer="optax:noisy_sgd")

    def keys(state):
        leaves = map(np.asarray, jax.tree.leaves(state.moments))
        return [leaf.reshape(-1, 2) for leaf in leaves if leaf.dtype == np.uint32]

    mine, theirs = keys(fresh_state(model, how)), keys(initial_state(model, how))
    for each, other in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(each, other)
    drawn = np.concatenate(mine)
    assert len(drawn) > 100 and len(np.unique(drawn, axis=0)) == len(drawn)


@pytest.mark.slow
def test_bfloat16_keeps_float32_masters_and_its_copies_follow_them():
    model, how = dataclasses.replace(DENSE, compute_dtype="bfloat16"), training()
    relay = Relay(model, how)
    state, mine = relay_run(relay, fresh_state(model, how), steps=6)
    theirs = whole_run(model, how, steps=6)
    np.testing.assert_allclose([loss for loss, _ in mine], [loss for loss, _ in theirs], rtol=0.01)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    # A new server makes the same copies.
    again = Relay(model, how)
    copied, fresh = (r.server.copy(state.params, 1) for r in (relay, again))
    for copy, expected in zip(jax.tree.leaves(copied), jax.tree.leaves(fresh), strict=True):
        assert copy.dtype == expected.dtype and copy.tobytes() == expected.tobytes()


@pytest.mark.slow
def test_page_locked_copies_change_nothing():
    model, how = dataclasses.replace(SPARSE, compute_dtype="bfloat16"), training()
    runs = [
        relay_run(Relay(model, how, pinned=pinned), fresh_state(model, how), steps=3)[1]
        for pinned in (False, True)
    ]
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_eager_clipping_that_clips_nothing_is_exact():
    model = DENSE
    loose = training(clip=1e3)
    _, eager = relay_run(
        Relay(model, loose, RelayConfig(clipping="eager")), fresh_state(model, loose)
    )
    assert_same_reports(eager, whole_run(model, loose), rtol=2e-6)


def test_eager_clipping_accepts_or_skips_a_whole_step():
    """An update of one section would survive the step; the clipping stays that of each section."""
    model, skipping = DENSE, training(clip=1e-2, skip_spikes=4.0)
    states = []
    for how in (training(clip=1e-2), skipping):
        relay = Relay(model, how, RelayConfig(clipping="eager"))
        limit = [np.float32(np.inf)] * bool(how.skip_spikes)
        states.append(relay.train_step(fresh_state(model, how), batch_of(0), 1e-3, *limit)[0])
    for mine, theirs in zip(*(jax.tree.leaves(state.params) for state in states), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    [_, state] = states
    before = jax.tree.map(np.copy, (state.params, state.moments))
    for spike in (np.float32(0), np.float32(-np.inf), np.float32(1.0)):
        state, report = relay.train_step(state, batch_of(1), 1e-3, spike)
        assert report.loss > spike
    for mine, theirs in zip(
        *map(jax.tree.leaves, ((state.params, state.moments), before)), strict=True
    ):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
    assert int(state.step) == 4


def test_eager_clipping_keeps_the_global_norm_below_the_limit():
    """Each section has an equal share, so the norm is the limit where all exceed theirs."""
    model = DENSE
    tight = training(clip=1e-2)
    state = fresh_state(model, tight)
    state, _ = Relay(model, tight, RelayConfig(clipping="eager")).train_step(
        state, batch_of(0), 0.0
    )
    # After one step the first moments are 0.1 of the clipped gradients.
    mu = next(moments.mu for moments in state.moments if hasattr(moments, "mu"))
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(mu)))
    assert 0.9 * tight.clip < 10 * norm <= tight.clip * 1.0001


# Blocks that are large relative to the activations between them.
WIDE = dataclasses.replace(DENSE, d_ff=1024)


# Activations of one micro-batch.
BOUNDARY = (1, 4, 11, WIDE.d_model)


def device_bytes(shape=None):
    """Returns the bytes of device arrays of this shape, or of all."""
    return sum(
        a.nbytes
        for a in jax.live_arrays()
        if a.sharding.memory_kind == "device" and shape in (None, a.shape)
    )


def most_device_bytes(layers, config, slow=None, shape=None):
    """Returns the peak of new device bytes at program starts.

    `slow` is "fetch", "return", "update", "watch" or None: host work slower than the device.
    """
    model, how = dataclasses.replace(WIDE, num_layers=layers), training(steps=2)
    relay, state = Relay(model, how, config), fresh_state(model, how)
    before, most = device_bytes(shape), 0

    def observe(program):
        nonlocal most
        most = max(most, device_bytes(shape) - before)

    def late(function):
        def call(*arguments):
            time.sleep(0.02)
            return function(*arguments)

        return call

    relay.observe = observe
    with pytest.MonkeyPatch.context() as patch:
        owner, name = {
            "fetch": (relay.server, "put"),
            "return": (parameter_server.ServerStep, "_buffers"),
            "update": (host_optimizer, "square_sum"),
            "watch": (relay_module, "_watch"),
            None: (relay, "_put"),
        }[slow]
        if slow:
            patch.setattr(owner, name, late(getattr(owner, name)))
        for number in range(2):
            state, _ = relay.train_step(state, batch_of(number), 1e-3)
    return most


@pytest.mark.parametrize("clipping", some(["exact", "eager"], "eager"))
@pytest.mark.parametrize("slow", some([None, "fetch", "return", "update", "watch"], "update"))
def test_device_memory_is_as_planned_however_slow_the_host_is(slow, clipping):
    most = most_device_bytes(8, RelayConfig("host", clipping), slow)
    plan = planning.estimate(WIDE, training(), stash="host").device
    # Temporaries of a program live only while it runs.
    assert most <= sum(plan.values()) - plan["inside a layer"]


@pytest.mark.slow
def test_a_stash_on_the_device_grows_with_the_depth():
    # Boundaries alone: the number of live gradients depends on timing.
    boundary = 4 * math.prod(BOUNDARY)
    for layers in (3, 23):
        boundaries = most_device_bytes(layers, RelayConfig("device"), shape=BOUNDARY) / boundary
        assert layers <= boundaries <= layers + 4
    assert most_device_bytes(23, RelayConfig("host"), shape=BOUNDARY) <= 6 * boundary


def test_one_set_of_programs_serves_any_depth():
    """4 and 400 blocks have the same program text."""
    texts = []
    for layers in (4, 400):
        model = dataclasses.replace(SPARSE, num_layers=layers)
        shape = (2, 2, 11)
        arguments = programs.arguments(model, shape)
        lowered = programs.lower(programs.functions(model), arguments)
        texts.append([program.as_text() for program in lowered])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("spec", ["drop:0.5", "grow:0.34"])
def test_only_active_blocks_change(spec):
    model, how = SPARSE, training(steps=6)
    depth = DepthSchedule.parse(spec)
    relay = Relay(model, how, RelayConfig(depth=depth))
    relay.start(how)
    state = fresh_state(model, how, starting_blocks=depth.starting_blocks(3))
    for number in range(6):
        before = jax.tree.map(np.copy, state.params["blocks"])
        state, report = relay.train_step(state, batch_of(number), 1e-3)
        active = depth.active(3, number, 6, how.seed)
        for block in range(3):
            changed = any(
                np.any(old[block] != new[block])
                for old, new in zip(
                    jax.tree.leaves(before), jax.tree.leaves(state.params["blocks"])
                )
            )
            assert changed == (block in active), (number, block)
        assert np.isfinite(report.loss)


def test_a_growing_network_starts_with_identities():
    """Blocks that have not joined are identities, so evaluation may run them all."""
    model, how = DENSE, training()
    state = fresh_state(model, how, starting_blocks=1)
    shallow = dataclasses.replace(model, num_layers=1)
    first = {**state.params, "blocks": jax.tree.map(lambda a: a[:1], state.params["blocks"])}
    batch = batch_of(0).weighted()
    deep, alone = (
        Relay(model, how, eval_shape=(4, 11)).eval_step(params, (), batch)
        for model, params in ((model, state.params), (shallow, first))
    )
    assert deep["loss"].number() == alone["loss"].number()


def test_the_timeline_has_all_work_of_every_section():
    """The last block stays on the device between its two passes."""
    model, how = DENSE, training()
    relay = Relay(model, how)
    relay.train_step(fresh_state(model, how), batch_of(0), 1e-3)
    spans = relay.timeline.spans
    for number in range(3):
        kinds = [span.kind for span in spans if span.section == f"block {number}"]
        fetches = 1 if number == 2 else 2
        assert [kinds.count(kind) for kind in KINDS[:3]] == [fetches, 2, 1] and "update" in kinds
    assert all(span.start <= span.stop for span in spans)
    assert 0 <= hidden_share(spans) <= 1


def test_a_lost_device_is_a_user_error():
    model, how = DENSE, training()
    relay = Relay(model, how)

    def lost(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: device lost")

    relay.programs = (relay.programs[0]._replace(backward=lost),)
    with pytest.raises(UserError, match=r"failed in step 1 \(INTERNAL: device lost\).*--resume"):
        relay.train_step(fresh_state(model, how), batch_of(0), 1e-3)


def test_a_device_lost_in_an_evaluation_is_a_user_error():
    model, how = DENSE, training()
    relay, state = Relay(model, how, eval_shape=(4, 11)), fresh_state(model, how)

    def lost(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: device lost")

    relay.eval_programs = (relay.eval_programs[0]._replace(forward=lost),)
    with pytest.raises(UserError, match=r"failed in an evaluation \(INTERNAL: device lost\)"):
        relay.eval_step(state.params, state.rest, batch_of(0).weighted())


def test_a_device_lost_in_mid_step_keeps_the_previous_step_in_the_files(tmp_path):
    """By then, eager updates have written some sections of the free slot."""
    model, how = DENSE, training()
    shapes = abstract_state(model, how)
    files = MappedFiles(tmp_path, shapes, {})
    relay = Relay(model, how, RelayConfig(clipping="eager"))
    relay.server.storage = files
    state = files.new_state(lambda *trees: fresh_state(model, how, trees))
    state, _ = relay_run(relay, state, steps=2)
    before = jax.tree.map(np.copy, (state.params, state.moments))
    calls, backward = itertools.count(1), relay.programs[0].backward

    def lost(*arguments):
        if next(calls) == model.num_layers:
            # A block above this one was updated by now.
            deadline = time.monotonic() + 60
            while not sections and time.monotonic() < deadline:
                time.sleep(0.01)
            raise jax.errors.JaxRuntimeError("INTERNAL: device lost")
        return backward(*arguments)

    sections, updated = [], files.updated
    files.updated = lambda section, views: (updated(section, views), sections.append(section))
    relay.programs = (relay.programs[0]._replace(backward=lost),)
    with pytest.raises(UserError, match=r"failed in step 3"):
        relay.train_step(state, batch_of(2), 1e-3)
    assert sections
    files.close()
    again = MappedFiles(tmp_path, shapes, {}).restore(state.key)
    assert int(again.step) == 2
    for old, new in zip(
        jax.tree.leaves(before), jax.tree.leaves((again.params, again.moments)), strict=True
    ):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


def test_exhausted_page_locked_memory_names_the_setting():
    model, how = dataclasses.replace(DENSE, compute_dtype="bfloat16"), training()
    relay = Relay(model, how, pinned=True)

    def full(copy):
        # Message of XLA's allocator of page-locked memory.
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of host memory while trying to allocate 512 bytes with "
            "allocator xla_gpu_host_bfc on device 0."
        )

    relay.server.pin = full
    with pytest.raises(UserError, match=rf"exhausted in step 1 .*Set {PINNED_SETTING} to"):
        relay.train_step(fresh_state(model, how), batch_of(0), 1e-3)


def test_a_relay_that_is_no_longer_used_frees_its_memory_at_once():
    """Its weights and gradients are gigabytes, and a benchmark makes one relay after the other."""
    gc.collect()
    gc.disable()
    try:
        how = training()
        relay = Relay(DENSE, how)
        state, _ = relay_run(relay, fresh_state(DENSE, how), steps=1)
        held = [
            weakref.ref(each) for each in (relay, relay.server, state.params["embed"]["tokens"])
        ]
        del relay, state
        assert [each() for each in held] == [None, None, None]
    finally:
        gc.enable()
