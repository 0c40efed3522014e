"""The trainings of coordinate_check, their table and their figure."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.commands.request import Request
from sparse_dataflow.commands.training_data import corpus_of, tokenizer_of, training_data
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.files import folders, output
from sparse_dataflow.runs.variants import variant

from ..studies.activation_changes import ACTIVATIONS, activation_changes, fit_exponents, with_width
from ..studies.panels import Curve, Panel, save_panels
from . import benchmark

PARAMETRIZATIONS = ("standard", "supar")
_FLAT = "same everywhere"


def check_coordinates(request: Request, options) -> None:
    """Trains all, prints the exponents, draws and writes; see `experiments.coordinate_check`.

    Raises:
      UserError: a width or density has no layout.
    """
    folder = Path(options.out)
    folders.refuse_foreign(folder, "coordinate_check")
    config, chip = benchmark.config_here(request)
    corpus = corpus_of(config.data)
    tokenizer = tokenizer_of(config, corpus)
    models = {
        place: _variant(request, chip, *place)
        for place in itertools.product(
            PARAMETRIZATIONS, sorted(options.widths), sorted(options.densities)
        )
    }
    # The batches have the same shape for all models.
    data = training_data(config, next(iter(models.values())), corpus, tokenizer)
    batches = [data.train[step] for step in range(options.steps)]
    rows = []
    for (parametrization, width, density), model in models.items():
        changes = activation_changes(model.model, model.training, batches)
        say(f"{parametrization}, width {width}, density {density:g}")
        place = {"parametrization": parametrization, "width": width, "density": density}
        rows += [
            {**place, "activation": name, "changes": changes[name].tolist()} for name in ACTIVATIONS
        ]
    last_changes: dict[tuple[str, str], dict[tuple[int, float], float]] = {}
    for row in rows:
        sizes = last_changes.setdefault((row["parametrization"], row["activation"]), {})
        sizes[row["width"], row["density"]] = row["changes"][-1]
    exponents = (
        (name, parametrization, *(f"{power:+.2f}" for power in fit_exponents(sizes)))
        for (parametrization, name), sizes in last_changes.items()
    )
    print(output.markdown(("activation", "parametrization", "width", "density"), exponents))
    folders.claim(folder, "coordinate_check")
    result = {**measurement.provenance(chip.name), "changes": rows}
    (folder / "coordinate_check.json").write_text(json.dumps(result, indent=1) + "\n")
    _draw(last_changes, options.steps, folder / "coordinate_check.png")
    print(f"figure: {folder / 'coordinate_check.png'}")


def _variant(request, chip, parametrization, width, density) -> Variant:
    """A sparse model of a width and density; under both parametrizations at the learning rates of
    SuPar, so that they differ only in the factors that the parametrization applies."""
    changes = {"model.parametrization": "supar", "sparsity.density": density}
    changed = dataclasses.replace(request, changes={**request.changes, **changes})
    config = changed.config(jax.default_backend(), chip.memory_bytes)
    sparse = variant(config, "sparse").with_steps(1)
    model = dataclasses.replace(sparse.model, parametrization=parametrization)
    return dataclasses.replace(sparse, model=with_width(model, width))


def _draw(last_changes, steps, path):
    """Last changes against width, a curve for each density: a row of panels per parametrization.

    Each is divided by that of the narrowest model at the highest density. All panels have one
    scale, so a correct curve lies on the line at 1.
    """
    curves_of = {}
    for place, sizes in last_changes.items():
        widths, densities = (sorted(set(axis)) for axis in zip(*sizes))
        first = sizes[widths[0], densities[-1]]
        curves = {_FLAT: Curve(widths, np.ones(len(widths)), marked=False, dashed=True)}
        for density in reversed(densities):
            relative = [sizes[width, density] / first for width in widths]
            curves[f"density {density:g}"] = Curve(widths, relative)
        curves_of[place] = curves
    everything = [y for curves in curves_of.values() for curve in curves.values() for y in curve.y]
    limits = min(0.5, *everything) / 1.1, max(2.0, *everything) * 1.1
    panels = [
        Panel(
            f"{name}, {parametrization}",
            "width (d_model)",
            "size of the change, relative",
            curves,
            log_x=2,
            log_y=True,
            ticks=widths,
            limits=limits,
        )
        for (parametrization, name), curves in curves_of.items()
    ]
    title = f"Change of activations after {steps} steps, relative to the narrowest dense model"
    save_panels(path, panels, f"{title}: flat is right")
