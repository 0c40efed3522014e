"""Successive halving over shapes and rates, with the same trials for every arm.

A trial of the first rung is a random model of the arm's space.  Each rung trains for its share of
the budget, with a schedule of its own, and the best of it go on.  Then the rate of the best model
is searched, and it is measured with several seeds on other held-out documents.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sparse_dataflow.core.config.settings import shown
from sparse_dataflow.core.training.phases import Variant, mean_flops_per_token, refuse_unfit
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.equal_cost import stored_parameters

from .. import rate_search
from ..engine import Results
from ..study import Study
from ..time_to_quality import bits_per_byte
from .design import D_FF_RATIO, HEAD_WIDTH, RATE, WIDTH, Design

TUNE, MEASURE = "tune", "measure"
"""Roles: a trial on the tuning split, and a result on the held-out one."""

TUNING_SEED = 2**16
"""Seed of all trials; no measured training has it."""

_DRAWS = 5_000
"""Most draws of a model until one is legal."""

_DIGEST = 12


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is searched by itself: an arm with an optimizer at a budget."""

    budget: str
    optimizer: str
    arm: str

    @property
    def name(self) -> str:
        """Folder of its trainings, relative to the study's."""
        return f"{self.budget}/{self.optimizer}/{self.arm}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training.

    Attributes:
      cell: what it belongs to.
      model: values of the space, as pairs.
      role: TUNE or MEASURE.
      share: of the budget.
      multiplier: of the drawn rate.
      seed: seed of weights, data order and patterns.
    """

    cell: Cell
    model: tuple[tuple[str, Any], ...]
    role: str = TUNE
    share: float = 1.0
    multiplier: float = 1.0
    seed: int = TUNING_SEED


class Search:
    """The trials of a study that are known so far."""

    def __init__(self, base: Study, design: Design):
        """Draws nothing yet; see `candidates`.

        Args:
          base: the config that trials change.
          design: what the study file says.
        """
        self.base = base
        self.design = design
        chosen = itertools.product(design.budgets, design.optimizers, design.arms)
        self.cells = [Cell(*each) for each in chosen]
        self.candidates = functools.cache(self._candidates)
        self.variant = functools.cache(self._variant)

    def changes(self, trial: Trial) -> dict[str, object]:
        """Returns path -> value of a trial's config, without its number of steps.

        Raises:
          UserError: the space lacks a value, or heads do not divide the width.
        """
        values = dict(trial.model)
        result = {**self.design.settings_of(trial.cell.arm)}
        result |= {path: value for path, value in values.items() if "." in path}
        width = result.get(WIDTH, self.base.config.model.d_model)
        if HEAD_WIDTH in values:
            heads, rest = divmod(width, values[HEAD_WIDTH])
            if rest or not heads:
                raise UserError(f"Heads of {values[HEAD_WIDTH]} do not divide a width of {width}.")
            result["model.num_heads"] = heads
        if D_FF_RATIO in values:
            result["model.d_ff"] = round(values[D_FF_RATIO] * width)
        rate = values.get(RATE, self.base.config.training.learning_rate)
        return result | {
            "training.learning_rate": trial.multiplier * rate,
            "training.optimizer": trial.cell.optimizer,
            "training.seed": trial.seed,
        }

    def _variant(self, trial: Trial) -> Variant:
        """Returns the model of a trial, and as many steps as its share of the budget pays for.

        Raises:
          UserError: the model is not legal.
        """
        changes = self.changes(trial)
        name = "sparse" if changes.get("sparsity.projections", True) else "dense"
        variant = self.base.variant(name, **changes)
        training = variant.training
        flops = mean_flops_per_token(variant.model, variant.evolution, training.sequence)
        budget = trial.share * self.design.budgets[trial.cell.budget]
        steps = max(1, round(budget / (flops * training.batch * training.sequence)))
        refuse_unfit(variant.model, variant.evolution, steps)
        return variant.with_steps(steps)

    def name(self, trial: Trial) -> str:
        """Returns the folder of a trial: its cell, its role, and a digest of all that makes it."""
        changes = {**self.design.settings, **self.changes(trial)}
        steps = self.variant(trial).training.steps
        text = json.dumps([self.design.scale, changes, steps], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]
        return f"{trial.cell.name}/{trial.role}/{digest}"

    def _candidates(self, cell: Cell) -> list[Trial]:
        """Returns the different models of the first rung.

        Raises:
          UserError: the space has too few legal models.
        """
        count, share = self.design.trials[0], self.design.shares[0]
        space = self.design.space_of(cell.arm)
        rng = np.random.default_rng(
            [self.design.draw_seed, zlib.crc32(f"{cell.budget}/{cell.arm}".encode())]
        )
        result: dict[Trial, None] = {}
        tried: set[Trial] = set()
        last = "no value was drawn"
        for _ in range(_DRAWS):
            drawn = {name: values[rng.integers(len(values))] for name, values in space.items()}
            trial = Trial(cell, tuple(sorted(drawn.items())), share=share)
            if trial in tried:
                continue
            tried.add(trial)
            try:
                self._refuse_unequal_length(trial)
            except UserError as error:
                last = str(error)
                continue
            result[trial] = None
            if len(result) == count:
                return list(result)
        raise UserError(
            f"The arm {cell.arm} has {len(result)} legal models at the budget {cell.budget}; "
            f"legal: {count} or more. The last of the others: {last}"
        )

    def _refuse_unequal_length(self, trial):
        """Raises UserError if the training at the budget has too few or too many tokens."""
        variant = self.variant(dataclasses.replace(trial, share=1.0))
        training = variant.training
        tokens = training.steps * training.batch * training.sequence
        ratio = tokens / stored_parameters(variant.model)
        least, most = self.design.tokens_per_weight
        if not least <= ratio <= most:
            raise UserError(f"{ratio:.3g} tokens a weight; legal: {least:g} to {most:g}.")

    def known(self, results: Mapping[str, dict]) -> Iterator[Trial]:
        """Yields the trials that are known so far, rung by rung over all arms.

        It is complete when each has a result.
        """
        keys = itertools.product(self.design.budgets, self.design.optimizers)
        for key in keys:
            cells = [cell for cell in self.cells if (cell.budget, cell.optimizer) == key]
            for stage in range(len(self.design.trials) + 2):
                for cell in cells:
                    yield from self.stage(cell, stage, results)

    def stage(self, cell: Cell, stage: int, results: Mapping[str, dict]) -> list[Trial]:
        """Returns the trials of a rung, then those of the rate, then the measured ones; none
        before the stage before is complete."""
        if not stage:
            return self.candidates(cell)
        before = self.stage(cell, stage - 1, results)
        if not before or any(self.name(trial) not in results for trial in before):
            return []
        rungs = len(self.design.trials)
        if stage < rungs:
            order = sorted(before, key=lambda trial: self._bits(trial, results))
            share = self.design.shares[stage]
            chosen = order[: self.design.trials[stage]]
            return [dataclasses.replace(trial, share=share) for trial in chosen]
        if stage == rungs:
            first = min(before, key=lambda trial: self._bits(trial, results))
            return self._rates(first, results)
        best = min(before, key=lambda trial: self._bits(trial, results))
        seeds = range(self.design.seeds)
        return [dataclasses.replace(best, role=MEASURE, seed=seed) for seed in seeds]

    def _rates(self, first: Trial, results: Mapping[str, dict]) -> list[Trial]:
        """Returns a trial and those of other rates, up to the first without a result."""
        trials, losses = [first], {1.0: self._bits(first, results)}
        for _ in range(self.design.rate_trials):
            multiplier = rate_search.next_multiplier(losses)
            trials.append(dataclasses.replace(first, multiplier=multiplier))
            if self.name(trials[-1]) not in results:
                break
            losses[multiplier] = self._bits(trials[-1], results)
        return trials

    def _bits(self, trial, results):
        return bits_per_byte(results[self.name(trial)])

    def total(self) -> int:
        """Returns the number of trainings of the whole study."""
        design = self.design
        return len(self.cells) * (sum(design.trials) + design.rate_trials + design.seeds)

    def left(self, results: Results) -> float:
        """Returns the training FLOPs that are left."""
        design = self.design
        work = sum(n * share for n, share in zip(design.trials, design.shares))
        work += design.rate_trials + design.seeds
        whole = sum(design.budgets[cell.budget] * work for cell in self.cells)
        shares = {
            self.name(t): t.share * design.budgets[t.cell.budget] for t in self.known(results)
        }
        return whole - sum(flops for name, flops in shares.items() if name in results)


def words(model: tuple[tuple[str, object], ...]) -> str:
    """Returns the drawn values of a model for tables."""
    return ", ".join(f"{name.rpartition('.')[2]} {shown(value)}" for name, value in model)
