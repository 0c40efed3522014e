"""The trainings of sparse_scaling_law, the fit's tables and its figure."""

import csv
import dataclasses
import io
import json
from pathlib import Path

import numpy as np

from experiments import gpt_run, measurement, study
from experiments.coordinates import numbers
from sparse_dataflow import json_files
from sparse_dataflow.errors import UserError
from sparse_dataflow.models.sizes import PROJECTIONS, ModelConfig
from sparse_dataflow.planning import cost
from sparse_dataflow.reporting.panels import Curve, Panel, save_panels
from sparse_dataflow.sparsity.scaling_law import (
    COLUMNS,
    CONSTANTS,
    Runs,
    ScalingLaw,
    best_for_budget,
    bootstrap,
    fit,
    interval,
)
from sparse_dataflow.training.coordinates import widened
from sparse_dataflow.training.metrics import say

FLOPS = 6.0
"""Training FLOPs that a stored parameter costs for a token: forward 2, backward 4."""


def run(values, groups) -> int:
    """Fits the runs of a CSV, or trains a grid and fits that; see `sparse_scaling_law`.

    Returns:
      The exit status.

    Raises:
      UserError: in words, for what cannot be read, trained or fitted.
    """
    folder = Path(values.out)
    if values.runs:
        runs = read_runs(Path(values.runs))
        law, laws = fit(runs), bootstrap(runs, values.rounds)
        folder.mkdir(parents=True, exist_ok=True)
        _report(folder, runs, law, laws, [])
        return 0
    begun = study.begin(values, groups)
    asked = begun.asked
    varied = ("runs", "rounds", "out", "widths", "densities", "lengths")
    study.keep_settings(folder, {k: v for k, v in asked.items() if k not in varied})
    plan = _plan(values, begun)
    held_out = [p for p in plan if p["held_out"]]
    fitted = [p for p in plan if not p["held_out"]]
    with gpt_run.stop_on_signals() as stop:
        if not _train(fitted, begun, folder, stop):
            return gpt_run.stopped_status(stop())
        runs = _runs(fitted)
        law, laws = fit(runs), bootstrap(runs, values.rounds)
        predictions = [_predicted(p, law, laws) for p in held_out]
        say(_predictions_table(predictions))
        (folder / "predictions.json").write_text(json.dumps(predictions, indent=1) + "\n")
        if not _train(held_out, begun, folder, stop):
            return gpt_run.stopped_status(stop())
    for prediction, training in zip(predictions, held_out):
        prediction["loss"] = training["loss"]
    _write_runs(folder / "runs.csv", plan)
    _report(folder, runs, law, laws, predictions)
    return 0


def _plan(values, begun) -> list[dict]:
    """One dict a training: its variant, its place in the law, and whether it is held out."""
    widths = numbers(values.widths, "widths", int)
    lengths = numbers(values.lengths, "lengths", int)
    densities = numbers(values.densities, "densities")
    plan = []
    for width in widths:
        for density in densities:
            variant = begun.variant("sparse", density=density, parametrization="supar")
            model = widened(variant.model, width)
            parameters = stored_parameters(model)
            for steps in lengths:
                training = dataclasses.replace(variant.training, steps=steps)
                own = dataclasses.replace(variant, model=model, training=training)
                plan.append(
                    {
                        "name": f"width_{width}_density_{density:g}_steps_{steps}",
                        "variant": own,
                        "parameters": parameters,
                        "sparsity": 1 - density,
                        "tokens": steps * training.batch * training.sequence,
                        "held_out": width == widths[-1] and steps == lengths[-1],
                    }
                )
    return plan


def stored_parameters(model: ModelConfig) -> int:
    """Weights of all projections that are stored: what the law calls N.

    Embeddings are left out, as sparsity does not touch them (as in arXiv 2001.08361, section 2.1).
    """
    flops = cost.flops_per_token(model, 1, training=False).sections
    return round(sum(flops[name] for name in PROJECTIONS) / 2)


def _train(trainings, begun, folder, stop) -> bool:
    """Fills in "loss" of every training; False if it was stopped before the last."""
    for training in trainings:
        where = folder / training["name"]
        result = study.kept(where)
        if result is None:
            data = begun.data(training["variant"])
            result = study.train(training["name"], training["variant"], data, where, stop)
        if result is None:
            say("stopped; the same command goes on")
            return False
        training["loss"] = result["loss"]
    return True


def _runs(trainings) -> Runs:
    return Runs(**{name: np.asarray([t[name] for t in trainings]) for name in COLUMNS})


def read_runs(path: Path) -> Runs:
    """The runs of a CSV with at least the named columns, in any order.

    Raises:
      UserError: no such file, a missing column, a value that is no number, an illegal value.
    """
    try:
        text = json_files.content(path).decode("utf-8")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--runs={path} cannot be read: {reason}.") from error
    found = list(rows[0]) if rows else []
    missing = [name for name in COLUMNS if name not in found]
    if missing:
        raise UserError(
            f"{path} has no column {', '.join(missing)}; legal: {', '.join(COLUMNS)} in its first "
            "line, and a run in each other one."
        )
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for number, row in enumerate(rows, start=2):
        for name in COLUMNS:
            try:
                columns[name].append(float(row[name]))
            except (TypeError, ValueError):
                raise UserError(
                    f"{path}, line {number}: {name} is {row[name]!r}, which is no number."
                ) from None
    return Runs(**{name: np.asarray(values) for name, values in columns.items()})


def _write_runs(path, trainings):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, "held_out"])
        for training in trainings:
            writer.writerow([*(training[name] for name in COLUMNS), training["held_out"]])


def _predicted(training, law, laws) -> dict:
    at = [training[name] for name in ("parameters", "sparsity", "tokens")]
    low, high = interval([float(each.loss(*at)) for each in laws])
    return {
        "name": training["name"],
        "sparsity": training["sparsity"],
        "predicted": float(law.loss(*at)),
        "low": low,
        "high": high,
    }


def _predictions_table(predictions) -> str:
    lines = ["| held out | predicted | 90% interval | measured | error |", "|---|---|---|---|---|"]
    for p in predictions:
        measured = f"{p['loss']:.4f}" if "loss" in p else "-"
        error = f"{p['predicted'] / p['loss'] - 1:+.2%}" if "loss" in p else "-"
        lines.append(
            f"| {p['name']} | {p['predicted']:.4f} | {p['low']:.4f} to {p['high']:.4f} | "
            f"{measured} | {error} |"
        )
    return "\n".join(lines)


def _report(folder, runs, law, laws, predictions):
    samples = {name: [each.constants_per_one()[name] for each in laws] for name in CONSTANTS}
    residuals = law.loss(runs.parameters, runs.sparsity, runs.tokens) / runs.loss - 1
    gains = {s: law.dense_equivalent(s) for s in (0.5, 0.75, 0.875)}
    constants = {
        name: {
            "value": value,
            "low": interval(samples[name])[0],
            "high": interval(samples[name])[1],
        }
        for name, value in law.constants_per_one().items()
    }
    result = {
        **measurement.provenance("any"),
        "runs": len(runs),
        "constants": constants,
        "residuals": {
            "median": float(np.median(np.abs(residuals))),
            "worst": float(np.abs(residuals).max()),
            "each": residuals.tolist(),
        },
        "dense_equivalent": gains,
        "predictions": predictions,
    }
    (folder / "law.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = ["| constant | value | 90% interval |", "|---|---|---|"]
    for name, c in constants.items():
        lines.append(f"| {name} | {c['value']:.4g} | {c['low']:.4g} to {c['high']:.4g} |")
    lines += [
        "",
        f"{len(runs)} runs; residuals: median {result['residuals']['median']:.2%}, worst "
        f"{result['residuals']['worst']:.2%}.",
        *(
            f"A model with {sparsity:.1%} zeros does as well as a dense one of {times:.2f} times "
            "its stored parameters."
            for sparsity, times in gains.items()
        ),
    ]
    if predictions:
        lines += ["", _predictions_table(predictions)]
    text = "\n".join(lines) + "\n"
    (folder / "law.md").write_text(text)
    draw(runs, law, folder / "law.png")
    say(text)


COSTS = {
    "stored blocks only": lambda sparsity: FLOPS,
    "zeros computed": lambda sparsity: FLOPS / (1 - sparsity),
}
"""FLOPs of a stored parameter for a token, by what a training computes; masked dense training
computes the zeros as well."""


def draw(runs: Runs, law: ScalingLaw, path: Path) -> None:
    """Measured against fitted loss; the loss that a budget reaches at each sparsity; and the best
    sparsity of a model of given stored size (arXiv 2309.08520, section 3.2).

    Where only stored blocks cost, more zeros are better up to the highest sparsity that was
    trained; where zeros are computed, they pay from some budget on.
    """
    fitted = law.loss(runs.parameters, runs.sparsity, runs.tokens)
    ends = [min(fitted.min(), runs.loss.min()), max(fitted.max(), runs.loss.max())]
    points = {}
    for sparsity in np.unique(runs.sparsity):
        own = runs.sparsity == sparsity
        points[f"{sparsity:.1%} zeros"] = Curve(fitted[own], runs.loss[own], joined=False)
    spent = FLOPS * runs.parameters * runs.tokens
    budget = float(np.exp(np.log(spent).mean()))
    sparsities = np.linspace(0, runs.sparsity.max(), 60)
    tokens = np.geomspace(runs.tokens.min() / 10, runs.tokens.max() * 10, 400)
    reached, best = {}, {}
    for name, cost_of in COSTS.items():
        lowest = [best_for_budget(law, budget, s, cost_of(s), tokens)[0] for s in sparsities]
        reached[name] = Curve(sparsities, lowest, marked=False)
    budgets = np.geomspace(spent.min(), 64 * spent.max(), 40)
    for size in np.quantile(runs.parameters, [0, 0.5, 1]):
        costs = np.array([COSTS["zeros computed"](s) for s in sparsities])
        losses = law.loss(size, sparsities, budgets[:, None] / (costs * size))
        name = f"{size:,.0f} stored, zeros computed"
        best[name] = Curve(budgets, sparsities[losses.argmin(axis=1)], marked=False)
    equal = Curve(ends, ends, marked=False, dashed=True)
    label = "held-out loss, nats a token"
    save_panels(
        path,
        [
            Panel("fit", "fitted loss, nats a token", label, {**points, "equal": equal}),
            Panel(f"lowest loss for {budget:.1e} FLOPs", "sparsity", label, reached),
            Panel("best sparsity", "training FLOPs", "sparsity", best, log_x=10),
        ],
    )
