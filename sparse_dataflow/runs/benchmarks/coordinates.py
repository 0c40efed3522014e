"""The trainings of coordinate_check, their table and their figure."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from sparse_dataflow.data import cache
from sparse_dataflow.data.corpora import load_corpus
from sparse_dataflow.data.tokenizer import load_tokenizer
from sparse_dataflow.files import folders
from sparse_dataflow.reporting.panels import Curve, Panel, save_panels
from sparse_dataflow.runs import measurement
from sparse_dataflow.runs.benchmarks import benchmark
from sparse_dataflow.runs.request import Request
from sparse_dataflow.runs.train import training_data
from sparse_dataflow.training.coordinates import (
    ACTIVATIONS,
    activation_changes,
    fit_exponents,
    with_width,
)
from sparse_dataflow.training.metrics import say
from sparse_dataflow.training.variants import Variant, variant

PARAMETRIZATIONS = ("standard", "supar")
_FLAT = "same everywhere"


def run(
    request: Request,
    widths: Sequence[int],
    densities: Sequence[float],
    steps: int,
    out: str,
) -> None:
    """Trains all, prints the exponents, draws and writes; see `experiments.coordinate_check`.

    Args:
      request: the model, the corpus and the learning rates.
      widths: values of d_model.
      densities: fractions of blocks stored.
      steps: steps of each training.
      out: folder to make.

    Raises:
      UserError: a width or density has no layout.
    """
    folder = Path(out)
    folders.refuse_foreign(folder, "coordinate_check")
    config, chip = benchmark.config_here(request)
    corpus = load_corpus(config.data.corpus, cache.FOLDER)
    size = config.model.vocab_size
    tokenizer = load_tokenizer(config.data.tokenizer, corpus, size, cache.FOLDER)
    models = {
        (parametrization, width, density): _variant(request, chip, parametrization, width, density)
        for parametrization in PARAMETRIZATIONS
        for width in sorted(widths)
        for density in sorted(densities)
    }
    # The batches have the same shape for all models.
    data = training_data(config, next(iter(models.values())), corpus, tokenizer)
    batches = [data.train[step]["tokens"] for step in range(steps)]
    rows = measure(models, batches)
    print(table(rows))
    result = {**measurement.provenance(chip.name), "changes": rows}
    folders.claim(folder, "coordinate_check")
    (folder / "coordinate_check.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, folder / "coordinate_check.png")
    print(f"figure: {folder / 'coordinate_check.png'}")


def measure(
    models: Mapping[tuple[str, int, float], Variant], batches: Sequence[np.ndarray]
) -> list[dict]:
    """A row {"parametrization", "width", "density", "activation", "changes"} for each training and
    activation; "changes" are root mean squares, one a step.

    Args:
      models: (parametrization, width, density) -> what is trained.
      batches: int32 [batch, sequence + 1] tokens of each step.
    """
    rows = []
    for (parametrization, width, density), model in models.items():
        changes = activation_changes(model.model, model.training, batches)
        say(f"{parametrization}, width {width}, density {density:g}")
        rows += [
            {"parametrization": parametrization, "width": width, "density": density,
             "activation": name, "changes": changes[name].tolist()}
            for name in ACTIVATIONS
        ]  # fmt: skip
    return rows


def _variant(request, chip, parametrization, width, density) -> Variant:
    """A sparse model of a width and density; under both parametrizations at the learning rates of
    SuPar, so that they differ only in the factors that the parametrization applies."""
    changes = {"model.parametrization": "supar", "sparsity.density": density}
    changed = dataclasses.replace(request, changes={**request.changes, **changes})
    config = changed.config(jax.default_backend(), chip.memory_bytes)
    sparse = variant(config, "sparse").with_steps(1)
    model = dataclasses.replace(sparse.model, parametrization=parametrization)
    return dataclasses.replace(sparse, model=with_width(model, width))


def exponents(rows: list[dict]) -> dict[tuple[str, str], tuple[float, float]]:
    """{(parametrization, activation): powers of width and density that its last change follows}."""
    found = {}
    for key in dict.fromkeys((r["parametrization"], r["activation"]) for r in rows):
        sizes = {
            (r["width"], r["density"]): r["changes"][-1]
            for r in rows
            if (r["parametrization"], r["activation"]) == key
        }
        found[key] = fit_exponents(sizes)
    return found


def table(rows: list[dict]) -> str:
    """The exponents, a Markdown row an activation and parametrization."""
    lines = ["| activation | parametrization | width | density |", "|---|---|---|---|"]
    for (parametrization, name), (width, density) in exponents(rows).items():
        lines.append(f"| {name} | {parametrization} | {width:+.2f} | {density:+.2f} |")
    return "\n".join(lines)


def draw(rows: list[dict], path: Path) -> None:
    """Last changes against width, a curve a density: a row of panels a parametrization.

    Each is divided by that of the narrowest model at the highest density, and all panels have one
    scale, so that what is right lies on the line at 1.
    """
    drawn = {}
    for parametrization in PARAMETRIZATIONS:
        for name in ACTIVATIONS:
            last = {
                (r["width"], r["density"]): r["changes"][-1]
                for r in rows
                if (r["parametrization"], r["activation"]) == (parametrization, name)
            }
            widths, densities = (sorted(set(axis)) for axis in zip(*last))
            first = last[widths[0], densities[-1]]
            curves = {_FLAT: Curve(widths, np.ones(len(widths)), marked=False, dashed=True)}
            for density in reversed(densities):
                sizes = [last[width, density] / first for width in widths]
                curves[f"density {density:g}"] = Curve(widths, sizes)
            drawn[parametrization, name] = curves
    everything = [y for curves in drawn.values() for curve in curves.values() for y in curve.y]
    limits = min(0.5, *everything) / 1.1, max(2.0, *everything) * 1.1
    save_panels(
        path,
        [
            Panel(
                f"{name}, {parametrization}",
                "width (d_model)",
                "size of the change, relative",
                curves,
                log_x=2,
                log_y=True,
                ticks=sorted({r["width"] for r in rows}),
                limits=limits,
            )
            for (parametrization, name), curves in drawn.items()
        ],
        f"Change of activations after {len(rows[0]['changes'])} steps, relative to the narrowest "
        "dense model: flat is right",
    )
