"""The trainings of iso_flop: a list of runs that grows with its results, and is resumed."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.run import RunConfig
from sparse_dataflow.distributed.processes import stopped_status
from sparse_dataflow.distributed.stopping import stop_on_signals
from sparse_dataflow.files import folders, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.folder_lock import FolderLock
from sparse_dataflow.planning.equal_cost import (
    Cost,
    equal_cost_model,
    equal_shape_model,
    stored_parameters,
    whole_blocks,
)
from sparse_dataflow.runs.preflight import memory_check
from sparse_dataflow.runs.request import Request
from sparse_dataflow.runs.studies import rate_search, study, time_to_quality
from sparse_dataflow.runs.studies.study import HELD_OUT, TUNING, Study
from sparse_dataflow.runs.studies.time_to_quality import bits_per_byte
from sparse_dataflow.training.loop import DivergedError
from sparse_dataflow.training.monitoring.metrics import say
from sparse_dataflow.training.phases import mean_flops_per_token
from sparse_dataflow.training.variants import Variant, variant

OWNER = "iso_flop"
VARIED = (
    *("model.d_model", "sparsity.density", "sparsity.budget"),
    *("training.steps", "training.optimizer"),
)
"""What the arms set, as `study.prepare` takes it.  Heads and d_ff only give the ratios that every
arm keeps: the width of a head, query heads to a key/value head, and d_ff / d_model."""

SHAPE = "shape"
"""Value of --equal whose arms have the dense model's width; the others are as wide as they must."""

TUNE, MEASURE = "tune", "measure"
"""Roles of a run: a trial of a learning rate on the tuning split; a result on the held-out one."""

TUNING_SEED = 2**16
"""Seed of all trials; no measured run has it."""

EVALUATIONS = 16
"""Periodic evaluations of a measured run, between which time to quality is interpolated."""

WINDOWS = 128
"""Windows of a periodic evaluation."""

Results = dict[str, dict]
"""Name of a run -> its result."""


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

    def changes(self, base: RunConfig, multiplier: float, seed: int) -> dict[str, Any]:
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
        of_curves = {arm.name: arm for curve in self.curves for arm in curve.arms}
        return [*of_curves.values(), *self.longer]


def run(request: Request, options) -> int:
    """Trains every run of the list, then writes tables and figure; see `experiments.iso_flop`.

    Args:
      request: the config that arms change.
      options: of the experiment.

    Returns:
      The exit status.

    Raises:
      UserError: before the first step where it can be known then.
    """
    from sparse_dataflow.runs.studies import iso_flop_report  # Imports matplotlib, which is slow.

    for name in ("optimizers", "equal", "budgets", "steps"):
        if not getattr(options, name):
            raise UserError(f"--{name} names nothing, so there is nothing to train.")
    longest = max((*options.steps, *options.sparse_steps))
    folder = Path(options.out)
    folders.refuse_foreign(folder, OWNER)
    base = study.prepare(request, VARIED, {"training.steps": longest}, tuned=True)
    study.keep_settings(folder, base.config, OWNER, varied=["training.steps"])
    curves = plan_curves(base.config, base.tokenizer.vocab_size, options)
    most = max(options.seeds, options.headline_seeds)
    longer = longer_arms(curves, options.sparse_steps)
    plan = Plan(curves, longer, options.trials, options.seeds, most)
    for arm in plan.arms:
        models = [variant_of(base, Run(arm, TUNE, 1.0, TUNING_SEED))]
        memory_check.refuse_too_large(base.config, models, base.chip.memory_bytes)
    say(iso_flop_report.arms_table(plan, base.config))
    with FolderLock(folder), stop_on_signals(say) as stop:
        results = _train_all(base, plan, folder, stop)
    if results is None:
        say("stopped; the same command goes on")
        return stopped_status(stop())
    iso_flop_report.write(base, plan, results, folder)
    return 0


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


def _train_all(base: Study, plan: Plan, folder: Path, stop) -> Results | None:
    """Trains every run without a result; returns all results, or None if `stop()` ended it."""
    path = folder / "runs.jsonl"
    lines = read_lines(path, step_tokens(base.config))
    compiled: dict = {}
    previous: Run | None = None
    while True:
        results = {line["name"]: line["result"] for line in lines}
        each = next((r for r in run_list(plan, results) if r.name not in results), None)
        if each is None:
            return results
        result = study.read_result(folder / each.name)
        if result is None:
            if previous and (previous.arm, previous.seed) != (each.arm, each.seed):
                # The programs of another model, which no later run has.  Each maps memory, and
                # XLA's compiler crashes after the 65,530 mappings that Linux gives a process.
                compiled.clear()
                jax.clear_caches()
            previous = each
            say(_progress(base, plan, results))
            result = _trained(base, each, folder / each.name, stop, compiled)
        if result is None:
            return None
        lines.append(_line(base, each, result))
        _write_lines(path, lines)


def _trained(base, each, where, stop, compiled):
    """Trains one run; a training that diverges has a result too."""
    chosen = variant_of(base, each)
    measured = each.role == MEASURE
    data = base.split_data(chosen, HELD_OUT if measured else TUNING, WINDOWS)
    try:
        return study.train(
            each.name, chosen, data, where, stop,
            evaluations=EVALUATIONS if measured else 1,
            compiled=compiled, keep_weights=False,
        )  # fmt: skip
    except DivergedError as error:
        say(f"{each.name}: {error}")
        tokens = each.arm.steps * step_tokens(base.config)
        result = {"bits_per_byte": None, "tokens": tokens, "seconds": 0.0, "flops": 0.0}
        study.keep_result(where, result)
        return result


def _progress(base, plan, results):
    """Returns the number of the run, and the time left by the speed of the runs so far."""
    per_arm = plan.trials + plan.seeds
    dense = {curve.arms[0].name for curve in plan.curves}
    more = (len(dense) + len(plan.curves)) * (plan.headline_seeds - plan.seeds)
    total = len(plan.arms) * per_arm + more
    text = f"run {len(results) + 1} of {total}"
    flops = sum(result["flops"] for result in results.values())
    if flops:
        seconds = sum(result["seconds"] for result in results.values())
        of_arms = [
            a.steps * step_tokens(base.config) * flops_per_token(base.config, a.model)
            for a in plan.arms
        ]
        left = max(0.0, total * sum(of_arms) / len(of_arms) - flops)
        text += f", about {left * seconds / flops / 3600:.1f} h of training left"
    return text


def _line(base, each, result):
    """Returns what runs.jsonl has of a run: its role, its changes of the config, its result."""
    return {
        "name": each.name,
        "role": each.role,
        "equal": each.arm.equal,
        "budget": each.arm.budget,
        "optimizer": each.arm.optimizer,
        "steps": each.arm.steps,
        "density": each.arm.density,
        "multiplier": each.multiplier,
        "seed": each.seed,
        "result": result,
        "changes": each.arm.changes(base.config, each.multiplier, each.seed),
    }


def read_lines(path, tokens):
    """Returns the lines of runs.jsonl; the folders of those runs are not needed any more.

    Lines of before a study had several lengths do not name theirs: tokens / `tokens` of a step.
    """
    if not path.exists():
        return []
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            bits_per_byte(line["result"])
            if "steps" not in line:
                line["steps"] = line["result"]["tokens"] // tokens
                line["name"] = f"steps_{line['steps']}/{line['name']}"
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error!r}); remove it to make it anew from the runs' folders, of "
            "which those without steps_N are not read."
        ) from None
    return lines


def _write_lines(path, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    try:
        storage.replace(path, text.encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
