"""Settles a run before its first step: its plan for a machine, what each block does with its
activations, and the number of steps from its training time.
"""

import contextlib
import dataclasses
import math
import os
import time

import jax
import numpy as np

from sparse_dataflow.commands import devices
from sparse_dataflow.commands.preflight.executor_plan import plan_of
from sparse_dataflow.core import collectives
from sparse_dataflow.core.config import remat as kinds_of_remat
from sparse_dataflow.core.executors.compatibility import RELAY, STAGE
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.core.executors.mesh_axes import parse_mesh
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.phases import Variant, update_steps
from sparse_dataflow.core.training.programs import (
    Compiled,
    TrainingData,
    compile_programs,
    no_loss_limit,
    run_step,
)
from sparse_dataflow.core.training.step import initial_state
from sparse_dataflow.files import output
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB, Chip
from sparse_dataflow.hardware.detect import cpu_count, host_memory_bytes
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.monitoring.time_left import in_words
from sparse_dataflow.planner import memory, plan_memory, remat, settle_advice
from sparse_dataflow.planner import settle as planning
from sparse_dataflow.planner.search import PhaseShare
from sparse_dataflow.planner.settle import Settled
from sparse_dataflow.pruning.changes import change_of
from sparse_dataflow.relay.pinned_memory import PINNED_GIB, PINNED_SETTING
from sparse_dataflow.runs.parallel import ParallelConfig
from sparse_dataflow.runs.run_config import RunConfig
from sparse_dataflow.runs.variants import variants


def models_of(config: RunConfig) -> dict[str, tuple[PhaseShare, ...]]:
    """Returns name -> phases of each model that a run trains, for the planner."""
    return {
        v.name: tuple(
            PhaseShare(phase.priced_model, float(share))
            for phase, share in zip(v.phase_specs, _shares(v), strict=True)
        )
        for v in variants(config)
    }


def settle(config: RunConfig, machine: Machine) -> Settled:
    """Returns `planner.settle.settle` of a run, with a plan that its executor accepts.

    Raises:
      UserError: no plan fits the machine.
    """

    def check(settled):
        executor = devices.executor(settled, machine.count)
        devices.check(executor, settled, variants(settled))

    try:
        return planning.settle(config, models_of, machine, check)
    except planning.NothingFits as nothing:
        raise settle_advice.advised(nothing, models_of, machine, check) from None


def this_machine(chip: Chip) -> Machine:
    """Returns the devices of all processes; `chip` is one of them."""
    host, count = jax.default_backend() == "cpu", jax.device_count()
    machine = Machine(chip, count, host, cores=cpu_count())
    if host and chip.memory_bytes:  # Devices of a process share its host's memory.
        return planning.with_memory(machine, chip.memory_bytes // jax.local_device_count())
    return machine


def settled(config: RunConfig, chip: Chip, free_micro_batches: bool = False) -> RunConfig:
    """Returns the config with the plan for the devices of this run, which it prints.

    All processes call it and get the plan of process 0.

    Args:
      free_micro_batches: whether another number of micro-batches is taken where that of the config
        does not fit these devices: for a run that began on others.

    Raises:
      UserError: no plan fits these devices.
    """
    machine, limit = this_machine(chip), config.parallel.memory_limit_bytes
    open_remat = config.model.remat == kinds_of_remat.AUTO

    def fitting():
        try:
            return settled_within_limit(config, machine)
        except UserError:
            if not free_micro_batches:
                raise
            with contextlib.suppress(UserError):
                return settled_within_limit(config.change(training__micro_batches=0), machine)
            raise

    def chosen():
        result = fitting()
        if result.chosen:
            say(words(result))
        if sentence := long_steps(result):
            say(f"note: {sentence}")
        return {path.replace(".", "__", 1): value for path, value in result.chosen.items()}

    try:
        changes = collectives.on_first(chosen)
    except UserError:
        if limit is None or not chooses_each_block(config.parallel, machine.count):
            raise
        changes = {}  # `settled_remat` names the nearest feasible limit.
    after = config.change(**changes)
    if limit is None or not open_remat or not chooses_each_block(after.parallel, machine.count):
        return after
    changes.pop("model__remat", None)
    return config.change(**changes)


def chooses_each_block(parallel: ParallelConfig, devices: int) -> bool:
    """Returns whether `parallel.memory_limit` chooses the remat of each block.

    The blocks of stages and of the relay have one kind; they keep to the limit by that kind and by
    micro-batches.
    """
    if parallel.executor in ("relay", "pipeline"):
        return False
    return parallel.mesh == "auto" or parse_mesh(parallel.mesh, devices)["stage"] == 1


def settled_within_limit(config: RunConfig, machine: Machine) -> Settled:
    """Returns `settle` of a run whose plan keeps to `parallel.memory_limit`, where it has one.

    All blocks have one kind of remat.  A run chooses that of each block where it may; see
    `settled_remat`.

    Raises:
      UserError: no plan fits the machine or the limit.
    """
    limit = config.parallel.memory_limit_bytes
    if limit is None:
        return settle(config, machine)
    # The planner leaves a share of a memory free: of this one it takes the limit.
    narrow = planning.with_memory(machine, int(limit / planning.USABLE))
    name = f"parallel.memory_limit={config.parallel.memory_limit}"
    try:
        result = settle(config, narrow)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    if result.relay and result.chip_bytes > limit:  # A CPU's relay is else checked with its host.
        raise UserError(
            f"{name}: the relay needs {result.chip_bytes / GIB:,.2f} GiB on a device with these "
            "settings; legal: as much or more, more training.micro_batches, or parallel.stash=host."
        )
    return dataclasses.replace(result, machine=machine)


def words(result: Settled) -> str:
    """Returns the choices of the planner and their memory, by kind where it could run out."""
    chosen = " ".join(f"{path}={value}" for path, value in result.chosen.items())
    table = memory_table(result)
    if not result.relay and result.share < 1 / 4:  # The last line has the sum of all kinds.
        return f"planned: {chosen}, {table.splitlines()[-1].strip()}"
    tight = "\n  which leaves less room than the estimate's error" * result.tight
    return f"planned: {chosen}\n{table}{tight}"


def memory_table(settled: Settled) -> str:
    """Returns the memory of the fullest device by kind."""
    if settled.relay:
        return f"  {settled.relay.text()}"
    assert settled.request and settled.plan
    request, usable = settled.request, settled.machine.chip.memory_bytes
    sizes = dict.fromkeys(request.memory(settled.plan).categories, 0.0)
    largest = max(
        (request.memory(settled.plan, model) for phases in request.models for model, _ in phases),
        key=lambda each: float(each.total),
    )
    sizes = {name: float(size) for name, size in largest.categories.items()}
    others = settled.chip_bytes - sum(sizes.values())
    if others > 1:
        sizes["states of other models"] = others
    low, high = plan_memory.ERROR
    unit, name_of_unit = (GIB, "GiB") if settled.chip_bytes >= GIB else (MIB, "MiB")
    rows = [(f"{name_of_unit} on the fullest device", "")]
    rows += [(name.replace("_", " "), f"{size / unit:,.2f}") for name, size in sizes.items()]
    rows.append(("all", f"{settled.chip_bytes / unit:,.2f}"))
    total = settled.chip_bytes / unit
    lines = [f"  {line}" for line in output.aligned(rows).splitlines()]
    room = "" if usable is None else f" of {usable / GIB:,.1f} GiB"
    between = f"{total * (1 + low):,.1f} to {total * (1 + high):,.1f} {name_of_unit}"
    lines.append(f"  by the compiler {between}{room}")
    return "\n".join(lines)


LONG_STEP = 60.0
"""Seconds of a step above which a run says so before its first one."""


def long_steps(settled: Settled) -> str:
    """Returns a sentence where a step takes longer than `LONG_STEP` by the plan; else ""."""
    request, plan = settled.request, settled.plan
    times: list[float] = []
    if request and plan:
        with contextlib.suppress(UserError):  # No rates are known.
            times = [float(request.model_seconds(plan, phases)) for phases in request.models]
    else:
        times = [settled.seconds or 0.0]
    shown = [
        f"{in_words(seconds)} ({name})"
        for name, seconds in zip(settled.config.variants, times, strict=False)
        if seconds > LONG_STEP
    ]
    if not shown:
        return ""
    grace = settled.config.run.grace
    return (
        f"by the plan a step takes {', '.join(shown)}. A run is saved between steps alone: SIGTERM "
        f"ends it without where none ends within --grace={grace:g} seconds. A smaller --batch has "
        "shorter steps."
    )


MIB = 2**20


def settled_remat(config: RunConfig, chip: Chip, executor: Executor) -> RunConfig:
    """Returns the config with the remat that the planner chooses under `parallel.memory_limit`.

    Prints the plan.  A remat that the config has is checked against the limit and stays; `settled`
    has checked that of stages and the relay.  All processes call it and get the plan of process 0.

    Raises:
      UserError: no plan is within the limit, or the chip has no known rates.
    """
    limit = config.parallel.memory_limit_bytes
    if limit is None or {STAGE.words, RELAY.words} & set(executor.parallelisms):
        return config
    models = variants(config)
    devices.check(executor, config, models)

    text = collectives.on_first(lambda: _decided(config, models, limit, chip, executor))
    return config.change(model__remat=text)


def _decided(config, models, limit, chip, executor) -> str:
    """Prints the plan within the limit; returns its remat."""
    try:
        costs = run_costs(models, chip, executor)
    except UserError as error:
        raise UserError(
            f"parallel.memory_limit needs the chip's rates, to plan by: {error} Legal: no "
            "parallel.memory_limit."
        ) from None
    if config.model.remat == kinds_of_remat.AUTO:
        plan = remat.choose(costs, limit, host_limit())
    else:
        loops = kinds_of_remat.loops(config.model.remat, config.model.num_layers)
        plan = remat.estimate(costs, loops)
        if plan.device_bytes > limit:
            least = math.ceil(100 * plan.device_bytes / GIB) / 100
            raise UserError(
                f"model.remat={config.model.remat[:60]} needs {least:.2f}GiB by the estimate, "
                f"above parallel.memory_limit={config.parallel.memory_limit}; legal: "
                f"{least:.2f}GiB or more, or model.remat=auto, for which the planner chooses."
            )
    if any(each.transfer is None for each in costs):
        say(f"no block is offloaded: {chip.name} has no known link to a memory of its host")
    say(f"activations within {limit / GIB:.3f} GiB: model.remat={plan.text}")
    for line in remat.table(plan, costs).splitlines():
        say(f"  {line}")
    return plan.text


def host_limit() -> float:
    """Returns the bytes of host memory that the activations of one device may take."""
    usable = host_memory_bytes() * memory.USABLE / jax.local_device_count()
    if jax.default_backend() != "gpu":
        return usable
    pinned = float(os.environ.get(PINNED_SETTING) or PINNED_GIB) * GIB
    return min(usable, pinned)


def run_costs(models: list[Variant], chip: Chip, executor: Executor) -> list[remat.BlockCosts]:
    """Returns the costs of each phase of each variant; the states of other variants are in `fixed`.

    Raises:
      UserError: the chip has no known rates.
    """
    resident = [
        max(_resident(p.model, v.training, executor, chip) for p in v.phase_specs) for v in models
    ]
    return [
        remat.block_costs(
            p.priced_model,
            v.training.sequence,
            plan_of(p.priced_model, v.training, executor, "none", chip),
            chip,
            v.training.freezes,
            sum(resident) - own,
        )
        for v, own in zip(models, resident, strict=True)
        for p in v.phase_specs
    ]


def _resident(model, training, executor, chip):
    plan = plan_of(model, training, executor, "none", chip)
    each = plan_memory.run_bytes(model, training.sequence, plan, training.freezes)
    return float(each.parameters + each.moments + each.layout_tables)


ROUNDS = 3
STEPS_A_ROUND = 3
STUDY_ROUNDS = 10
"""More rounds than a run: a study trains one model after another, and only the plan makes their
training times equal."""


def planned_steps(
    config: RunConfig,
    variants: list[Variant],
    programs: dict[str, list[Compiled]],
    data: TrainingData,
    executor: Executor = SINGLE_DEVICE,
) -> dict[str, int]:
    """Returns variant -> steps: `training.steps`, or as many as fit into `run.minutes`.

    The time of a step is the mean over phases, weighted by their share of the steps, plus the time
    of layout updates.  The plan is written to run.json, and a resumed run keeps it.
    """
    if config.training.steps:
        return {v.name: config.training.steps for v in variants}
    say(f"measuring the time of a step, for {config.run.minutes:g} minutes a model")
    seconds = _phase_seconds(variants, programs, data, executor)
    steps = {}
    for v in variants:
        phase_seconds, update = seconds[v.name], programs[v.name][0].update_seconds
        mean = float(np.dot(_shares(v), phase_seconds))
        budget = config.run.minutes * 60
        # The updates of so many steps as fit without updates.
        mean += update * _updates_a_step(v, budget / mean)
        steps[v.name] = max(1, round(budget / mean))
        times = " then ".join(f"{1e3 * s:.0f}" for s in phase_seconds)
        updates = f", {1e3 * update:.0f} ms an update" if update else ""
        say(f"{v.name:>6}: {times} ms a step{updates}, {steps[v.name]} steps planned")
    return steps


def step_seconds(variants: dict[str, Variant], data: TrainingData, steps: int) -> dict[str, float]:
    """Returns variant -> mean seconds of a step in a training of `steps`, updates included."""
    cache: dict = {}
    programs = {
        name: compile_programs(
            v.phase_specs,
            v.training,
            data,
            v.evolution,
            cache,
            change=change_of(v.evolution, v.training),
        )
        for name, v in variants.items()
    }
    renamed = [dataclasses.replace(v, name=name) for name, v in variants.items()]
    seconds = _phase_seconds(renamed, programs, data, rounds=STUDY_ROUNDS)
    return {
        v.name: float(np.dot(_shares(v), seconds[v.name]))
        + programs[v.name][0].update_seconds * _updates_a_step(v, steps)
        for v in renamed
    }


def _shares(variant):
    """Returns the fraction of the steps of each phase."""
    starts = [phase.start for phase in variant.phase_specs]
    return np.diff([*starts, 1.0])


def _updates_a_step(variant, steps):
    return len(update_steps(variant.evolution, round(steps))) / steps


def _phase_seconds(variants, programs, data, executor=SINGLE_DEVICE, rounds=ROUNDS):
    """Returns variant -> mean seconds of a step, one per phase.

    Programs take turns, so that all see the same load of the machine.  Each uses a temporary state
    that is freed before the next, so timing needs no more memory than training.  Phases that share
    a program share its time.
    """
    batch = executor.put(data.train.example, data.train.batch_size)
    phases = {
        _program_key(program): (phase.model, v.training, program)
        for v in variants
        for phase, program in zip(v.phase_specs, programs[v.name], strict=True)
    }
    times: dict[int, list[float]] = {key: [] for key in phases}
    for _ in range(rounds):
        for key, (model, training, program) in phases.items():
            state = initial_state(model, training, executor)
            for step in range(1 + STEPS_A_ROUND):
                start = time.perf_counter()
                limit = no_loss_limit(training)
                state, report = run_step(program, state, batch, 0.0, limit)
                jax.block_until_ready(report)
                # The first step touches memory for the first time.
                if step:
                    times[key].append(time.perf_counter() - start)
            del state
    # The mean, not the median: slow steps count against the training time as well.
    mean = {key: float(np.mean(seconds)) for key, seconds in times.items()}
    return {v.name: [mean[_program_key(program)] for program in programs[v.name]] for v in variants}


def _program_key(program):
    """Returns a key that is equal for programs that differ only in their layout updates."""
    return id(program.train_step)
