"""Plans the number of steps of each model of a run from its training time."""

import dataclasses
import time

import jax
import numpy as np

from sparse_dataflow.core.config.run import RunConfig
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.core.training.monitoring.metrics import say
from sparse_dataflow.core.training.phases import update_steps
from sparse_dataflow.core.training.programs import (
    Compiled,
    TrainingData,
    compile_programs,
    no_loss_limit,
    run_step,
)
from sparse_dataflow.core.training.step import initial_state
from sparse_dataflow.core.training.variants import Variant

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
        name: compile_programs(v.phase_specs, v.training, data, v.evolution, cache)
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
                if step:
                    times[key].append(time.perf_counter() - start)
            del state
    # The mean, not the median: slow steps count against the training time as well.
    mean = {key: float(np.mean(seconds)) for key, seconds in times.items()}
    return {v.name: [mean[_program_key(program)] for program in programs[v.name]] for v in variants}


def _program_key(program):
    """Returns a key that is equal for programs that differ only in their layout updates."""
    return id(program.train_step)
