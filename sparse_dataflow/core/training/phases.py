"""The phases of a training: which model is trained in which steps, and what they cost."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparse_dataflow.core.config.depth import DepthSchedule
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.layouts.evolution import (
    METHODS,
    PhaseSpec,
    exchanged_share,
    phase_specs,
    until,
)
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError

if TYPE_CHECKING:
    from sparse_dataflow.core.training.teacher import Teacher

FULL_DEPTH = DepthSchedule()


@dataclasses.dataclass(frozen=True)
class Phase:
    """A span of steps that trains one model.

    Attributes:
      start: first step, counted from 0.
      stop: the step after the last one.
      runtime_layouts: whether layouts are arguments of the programs, so that they may change.
    """

    start: int
    stop: int
    model: ModelConfig
    runtime_layouts: bool

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.stop - self.start


def phases(model: ModelConfig, evolution: EvolutionConfig, steps: int) -> tuple[Phase, ...]:
    """Returns the phases of a run of `steps` steps, in order and without gaps.

    Raises:
      UserError: the evolution method does not fit the model.
    """
    specs = phase_specs(model, evolution)
    starts = [round(phase.start * steps) for phase in specs]
    return tuple(
        Phase(start, stop, phase.model, phase.runtime_layouts)
        for phase, start, stop in zip(specs, starts, [*starts[1:], steps])
    )


def mean_flops_per_token(model: ModelConfig, evolution: EvolutionConfig, sequence: int) -> float:
    """Returns the training FLOPs per token, on average over the phases of a run.

    A dense model has the same FLOPs in all phases of a method that changes blocks.  Layout updates
    do not count.

    Args:
      model: final or initial config of the model; see `EvolutionConfig`.
      evolution: how its layouts or its model change.

    Raises:
      UserError: the evolution method does not fit the model.
    """
    if not model.partial_projections and METHODS[evolution.method].changes_blocks:
        return cost.flops_per_token(model, sequence).total
    specs = phase_specs(model, evolution)
    stops = [spec.start for spec in specs[1:]] + [1.0]
    return sum(
        (stop - spec.start) * cost.flops_per_token(spec.model, sequence).total
        for spec, stop in zip(specs, stops, strict=True)
    )


def phase_before(run_phases: Sequence[Phase], step: int) -> int:
    """Returns the index of the phase whose model has the state after `step` steps.

    At a boundary this is the earlier phase: the state changes right before the next step.
    """
    return next(i for i, phase in enumerate(run_phases) if step <= phase.stop)


def update_steps(evolution: EvolutionConfig, steps: int) -> list[int]:
    """Returns the steps (from 0) before which layouts are updated."""
    due = range(0, steps, evolution.every)
    return [step for step in due if exchanged_share(evolution, step, steps) > 0]


def run_flops(
    model: ModelConfig,
    evolution: EvolutionConfig,
    training: TrainingConfig,
    teacher: "Teacher | None" = None,
) -> float:
    """Returns the model FLOPs of a training as planned, with its layout updates and teacher."""
    return phases_flops(phases(model, evolution, training.steps), evolution, training, teacher)


def token_flops(
    model: ModelConfig,
    training: TrainingConfig,
    teacher: "Teacher | None" = None,
    depth: float = 1.0,
) -> float:
    """Returns the model FLOPs of a training token, with those of a teacher's forward pass, which
    a fraction `teacher_first` of the steps has; all have the teacher's logits.

    Args:
      depth: see `cost.flops_per_token`.
    """
    adapters = training.freezes
    flops = cost.flops_per_token(model, training.sequence, adapters=adapters, depth=depth).total
    if training.teacher and teacher is not None:
        flops += teacher.flops_per_token(training.sequence, training.teacher_first or 1.0)
    return flops


def phases_flops(
    run_phases: tuple[Phase, ...],
    evolution: EvolutionConfig,
    training: TrainingConfig,
    teacher: "Teacher | None" = None,
    depth: DepthSchedule = FULL_DEPTH,
) -> float:
    """Returns the model FLOPs of a training in these phases, with its layout updates and what is
    measured to choose features.

    The forward pass of a teacher counts; the training of the teacher does not.
    """
    tokens = training.batch * training.sequence
    total = 0.0
    for phase in run_phases:
        span = phase.start, phase.stop, training.steps
        share = depth.mean_share(phase.model.num_layers, *span)
        total += phase.steps * tokens * token_flops(phase.model, training, teacher, share)
    if METHODS[evolution.method].reads_gradients:
        measured = _measured_tokens(evolution, training)
        # Methods that read gradients have one phase.
        norms = cost.gradient_norms_flops(run_phases[0].model, measured, training.sequence)
        total += len(update_steps(evolution, training.steps)) * norms
    for phase in run_phases:
        # Features that are drawn alike need no activations.
        if phase.model.left_out and evolution.features != "uniform":
            whole = phase.model.with_all_features
            forward = cost.flops_per_token(whole, training.sequence, training=False).total
            total += _measured_tokens(evolution, training) * forward
    return total


def _measured_tokens(evolution, training):
    """Returns the tokens that a layout update, or the choice of features, measures."""
    from sparse_dataflow.core.executors.block_gradients import portions  # Loads jax.

    rows, calls, _ = portions(training, evolution.sequences)
    return rows * calls * training.sequence


def refuse_unfit(model: ModelConfig, evolution: EvolutionConfig, steps: int) -> None:
    """Refuses an evolution that does not fit into the run's steps.

    Raises:
      UserError: a phase would have no step, or there would be no layout update.
    """
    run_phases = phases(model, evolution, steps)
    if any(phase.steps < 1 for phase in run_phases):
        raise UserError(
            f"--evolution={evolution.method} has {len(run_phases)} phases, the last from "
            f"{until(evolution):.0%} of the steps on; with {steps} steps one of them has none. "
            "Give more --steps or --minutes, or another evolution.at."
        )
    last = int(until(evolution) * steps)
    exchanges = METHODS[evolution.method].update is not None
    if exchanges and len(run_phases) == 1 and not update_steps(evolution, steps):
        legal = f"1 to {last}" if last else f"none in a run of {steps} steps"
        raise UserError(
            f"--set evolution.every={evolution.every} leaves --evolution={evolution.method} no "
            f"update: the last one is due by step {last} of {steps}; legal: {legal}."
        )


@dataclasses.dataclass(frozen=True)
class Variant:
    """One model of a run.

    Attributes:
      name: "sparse", "dense" or "narrow".
      model: final or initial config of the model; see `EvolutionConfig`.
      training: training settings, with the variant's number of steps.
      evolution: how its layouts or its model change.
    """

    name: str
    model: ModelConfig
    training: TrainingConfig
    evolution: EvolutionConfig = dataclasses.field(default_factory=EvolutionConfig)

    def with_steps(self, steps: int) -> "Variant":
        """Returns the variant with another number of steps."""
        return dataclasses.replace(self, training=dataclasses.replace(self.training, steps=steps))

    @property
    def phase_specs(self) -> tuple[PhaseSpec, ...]:
        """The models trained in turn; raises UserError if the method does not fit the model."""
        return phase_specs(self.model, self.evolution)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The models trained in turn, with their steps."""
        return phases(self.model, self.evolution, self.training.steps)


def with_starts(phases: tuple[Phase, ...], starts: list[int]) -> tuple[Phase, ...]:
    """Returns the phases with new first steps, one per phase."""
    stops = [*starts[1:], phases[-1].stop]
    return tuple(
        dataclasses.replace(phase, start=start, stop=stop)
        for phase, start, stop in zip(phases, starts, stops, strict=True)
    )


def with_stop(phases: tuple[Phase, ...], stop: int) -> tuple[Phase, ...]:
    """Returns the phases with another end of the last one."""
    return (*phases[:-1], dataclasses.replace(phases[-1], stop=stop))
