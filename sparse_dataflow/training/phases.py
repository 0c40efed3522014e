"""An evolution resolved to the steps of a run: which model is trained when."""

import dataclasses
from collections.abc import Sequence

from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.parallel.block_gradients import probed_rows
from sparse_dataflow.planning import cost
from sparse_dataflow.sparsity.evolution import METHODS, exchanged_share, phase_specs, until


@dataclasses.dataclass(frozen=True)
class Phase:
    """Steps `start` (from 0) up to `stop` train `model`.

    Attributes:
      start: first step.
      stop: the step after the last one.
      model: what is trained.
      runtime_layouts: whether its layouts are data of the programs.
    """

    start: int
    stop: int
    model: ModelConfig
    runtime_layouts: bool

    @property
    def steps(self) -> int:
        """How many."""
        return self.stop - self.start


def phases(model: ModelConfig, evolution: EvolutionConfig, steps: int) -> tuple[Phase, ...]:
    """The phases of a run of `steps` steps, in order; they cover it without a gap.

    Raises:
      UserError: the method can do nothing with this model.
    """
    found = phase_specs(model, evolution)
    starts = [round(spec.start * steps) for spec in found]
    return tuple(
        Phase(start, stop, spec.model, spec.runtime_layouts)
        for spec, start, stop in zip(found, starts, [*starts[1:], steps])
    )


def phase_before(found: Sequence[Phase], step: int) -> int:
    """Which phase made the state after `step` steps: a checkpoint of a phase's last step is its."""
    return next(i for i, phase in enumerate(found) if step <= phase.stop)


def update_steps(evolution: EvolutionConfig, steps: int) -> list[int]:
    """The steps (from 0) before which a layout is updated."""
    due = range(0, steps, evolution.every)
    return [step for step in due if exchanged_share(evolution, step, steps) > 0]


def run_flops(model: ModelConfig, evolution: EvolutionConfig, training: TrainingConfig) -> float:
    """Model FLOPs of a whole training as it is planned: of each phase's own model, and of the
    layout updates."""
    return phases_flops(phases(model, evolution, training.steps), evolution, training)


def phases_flops(
    found: tuple[Phase, ...], evolution: EvolutionConfig, training: TrainingConfig
) -> float:
    """Model FLOPs of a whole training in these phases, and of the layout updates."""
    tokens = training.batch * training.sequence
    parts = [(phase.model, phase.steps * tokens) for phase in found]
    total = cost.training_flops(parts, training.sequence)
    if METHODS[evolution.method].reads_gradients:
        probed = probed_rows(training) * training.sequence
        norms = cost.gradient_norms_flops(found[0].model, probed, training.sequence)
        total += len(update_steps(evolution, training.steps)) * norms
    return total


def refuse_unfit(model: ModelConfig, evolution: EvolutionConfig, steps: int) -> None:
    """Refuses a schedule that does not fit into the run.

    Raises:
      UserError: a phase without a step, or no update before the last one may be made.
    """
    found = phases(model, evolution, steps)
    if any(phase.steps < 1 for phase in found):
        raise UserError(
            f"--evolution={evolution.method} trains {len(found)} models in turn, the last from "
            f"{until(evolution):.0%} of the steps on, and {steps} steps leave one of them none; "
            "give more --steps or --minutes, or another evolution.at."
        )
    last = int(until(evolution) * steps)
    exchanges = METHODS[evolution.method].update is not None
    if exchanges and len(found) == 1 and not update_steps(evolution, steps):
        legal = f"1 to {last}" if last else f"none in a run of {steps} steps"
        raise UserError(
            f"--set evolution.every={evolution.every} leaves --evolution={evolution.method} no "
            "update: "
            f"the last is made by step {last} of {steps}; legal: {legal}."
        )
