"""The trainings of sparse_scaling_law, and the report of the fit."""

import csv
import dataclasses
import functools
import io
import itertools
import json
from pathlib import Path

import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.messages import say
from sparse_dataflow.files import folders, json_files, output
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.equal_cost import stored_parameters

from . import engine, study
from .activation_changes import with_width
from .fitted_law import (
    COLUMNS,
    Runs,
    ScalingLaw,
    best_for_budget,
    bootstrap,
    fit,
    interval,
    noise,
    refuse_undetermined,
)
from .panels import Curve, Panel, save_panels

OWNER = "sparse_scaling_law"

PLACE = COLUMNS[:3]
"""Coordinates of a run: parameters, sparsity, tokens."""

FLOPS = 6.0
"""Training FLOPs that a stored parameter costs for a token: forward 2, backward 4."""


VARIED = ("sparsity.density", "sparsity.budget", "sparsity.rank", "sparsity.hadamard", "evolution.")
"""What is the same or planned in a scaling law, as `study.prepare` takes it."""


def fit_scaling_law(request: Request, options) -> int:
    """Fits the runs of a CSV, or of a grid that it trains; see `experiments.sparse_scaling_law`.

    Returns:
      The exit status.

    Raises:
      UserError: what cannot be read, trained or fitted.
    """
    folder = Path(options.out)
    folders.refuse_foreign(folder, OWNER)
    return (_fit_again if options.runs else _train_and_fit)(request, options, folder)


def _fit_again(request, options, folder):
    """Fits the runs of a CSV, and predicts the runs that it holds out."""
    runs, held_out = read_runs(Path(options.runs))
    fitted = runs.take(~held_out)
    law, laws = fit(fitted), bootstrap(fitted, options.rounds)
    folders.claim(folder, OWNER)
    losses = _losses(runs.take(held_out))
    predictions = [_predicted(place, law, laws) for place in losses]
    _report(folder, "any", fitted, law, laws, _measured(predictions, losses))
    return 0


def _train_and_fit(request, options, folder):
    """Trains a grid, fits it, and predicts its widest, longest trainings before they run."""
    varied = (*VARIED, "training.steps")
    base = study.prepare(request, varied, {"model.parametrization": "supar"})
    plan = _plan(base, options)
    held_out = [p for p in plan if p["held_out"]]
    fitted = [p for p in plan if not p["held_out"]]
    refuse_undetermined(_runs([{**p, "loss": 1.0} for p in fitted]))
    study.keep_settings(folder, base.config, OWNER)

    def body(stop):
        if not _train(fitted, base, folder, stop):
            return False
        runs = _runs(fitted)
        law, laws = fit(runs), bootstrap(runs, options.rounds)
        places = dict.fromkeys(tuple(p[name] for name in PLACE) for p in held_out)
        predictions = [_predicted(place, law, laws) for place in places]
        say(_predictions_table(predictions))
        (folder / "predictions.json").write_text(json.dumps(predictions, indent=1) + "\n")
        if not _train(held_out, base, folder, stop):
            return False
        names = (*COLUMNS, "seed", "held_out")
        output.write_csv(folder / "runs.csv", [{name: p[name] for name in names} for p in plan])
        measured = _measured(predictions, _losses(_runs(held_out)))
        _report(folder, base.chip.name, runs, law, laws, measured)
        return True

    return engine.resumable(folder, body)


def _plan(base, options) -> list[dict]:
    """One dict for each training: its variant, its place in the law, and whether it is held out.

    All trainings of one seed come before those of the next.
    """
    widths, lengths = sorted(options.widths), sorted(options.lengths)
    plan = []
    for seed, width, density in itertools.product(range(options.seeds), widths, options.densities):
        variant = base.variant("sparse", sparsity__density=density, training__seed=seed)
        model = with_width(variant.model, width)
        for steps in lengths:
            training = dataclasses.replace(variant.training, steps=steps)
            plan.append(
                {
                    "name": f"width_{width}_density_{density:g}_steps_{steps}_seed_{seed}",
                    "variant": dataclasses.replace(variant, model=model, training=training),
                    "parameters": stored_parameters(model),
                    "sparsity": 1 - density,
                    "tokens": steps * training.batch * training.sequence,
                    "seed": seed,
                    "held_out": width == widths[-1] and steps == lengths[-1],
                }
            )
    return plan


def _train(trainings, base, folder, stop) -> bool:
    """Fills in "loss" of every training; False if it was stopped before the last."""

    def train(training, where, compiled):
        variant = training["variant"]
        return study.train(training["name"], variant, base.data(variant), where, stop)

    runs = [engine.Run(each["name"], functools.partial(train, each)) for each in trainings]
    results = engine.train_all(folder, lambda _: runs)
    if results is None:
        return False
    for training in trainings:
        training["loss"] = results[training["name"]]["loss"]
    return True


def _runs(trainings) -> Runs:
    return Runs(**{name: np.asarray([t[name] for t in trainings]) for name in COLUMNS})


def read_runs(path: Path) -> tuple[Runs, np.ndarray]:
    """The runs of a CSV with at least the named columns, in any order; bool [runs], which of them
    its column `held_out`, where it has one, keeps from the fit.

    Raises:
      UserError: no such file, a missing column, a value that is no number, an illegal value.
    """
    try:
        text = json_files.read_bytes(path).decode("utf-8")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--runs={path} cannot be read: {reason}.") from error
    header = list(rows[0]) if rows else []
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise UserError(
            f"{path} has no column {', '.join(missing)}; legal: {', '.join(COLUMNS)} in its first "
            "line, and a run in each other one."
        )
    for (number, row), name in itertools.product(enumerate(rows, start=2), COLUMNS):
        try:
            row[name] = float(row[name])
        except (TypeError, ValueError):
            raise UserError(
                f"{path}, line {number}: {name} is {row[name]!r}, which is no number."
            ) from None
    return _runs(rows), np.array([row.get("held_out") == "True" for row in rows])


def _losses(runs) -> dict[tuple, list[float]]:
    """{(parameters, sparsity, tokens): losses of the runs there}."""
    by_place: dict[tuple, list[float]] = {}
    for *place, loss in zip(*(getattr(runs, name) for name in COLUMNS)):
        by_place.setdefault(tuple(map(float, place)), []).append(float(loss))
    return by_place


def _predicted(place, law, laws) -> dict:
    low, high = interval([float(each.loss(*place)) for each in laws])
    return {
        **dict(zip(PLACE, place)),
        "predicted": float(law.loss(*place)),
        "low": low,
        "high": high,
    }


def _measured(predictions, losses) -> list[dict]:
    """The predictions with the losses that were measured there, and their mean."""
    compared = []
    for prediction in predictions:
        measured = losses[tuple(float(prediction[name]) for name in PLACE)]
        compared.append({**prediction, "loss": float(np.mean(measured)), "losses": measured})
    return compared


def _predictions_table(predictions) -> str:
    head = "held out: stored, zeros, tokens, predicted, 90% interval, measured, error".split(", ")
    rows = [
        (
            f"{p['parameters']:,.0f}",
            f"{p['sparsity']:.1%}",
            f"{p['tokens']:,.0f}",
            f"{p['predicted']:.3f}",
            f"{p['low']:.3f} to {p['high']:.3f}",
            f"{p['loss']:.3f}" if "loss" in p else "-",
            f"{p['predicted'] / p['loss'] - 1:+.1%}" if "loss" in p else "-",
        )
        for p in predictions
    ]
    return output.markdown(head, rows)


def _report(folder, machine, runs, law, laws, predictions):
    residuals = law.loss(runs.parameters, runs.sparsity, runs.tokens) / runs.loss - 1
    result = {
        **measurement.provenance(machine),
        "runs": len(runs),
        "constants": {
            name: _with_interval(value, [each.constants_in_units_of_1()[name] for each in laws])
            for name, value in law.constants_in_units_of_1().items()
        },
        "residuals": {
            "median": float(np.median(np.abs(residuals))),
            "worst": float(np.abs(residuals).max()),
            "between_seeds": noise(runs),
            "each": residuals.tolist(),
        },
        "dense_equivalent": {
            str(sparsity): _with_interval(
                law.dense_equivalent(sparsity), [each.dense_equivalent(sparsity) for each in laws]
            )
            for sparsity in (0.5, 0.75, 0.875)
        },
        "predictions": predictions,
    }
    (folder / "law.json").write_text(json.dumps(result, indent=1) + "\n")
    text = _text(result)
    (folder / "law.md").write_text(text)
    draw(runs, law, laws, predictions, folder / "law.png")
    say(text)


def _with_interval(value, samples):
    low, high = interval(samples)
    return {"value": value, "low": low, "high": high}


def _text(result) -> str:
    """The report's tables and sentences, Markdown."""
    constants = [
        (name, f"{c['value']:.4g}", f"{c['low']:.4g} to {c['high']:.4g}")
        for name, c in result["constants"].items()
    ]
    residuals = result["residuals"]
    lines = [
        output.markdown(("constant", "value", "90% interval"), constants),
        "",
        f"{result['runs']} runs; residuals: median {residuals['median']:.2%}, worst "
        f"{residuals['worst']:.2%}.",
    ]
    if residuals["between_seeds"] is not None:
        lines.append(f"Standard deviation between seeds: {residuals['between_seeds']:.2%}.")
    for sparsity, gain in result["dense_equivalent"].items():
        lines.append(
            f"A model with {float(sparsity):.1%} zeros does as well as a dense one of "
            f"{gain['value']:.2f} ({gain['low']:.2f} to {gain['high']:.2f}) times its stored "
            "parameters."
        )
    if result["predictions"]:
        lines += ["", _predictions_table(result["predictions"])]
    return "\n".join(lines) + "\n"


COSTS = {
    "stored blocks only": lambda sparsity: FLOPS,
    "zeros computed": lambda sparsity: FLOPS / (1 - sparsity),
}
"""FLOPs of a stored parameter for a token, by what a training computes; masked dense training
computes the zeros as well."""


def draw(
    runs: Runs, law: ScalingLaw, laws: list[ScalingLaw], predictions: list[dict], path: Path
) -> None:
    """Measured against fitted loss; the loss that a budget reaches at each sparsity, with the 90%
    interval of `laws`; and the best sparsity of a model of given stored size (arXiv 2309.08520,
    section 3.2).

    Where only stored blocks cost, more zeros are better up to the highest sparsity that was
    trained; where zeros are computed, they pay from some budget on.
    """
    spent = FLOPS * runs.parameters * runs.tokens
    budget = float(np.exp(np.log(spent).mean()))
    digit, power = f"{budget:.0e}".split("e")
    name = rf"Lowest loss for ${digit} \times 10^{{{int(power)}}}$ training FLOPs"
    label = "held-out loss, nats a token"
    save_panels(
        path,
        [
            Panel("Fit", "fitted or predicted " + label, label, _fitted(runs, law, predictions)),
            Panel(name, "sparsity", "loss / that of dense", _reached(runs, law, laws, budget)),
            Panel(
                "Best sparsity, zeros computed",
                "training FLOPs, projections",
                "sparsity",
                _best(runs, law, np.geomspace(spent.min(), 1e4 * spent.max(), 60)),
                log_x=10,
            ),
        ],
    )


def _fitted(runs, law, predictions):
    fitted = law.loss(runs.parameters, runs.sparsity, runs.tokens)
    curves = {}
    for sparsity in np.unique(runs.sparsity):
        equal = runs.sparsity == sparsity
        name = f"{100 * sparsity:g}% zeros" if sparsity else "dense"
        curves[name] = Curve(fitted[equal], runs.loss[equal], joined=False)
    both = [*fitted, *runs.loss]
    if predictions:
        x, y = zip(*((p["predicted"], loss) for p in predictions for loss in p["losses"]))
        curves["held out"] = Curve(x, y, joined=False)
        both += [*x, *y]
    ends = [min(both), max(both)]
    return curves | {"equal": Curve(ends, ends, marked=False, dashed=True)}


def _reached(runs, law, laws, budget):
    sparsities = np.linspace(0, runs.sparsity.max(), 30)
    tokens = np.geomspace(runs.tokens.min() / 10, runs.tokens.max() * 10, 400)
    curves = {}
    for name, cost_of in COSTS.items():

        def to_dense(law, cost_of=cost_of):
            lowest = [best_for_budget(law, budget, s, cost_of(s), tokens)[0] for s in sparsities]
            return np.asarray(lowest) / lowest[0]

        low, high = np.transpose([interval(at) for at in np.transpose(list(map(to_dense, laws)))])
        curves[name] = Curve(sparsities, to_dense(law), low, high, marked=False)
    return curves


def _best(runs, law, budgets):
    sparsities = np.linspace(0, runs.sparsity.max(), 60)
    costs = np.array([COSTS["zeros computed"](s) for s in sparsities])
    curves = {}
    for size in np.quantile(runs.parameters, [0, 0.5, 1]):
        losses = law.loss(size, sparsities, budgets[:, None] / (costs * size))
        curves[f"{size:,.0f} stored"] = Curve(
            budgets, sparsities[losses.argmin(axis=1)], marked=False
        )
    return curves
