"""The arms and trainings of iso_flop: a list of runs that grows with its results."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.training.phases import Variant, mean_flops_per_token
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.equal_cost import (
    Cost,
    equal_cost_model,
    make_layouts,
    resized,
    stored_parameters,
    whole_blocks,
)
from sparse_dataflow.runs.run_config import RunConfig
from sparse_dataflow.runs.variants import variant

from . import rate_search, time_to_quality
from .study import Study
from .time_to_quality import bits_per_byte

SHAPE = "shape"
"""Value of --equal whose arms have the dense model's width; the others are as wide as they must."""

TUNE, MEASURE = "tune", "measure"
"""Roles of a run: a trial of a learning rate on the tuning split; a result on the held-out one."""

TUNING_SEED = 2**16
"""Seed of all trials; no measured run has it."""


def equal_shape_model(model: ModelConfig, width: int, density: float) -> ModelConfig:
    """Returns `model` at a width, with the blocks of a density.

    Raises:
      UserError: the width has no heads, or no layout of that density; names the legal densities.
    """
    sized = resized(model, width, density)
    if sized is None:
        raise UserError(
            f"Width {width} has no whole heads or blocks as the model has them; legal where shapes "
            "are equal: another budget, or a smaller --block."
        )
    make_layouts(sized)
    return sized


@dataclasses.dataclass(frozen=True)
class Arm:
    """A model of the comparison.

    Attributes:
      equal: "flops", "parameters" or "shape", which the model shares with the dense one; "" for the
        dense model, which belongs to all.
      budget: FLOPs per token of the dense model, relative to the scale's dense model.
      optimizer: value of `training.optimizer`.
      steps: optimizer steps of each of its trainings.
      density: requested density; 1 is the dense model.
      model: the shape.
      mismatch: cost relative to the dense model's, minus 1; for the dense model, its FLOPs relative
        to the budget, minus 1.
    """

    equal: str
    budget: float
    optimizer: str
    steps: int
    density: float
    model: ModelConfig
    mismatch: float

    @property
    def name(self) -> str:
        """Folder of the arm, relative to that of the study."""
        arm = f"{self.equal}_density_{self.density:g}" if self.equal else "dense"
        return f"steps_{self.steps}/budget_{self.budget:g}/{self.optimizer}/{arm}"

    @property
    def stored_density(self) -> float:
        """Fraction of the blocks of a block-sparse projection that is stored."""
        return min((self.model.linear(n).density for n in self.model.sparse_projections), default=1)

    def changes(self, base: RunConfig, multiplier: float, seed: int) -> dict[str, object]:
        """Returns what a run changes in the study's config, as `RunConfig.change` takes it.

        Args:
          base: config of the study.
          multiplier: of its learning rate.
          seed: seed of weights, data order and pattern.
        """
        return {
            "model__d_model": self.model.d_model,
            "model__num_heads": self.model.num_heads,
            "model__num_kv_heads": self.model.num_kv_heads,
            "model__d_ff": self.model.d_ff,
            "sparsity__density": self.stored_density,
            "training__steps": self.steps,
            "training__optimizer": self.optimizer,
            "training__learning_rate": multiplier * base.training.learning_rate,
            "training__seed": seed,
        }

    def config(self, base: RunConfig, multiplier: float, seed: int) -> RunConfig:
        """Returns the config of a run; for the arguments see `changes`."""
        config = base.change(**self.changes(base, multiplier, seed))
        return config if self.model.sparse_projections else config.dense()


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of the list: a config, and its role.

    Attributes:
      arm: the model.
      role: TUNE or MEASURE.
      multiplier: of the learning rate of the study's config.
      seed: seed of weights, data order and pattern.
    """

    arm: Arm
    role: str
    multiplier: float
    seed: int

    @property
    def name(self) -> str:
        """Folder of the run, relative to that of the study."""
        return f"{self.arm.name}/{self.role}/rate_{self.multiplier:.4g}/seed_{self.seed}"


@dataclasses.dataclass(frozen=True)
class Curve:
    """The arms of one length, budget, equal cost and optimizer, the dense one first."""

    equal: str
    budget: float
    optimizer: str
    steps: int
    arms: tuple[Arm, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a study trains.

    Attributes:
      curves: the arms.
      longer: sparse arms of lengths that no curve has.
      trials: trials of the learning rate of each arm.
      seeds: measured seeds of each arm.
      headline_seeds: measured seeds of the lowest arm of a curve, and of the dense one.
    """

    curves: tuple[Curve, ...]
    longer: tuple[Arm, ...]
    trials: int
    seeds: int
    headline_seeds: int

    @property
    def arms(self) -> list[Arm]:
        """All arms, each once."""
        curve_arms = {arm.name: arm for curve in self.curves for arm in curve.arms}
        return [*curve_arms.values(), *self.longer]


def plan_curves(config: RunConfig, vocab_size: int, options) -> tuple[Curve, ...]:
    """Returns the arms of each curve.

    Args:
      config: config of the study; its sparsity gives block, pattern and projections.
      vocab_size: number of tokens of the tokenizer.
      options: of the experiment.

    Raises:
      UserError: no width gives an arm its cost.
    """
    shape = dataclasses.replace(config.model, vocab_size=vocab_size)
    shape = dataclasses.replace(shape, linears=config.sparsity.linears(config.model))
    flops = functools.partial(flops_per_token, config)
    scale_flops = flops(dataclasses.replace(shape, linears={}))
    cost_of: dict[str, Cost] = {
        "flops": flops,
        "parameters": stored_parameters,
        SHAPE: lambda model: model.d_model,
    }
    multiple = math.lcm(2, whole_blocks(shape)) if SHAPE in options.equal else 2
    curves = []
    for budget in sorted(options.budgets):
        dense = equal_cost_model(shape, flops, budget * scale_flops, multiple=multiple)
        to_budget = flops(dense) / (budget * scale_flops) - 1
        models = {
            (name, density): equal_shape_model(shape, dense.d_model, density)
            if name == SHAPE
            else equal_cost_model(shape, cost_of[name], cost_of[name](dense), density)
            for name in options.equal
            for density in sorted(set(options.densities) - {1.0}, reverse=True)
        }
        lengths = sorted(set(options.steps))
        chosen = itertools.product(lengths, options.optimizers, options.equal)
        for length, optimizer, name in chosen:
            arm = functools.partial(Arm, budget=budget, optimizer=optimizer, steps=length)
            arms = [arm(equal="", density=1.0, model=dense, mismatch=to_budget)]
            for (other, density), model in models.items():
                if other == name:
                    relative = cost_of[name](model) / cost_of[name](dense) - 1
                    arms.append(arm(equal=name, density=density, model=model, mismatch=relative))
            curves.append(Curve(name, budget, optimizer, length, tuple(arms)))
    return tuple(curves)


def longer_arms(curves: Sequence[Curve], lengths: Sequence[int]) -> tuple[Arm, ...]:
    """Returns the sparse arms of the curves at the lengths that the curves do not have."""
    new = sorted(set(lengths) - {curve.steps for curve in curves})
    first = [curve for curve in curves if curve.steps == curves[0].steps]
    return tuple(
        dataclasses.replace(arm, steps=steps)
        for steps, curve in itertools.product(new, first)
        for arm in curve.arms[1:]
    )


def flops_per_token(config: RunConfig, model: ModelConfig) -> float:
    """Returns the FLOPs per token of a training, on average over the phases of its evolution."""
    return mean_flops_per_token(model, config.evolution, config.training.sequence)


def step_tokens(config: RunConfig) -> int:
    """Returns the tokens of an optimizer step."""
    return config.training.batch * config.training.sequence


def run_list(plan: Plan, results: Mapping[str, dict]) -> list[Run]:
    """Returns the runs that are known so far, in order, each once.

    A curve is tuned, then measured at the best rates, then measured with more seeds at its minimum.
    So the list grows with the results; it is complete when every run has one.

    Args:
      plan: what is trained.
      results: name of a run -> its result.
    """
    runs: dict[str, Run] = {}

    def add(chosen: Sequence[Run]) -> bool:
        """Adds runs to the list; returns whether all of them have results."""
        runs.update({each.name: each for each in chosen})
        return all(each.name in results for each in chosen)

    for curve in plan.curves:
        if not add([r for arm in curve.arms for r in trials_of(arm, plan.trials, results)]):
            continue
        measured = [r for arm in curve.arms for r in _measured(plan, arm, plan.seeds, results)]
        if add(measured):
            dense, best = headline_arms(plan, curve, results)
            for arm in (dense, best):
                add(_measured(plan, arm, plan.headline_seeds, results))
    for arm in plan.longer:
        if add(trials_of(arm, plan.trials, results)):
            add(_measured(plan, arm, plan.seeds, results))
    return list(runs.values())


def trials_of(arm: Arm, trials: int, results: Mapping[str, dict]) -> list[Run]:
    """Returns the trials of an arm up to the first without a result."""
    losses: dict[float, float] = {}
    runs = []
    for _ in range(trials):
        runs.append(Run(arm, TUNE, rate_search.next_multiplier(losses), TUNING_SEED))
        if runs[-1].name not in results:
            break
        losses[runs[-1].multiplier] = bits_per_byte(results[runs[-1].name])
    return runs


def trial_losses(plan: Plan, arm: Arm, results: Mapping[str, dict]) -> dict[float, float]:
    """Returns multiplier -> bits per byte of the tuning split, of the trials with results."""
    runs = trials_of(arm, plan.trials, results)
    return {r.multiplier: bits_per_byte(results[r.name]) for r in runs if r.name in results}


def _measured(plan, arm, seeds, results):
    best = rate_search.best_multiplier(trial_losses(plan, arm, results))
    return [Run(arm, MEASURE, best, seed) for seed in range(seeds)]


def measured_results(plan: Plan, arm: Arm, results: Mapping[str, dict]) -> dict[int, dict]:
    """Returns seed -> result of the measured runs of an arm."""
    runs = _measured(plan, arm, plan.headline_seeds, results)
    return {r.seed: results[r.name] for r in runs if r.name in results}


def headline_arms(plan: Plan, curve: Curve, results: Mapping[str, dict]) -> tuple[Arm, Arm]:
    """Returns the dense arm and the lowest sparse arm, by the seeds that all arms have."""
    dense, *sparse = curve.arms
    return dense, min(sparse or [dense], key=lambda arm: mean_bits(plan, arm, results))


def mean_bits(plan: Plan, arm: Arm, results: Mapping[str, dict]) -> float:
    """Returns held-out bits per byte, the mean over the seeds that all arms have."""
    measured = measured_results(plan, arm, results)
    return time_to_quality.mean_bits([measured[seed] for seed in range(plan.seeds)])


def variant_of(base: Study, each: Run) -> Variant:
    """Returns the model that a run trains."""
    config = each.arm.config(base.config, each.multiplier, each.seed)
    return variant(config, config.variants[0], base.tokenizer.vocab_size)
