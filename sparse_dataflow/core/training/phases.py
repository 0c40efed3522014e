"""The models of a run, resolved from a `RunConfig`, and which one is trained in which steps."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sparse_dataflow.core.config.layer_groups import layer_groups
from sparse_dataflow.core.config.model import PRECISIONS, ModelConfig
from sparse_dataflow.core.config.parallel import DepthSchedule
from sparse_dataflow.core.config.run import RunConfig
from sparse_dataflow.core.config.sparsity import GROUPED_PATTERNS, EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.block_gradients import portions
from sparse_dataflow.core.layouts.allocation import allocate
from sparse_dataflow.core.layouts.evolution import (
    METHODS,
    PhaseSpec,
    exchanged_share,
    phase_specs,
    until,
)
from sparse_dataflow.core.model import adapters, stacks
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.equal_cost import equal_cost_model
from sparse_dataflow.core.training.teacher import Teacher
from sparse_dataflow.files.errors import UserError

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

    A dense model has the same FLOPs in all phases, whatever the evolution.  Layout updates do not
    count.

    Args:
      model: final or initial config of the model; see `EvolutionConfig`.
      evolution: how its layouts or its model change.

    Raises:
      UserError: the evolution method does not fit the model.
    """
    if not model.sparse_projections:
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
    teacher: Teacher | None = None,
) -> float:
    """Returns the model FLOPs of a training as planned, with its layout updates and teacher."""
    return phases_flops(phases(model, evolution, training.steps), evolution, training, teacher)


def token_flops(
    model: ModelConfig,
    training: TrainingConfig,
    teacher: Teacher | None = None,
    depth: float = 1.0,
) -> float:
    """Returns the model FLOPs of a training token, with those of a teacher's forward pass.

    Args:
      depth: see `cost.flops_per_token`.
    """
    adapters = bool(training.adapter_rank)
    flops = cost.flops_per_token(model, training.sequence, adapters=adapters, depth=depth).total
    if training.teacher and teacher is not None:
        flops += teacher.flops_per_token(training.sequence)
    return flops


def phases_flops(
    run_phases: tuple[Phase, ...],
    evolution: EvolutionConfig,
    training: TrainingConfig,
    teacher: Teacher | None = None,
    depth: DepthSchedule = FULL_DEPTH,
) -> float:
    """Returns the model FLOPs of a training in these phases, with its layout updates.

    The forward pass of a teacher counts; the training of the teacher does not.
    """
    tokens = training.batch * training.sequence
    total = 0.0
    for phase in run_phases:
        span = phase.start, phase.stop, training.steps
        share = depth.mean_share(phase.model.num_layers, *span)
        total += phase.steps * tokens * token_flops(phase.model, training, teacher, share)
    if METHODS[evolution.method].reads_gradients:
        rows, calls, _ = portions(training, evolution.sequences)
        measured = rows * calls * training.sequence
        norms = cost.gradient_norms_flops(run_phases[0].model, measured, training.sequence)
        total += len(update_steps(evolution, training.steps)) * norms
    return total


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

    def at_flops_of(self, rival: "Variant") -> "Variant":
        """Returns the variant at the width at which its tokens cost the FLOPs of the rival's.

        FLOPs are means over the phases of a training.  Raises UserError if no width has them.
        """
        sequence = self.training.sequence

        def flops(model):
            return mean_flops_per_token(model, self.evolution, sequence)

        target = mean_flops_per_token(rival.model, rival.evolution, sequence)
        return dataclasses.replace(self, model=equal_cost_model(self.model, flops, target))

    @property
    def phase_specs(self) -> tuple[PhaseSpec, ...]:
        """The models trained in turn; raises UserError if the method does not fit the model."""
        return phase_specs(self.model, self.evolution)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The models trained in turn, with their steps."""
        return phases(self.model, self.evolution, self.training.steps)


def variants(
    config: RunConfig, vocab_size: int | None = None, steps: Mapping[str, int] | None = None
) -> list[Variant]:
    """Returns the models that a run trains.

    Args:
      vocab_size: number of tokens of the tokenizer; `config.model.vocab_size` if None.
      steps: variant -> number of steps; if None those of the config, at least 1.

    Raises:
      UserError: the model, its layouts or the micro-batches are impossible; names legal values.
    """
    warmups = config.training.warmup_steps
    if warmups and len(warmups) != len(config.variants):
        raise UserError(
            f"training.warmup_steps={','.join(map(str, warmups))} has {len(warmups)} numbers; "
            f"legal: one for each model ({', '.join(config.variants)}), or none."
        )

    def planned(number, name):
        training = dataclasses.replace(config.training, warmup_steps=warmups[number : number + 1])
        with_warmup = dataclasses.replace(config, training=training)
        count = steps[name] if steps else config.training.steps or 1
        return variant(with_warmup, name, vocab_size).with_steps(count)

    return [planned(number, name) for number, name in enumerate(config.variants)]


def variant(config: RunConfig, name: str, vocab_size: int | None = None) -> Variant:
    """Returns a model of a run; see `variants`.

    "narrow" is the model without sparse weights whose width gives it the training FLOPs per token
    of the sparse model, on average over its phases.  Settings that the planner has not settled are
    those of `RunConfig.without_auto`.
    """
    config = config.without_auto()
    dense = dataclasses.replace(
        config.model,
        vocab_size=vocab_size or config.model.vocab_size + config.data.extend_vocabulary,
        seed=config.training.seed,
    )
    adapted = config.training.adapter_rank, config.training.frozen_dtype
    if name != "sparse" and config.sparsity.projections:
        # A twin is the plain training to compare with: no teacher, and dense from the start.
        plain = dataclasses.replace(config.training, teacher="")
        config = dataclasses.replace(config, training=plain)
    if name == "dense":
        model = adapters.with_adapters(dense, *adapted)
        shared = config.evolution.method == "shared_to_own" and not config.sparsity.projections
        evolution = config.evolution if shared else EvolutionConfig()
        return Variant(name, model, config.training, evolution)
    if name == "narrow":
        sparse = variant(config, "sparse", vocab_size)
        return Variant(name, dense, config.training).at_flops_of(sparse)
    model = dataclasses.replace(dense, linears=config.sparsity.linears(config.model))
    model = adapters.with_adapters(allocate(model, config.sparsity.budget), *adapted)
    stacks.check_layouts(model)
    given = bool(config.run.init_from) and config.run.prune_to == "blocks"
    evolution = dataclasses.replace(config.evolution, given_layouts=given)
    sparse = Variant(name, model, config.training, evolution)
    # Raises if the method does not fit the model.
    for spec in phase_specs(sparse.model, sparse.evolution):
        _refuse_unequal_groups(spec)
        _refuse_unequal_layers(spec.model)
    return sparse


def _refuse_unequal_layers(model):
    """Raises UserError if layers are to share a block and have different layouts."""
    if not model.shared_layers:
        return
    for name, (first, *others) in stacks.layouts(model).items():
        if any(layout != first for layout in others):
            raise UserError(
                "--evolution=shared_to_own trains one block for all layers, and the pattern "
                f"{model.linear(name).pattern} gives each its own layout of {name}; legal: a "
                f"pattern that does not, such as {' or '.join(GROUPED_PATTERNS)}."
            )


def _refuse_unequal_groups(spec):
    """Raises UserError if a product is to be quantised whose layout has no equal groups."""
    if not spec.model.quantized or not spec.model.sparse_projections:
        return
    head = f"model.precision={spec.model.precision} needs layouts of equal groups"
    patterns = " or ".join(GROUPED_PATTERNS)
    legal = f"legal: sparsity.pattern={patterns}, or model.precision={PRECISIONS[0]}."
    if spec.runtime_layouts:
        raise UserError(
            f"{head} that are known before training, which run.init_from and methods of "
            "evolution that choose blocks do not have; legal: --evolution=static, sparse_to_dense, "
            "low_rank_tail or shared_to_own with drawn weights, or "
            f"model.precision={PRECISIONS[0]}."
        )
    for group in layer_groups(spec.model):
        first = dataclasses.replace(group.model, num_layers=1)
        for projection, (layout,) in stacks.layouts(first).items():
            if layout.groups is None:
                pattern = spec.model.linear(projection).pattern
                raise UserError(f"{head}, and {pattern} has none in {projection}; {legal}")


PLATEAU_GAIN = 0.005
"""Smallest relative improvement over the best evaluation that counts as progress."""


@dataclasses.dataclass(frozen=True)
class Plateau:
    """The best evaluation of a phase and the evaluations since.

    Attributes:
      best: bits per byte of the last evaluation that was progress; infinite before the first.
      stale: number of evaluations since then, which improved on it by less than GAIN.
    """

    best: float = math.inf
    stale: int = 0

    def after(self, bits_per_byte: float) -> "Plateau":
        """Returns the state after one more evaluation."""
        if bits_per_byte < self.best * (1 - PLATEAU_GAIN):
            return Plateau(bits_per_byte)
        return Plateau(self.best, self.stale + 1)

    def to_json(self) -> list:
        """Returns the fields as JSON-able values; `from_json` is the inverse."""
        return [None if math.isinf(self.best) else self.best, self.stale]

    @classmethod
    def from_json(cls, saved: Any) -> "Plateau":
        """Returns what `to_json` gave; the state before the first evaluation for None."""
        best, stale = saved or (None, 0)
        return cls(math.inf if best is None else best, stale)


def with_next_start(phases: tuple[Phase, ...], number: int, step: int) -> tuple[Phase, ...]:
    """Returns the phases with the one after index `number` starting at `step`."""
    starts = [phase.start for phase in phases]
    starts[number + 1] = step
    return with_starts(phases, starts)


def with_starts(phases: tuple[Phase, ...], starts: list[int]) -> tuple[Phase, ...]:
    """Returns the phases with new first steps, one per phase."""
    stops = [*starts[1:], phases[-1].stop]
    return tuple(
        dataclasses.replace(phase, start=start, stop=stop)
        for phase, start, stop in zip(phases, starts, stops, strict=True)
    )
