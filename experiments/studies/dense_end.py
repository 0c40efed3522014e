"""The trainings of dense_end, and the dense training that equals each."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.preflight import settling
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core import sums
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.phases import Variant, refuse_unfit
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.files.output import markdown
from sparse_dataflow.hardware import machines
from sparse_dataflow.runs.run_config import preset

from . import engine, study
from .study import Study

OWNER, DENSE = "dense_end", "dense"
VARIED = ("evolution.", "sparsity.projections", "sparsity.density", "training.optimizer")
"""What arms set, as `study.prepare` takes it."""

Arms = Mapping[str, tuple[tuple[str, ...], float]]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training but for its seed.

    Attributes:
      arm: DENSE or a name of `experiments.dense_end.ARMS`.
      number: steps over those of --steps of a dense training, else the share that is sparse.
    """

    optimizer: str
    arm: str
    number: float

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.optimizer}/{self.arm}_{self.number:g}"


def study_dense_end(request: Request, arms: Arms, options) -> int:
    """Trains every cell and seed; returns the exit status.

    Args:
      request: the config that cells change.
      arms: name -> (sparse projections, () for all; density).
      options: of `experiments.dense_end`.

    Raises:
      UserError: before the first step where it can be known then.
    """
    folder, cells = Path(options.out), cells_of(options)
    base = study.prepare(request, VARIED, {"training.steps": options.steps})
    estimates = {
        cell: estimated_seconds(base.config, arms, cell, options)
        for cell in cells
        if cell.arm != DENSE or cell.number == options.lengths[0]
    }
    study.keep_settings(folder, base.config, OWNER)
    for cell in cells:
        variant = variant_of(base, arms, cell, options, 0)
        refuse_unfit(variant.model, variant.evolution, variant.training.steps)

    def body(stop):
        runs = [
            _run(base, arms, cell, options, seed, stop)
            for seed, cell in itertools.product(range(options.seeds), cells)
        ]
        results = engine.train_all(folder, lambda _: runs)
        if results is not None:
            trained = [{**run.record, **results[run.name]} for run in runs]
            _write(base, trained, estimates, options, folder)
        return results is not None

    return engine.resumable(folder, body)


def _run(base, arms, cell, options, seed, stop):
    def train(where, compiled):
        variant = variant_of(base, arms, cell, options, seed)
        label = f"{cell.name}, seed {seed}"
        return study.train(label, variant, base.data(variant), where, stop, keep_weights=False)

    return engine.Run(f"{cell.name}/seed_{seed}", train, {**dataclasses.asdict(cell), "seed": seed})


def _write(base, results, estimates, options, folder):
    """Writes and prints the tables."""
    seconds = [{**dataclasses.asdict(cell), "seconds": s} for cell, s in estimates.items()]
    kept = {"settings": base.config.to_json(), "results": results, "estimates": seconds}
    measurement.keep(str(folder), OWNER, base.chip.name, [kept])
    text = table(results, seconds, options.chips, options.estimate)
    (folder / "dense_end.md").write_text(text)
    say(text)


def cells_of(options) -> list[Cell]:
    """Returns what is trained, dense trainings first."""
    numbers = {DENSE: options.lengths, **dict.fromkeys(options.arms, options.ratios)}
    return [
        Cell(optimizer, arm, number)
        for optimizer in options.optimizers
        for arm in numbers
        for number in numbers[arm]
    ]


def _changes(config, arms, cell):
    """Returns the settings of a sparse cell, by path."""
    names, density = arms[cell.arm]
    projections = [name for name in config.model.projections if name in names or not names]
    return {
        "training__optimizer": cell.optimizer,
        "sparsity__projections": tuple(projections),
        "sparsity__density": density,
        "evolution__method": "sparse_to_dense",
        "evolution__at": cell.number,
    }


def variant_of(base: Study, arms: Arms, cell: Cell, options, seed: int) -> Variant:
    """Returns the training of a cell."""
    if cell.arm == DENSE:
        variant = base.variant("dense", training__optimizer=cell.optimizer, training__seed=seed)
        return variant.with_steps(max(1, round(cell.number * options.steps)))
    return base.variant("sparse", training__seed=seed, **_changes(base.config, arms, cell))


def estimated_seconds(config: Any, arms: Arms, cell: Cell, options) -> float:
    """Returns the planner's seconds of a mean step at --estimate, with the fastest plan of --chips.

    Raises:
      UserError: the chips, or no plan of theirs that fits.
    """
    large = preset(options.estimate, compute_dtype="bfloat16").change(
        run__twin="no", training__steps=options.steps, sparsity__pattern=config.sparsity.pattern
    )
    if cell.arm == DENSE:
        large = large.change(training__optimizer=cell.optimizer).dense()
    else:
        large = large.change(**_changes(large, arms, cell))
    seconds = settling.settle(large, machines.parse(options.chips)).seconds
    if seconds is None:
        raise UserError(f"--chips={options.chips} has no known rates; legal: such as h200:8.")
    return seconds


def dense_steps(dense: Mapping[int, float], bits: float) -> float:
    """Returns the steps at which dense trainings would end at `bits` a byte.

    Interpolates the loss linearly over the logarithm of the steps.  Infinite or 0 where all of them
    end above or below.

    Args:
      dense: steps -> bits per byte at the end of a training of that length.
    """
    steps = sorted(dense)
    ends = [dense[each] for each in steps]
    if bits < min(ends):
        return math.inf
    if bits > max(ends):
        return 0.0
    for (a, high), (b, low) in zip(zip(steps, ends), zip(steps[1:], ends[1:])):
        if low <= bits <= high:
            share = (high - bits) / (high - low) if high > low else 0.0
            return a * (b / a) ** share
    return float(steps[ends.index(min(ends, key=lambda end: abs(end - bits)))])


def table(results: Sequence[dict], estimates: Sequence[dict], chips: str, estimate: str) -> str:
    """Returns a Markdown table of each optimizer.

    Args:
      results: `study.train`'s of each training, with the fields of its `Cell` and its seed.
      estimates: {fields of a `Cell`, "seconds"}, by the planner.
      chips: of the estimates.
      estimate: their size.
    """
    planned = {(e["optimizer"], e["arm"], e["number"]): e["seconds"] for e in estimates}
    dense_planned = {o: seconds for (o, arm, _), seconds in planned.items() if arm == DENSE}
    heads = (
        "training, its number, steps, bits per byte, half the range, dense steps over these, "
        f"speed-up here, speed-up on {chips} at {estimate} (estimated)"
    ).split(", ")
    parts = []
    for optimizer in dict.fromkeys(r["optimizer"] for r in results):
        cells: dict[tuple[str, float], list[dict]] = {}
        for r in (r for r in results if r["optimizer"] == optimizer):
            cells.setdefault((r["arm"], r["number"]), []).append(r)
        rivals = [runs for (arm, _), runs in cells.items() if arm == DENSE]
        dense = {runs[0]["steps"]: float(np.mean(_bits(runs))) for runs in rivals}
        rows = []
        for (arm, number), runs in cells.items():
            steps, bits = runs[0]["steps"], _bits(runs)
            half = sums.half_range_text(bits)
            row = [arm, f"{number:g}", steps, f"{np.mean(bits):.4f}", half]
            ratios = ["", "", ""]
            if arm != DENSE:
                here = _step_seconds([run for rival in rivals for run in rival]) / _step_seconds(
                    runs
                )
                there = dense_planned[optimizer] / planned[optimizer, arm, number]
                equal = dense_steps(dense, float(np.mean(bits))) / steps
                ratios = [_ratio(equal, dense, steps, faster) for faster in (1.0, here, there)]
            rows.append((*row, *ratios))
        parts.append(f"## {optimizer}\n\n{markdown(heads, rows)}\n")
    return "\n".join(parts)


def _bits(runs):
    return [run["bits_per_byte"] for run in runs]


def _step_seconds(runs):
    """Returns the seconds of a mean step of the run that other work slowed least."""
    return min(run["seconds"] / run["steps"] for run in runs)


def _ratio(equal, dense, steps, faster):
    """Returns the dense steps over these, times a ratio of seconds; a bound where no dense length
    ends so high or so low."""
    if math.isinf(equal):
        return f"above {faster * max(dense) / steps:.2f}"
    return f"{faster * equal:.2f}" if equal else f"below {faster * min(dense) / steps:.2f}"
