"""Times and memory of a few steps, through the relay and through the whole executor."""

import time

import jax
import numpy as np

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.hardware.detect import Chip
from sparse_dataflow.parallel.relay import timeline
from sparse_dataflow.parallel.relay.host_state import fresh_state
from sparse_dataflow.parallel.relay.relay import Relay, RelayConfig
from sparse_dataflow.planning import cost, memory, relay
from sparse_dataflow.runs import measurement, relay_plan
from sparse_dataflow.training.step import initial_state, make_train_step

NOT_MEASURED = "does not fit"


def plan_of(model: ModelConfig, training: TrainingConfig, config: RelayConfig, chip: Chip):
    """What `planning.relay` expects of these."""
    return relay.estimate(
        model,
        training.batch,
        training.sequence,
        training.micro_batches,
        stash=config.stash,
        clipping=config.clipping,
        pinned=jax.default_backend() != "cpu",
        chip=chip,
        host_bandwidth=chip.host_bandwidth,
        optimizer=training.optimizer,
    )


def relayed(model, training, config: RelayConfig, chip: Chip, steps: int) -> dict:
    """One row: the relay's plan and what `steps` steps, after one untimed, really took.

    Device memory is the runtime's own peak where it tells one, else the most bytes of arrays that
    were alive on the device when a program was started.

    Raises:
      UserError: host memory is too small.
    """
    plan = plan_of(model, training, config, chip)
    relay_plan.refuse_small_host(plan)
    start = time.perf_counter()
    run = Relay(model, training, config)
    compiled = time.perf_counter() - start
    state = fresh_state(model, training)
    losses: list[float] = []
    before = most = _live_bytes()

    def observe(program):
        nonlocal most
        most = max(most, _live_bytes())

    run.observe = observe

    def step(number):
        nonlocal state
        state, report = run.train_step(state, _tokens(model, training, number), 1e-4)
        return float(report.loss)

    seconds = _timed(step, steps, losses)
    spans = run.timeline.spans
    return {
        "executor": "relay",
        **_figures(model, training, chip, seconds),
        "compile_seconds": compiled,
        "device_bytes": _peak_bytes() or most - before,
        "planned_device_bytes": plan.device_total,
        "planned_host_bytes": plan.host_total,
        "hidden_transfer": timeline.hidden_share(spans),
        "hidden_updates": timeline.hidden_share(spans, ("update",)),
        **{f"{kind}_seconds": timeline.seconds(spans, kind) for kind in timeline.KINDS},
        "losses": losses,
    }


def whole(model, training, chip: Chip, steps: int) -> dict:
    """The same of the whole executor; its time is NOT_MEASURED where the device is too small."""
    plan = memory.training_config_bytes(model, training).total
    row = {"executor": "whole", "planned_device_bytes": plan}
    if chip.memory_bytes is not None and plan > chip.memory_bytes * memory.USABLE:
        return row | {"step_seconds": NOT_MEASURED}
    state = initial_state(model, training)
    losses: list[float] = []
    start = time.perf_counter()
    jitted = jax.jit(make_train_step(model, training, state.tables), donate_argnums=0)
    state = state._replace(tables=())
    program = jitted.lower(state, _tokens(model, training, 0), np.float32(0)).compile()
    compiled = time.perf_counter() - start

    def step(number):
        nonlocal state
        state, report = program(state, _tokens(model, training, number), np.float32(1e-4))
        return float(report.loss)

    seconds = _timed(step, steps, losses)
    return {
        **row,
        **_figures(model, training, chip, seconds),
        "compile_seconds": compiled,
        "device_bytes": _peak_bytes() or measurement.program_bytes(program),
        "losses": losses,
    }


def table(rows: list[dict], columns: tuple[str, ...]) -> str:
    """Rows as text, one a line under their columns."""
    cells = [list(columns)] + [[_cell(row.get(name, "")) for name in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths)) for line in cells)


def _cell(value):
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _figures(model, training, chip, seconds):
    tokens = training.batch * training.sequence
    flops = cost.flops_per_token(model, training.sequence).total
    step = float(np.median(seconds))
    return {
        "layers": model.num_layers,
        "batch": training.batch,
        "stored_parameters": memory.parameter_count(model),
        "step_seconds": step,
        "tokens_per_second": tokens / step,
        "model_tflops": flops * tokens / step / 1e12,
        "mfu": cost.mfu(flops, tokens / step, chip, model.compute_dtype),
    }


def _timed(step, steps, losses):
    losses.append(step(0))
    seconds = []
    for number in range(1, steps + 1):
        start = time.perf_counter()
        losses.append(step(number))
        seconds.append(time.perf_counter() - start)
    return seconds


def _tokens(model, training, seed):
    shape = (training.batch, training.sequence + 1)
    return np.random.default_rng(seed).integers(model.vocab_size, size=shape, dtype=np.int32)


def _live_bytes():
    return sum(a.nbytes for a in jax.live_arrays() if a.sharding.memory_kind == "device")


def _peak_bytes():
    """Of the process so far; None where the backend does not tell."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")
