"""The trainings of coordinate_check, their table and their figure."""

import dataclasses
from pathlib import Path

import numpy as np

from experiments import study
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.reporting.panels import Curve, Panel, save_panels
from sparse_dataflow.training.coordinates import (
    ACTIVATIONS,
    activation_changes,
    fit_exponents,
    with_width,
)
from sparse_dataflow.training.metrics import say

PARAMETRIZATIONS = ("standard", "supar")
_FLAT = "same everywhere"


def numbers(text: str, flag: str, kind: type = float) -> list:
    """The numbers of a comma list, ascending, each once.

    Raises:
      UserError: one is no number above 0.
    """
    try:
        found = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] <= 0:
        raise UserError(f"--{flag}={text} is not legal: it must be numbers above 0, as in 1,2,4.")
    return found


def measure(values, begun: study.Study) -> list[dict]:
    """A row {"parametrization", "width", "density", "activation", "changes"} for each training and
    activation; "changes" are root mean squares, one a step.

    Raises:
      UserError: a width or density that no layout serves.
    """
    widths = numbers(values.widths, "widths", int)
    densities = numbers(values.densities, "densities")
    trained = {
        (parametrization, width, density): _variant(begun, parametrization, width, density)
        for parametrization in PARAMETRIZATIONS
        for width in widths
        for density in densities
    }
    data = begun.data(next(iter(trained.values())))  # Of one shape for all.
    batches = [data.train[step]["tokens"] for step in range(values.steps)]
    rows = []
    for (parametrization, width, density), variant in trained.items():
        changes = activation_changes(variant.model, variant.training, batches)
        say(f"{parametrization}, width {width}, density {density:g}")
        rows += [
            {"parametrization": parametrization, "width": width, "density": density,
             "activation": name, "changes": changes[name].tolist()}
            for name in ACTIVATIONS
        ]  # fmt: skip
    return rows


def _variant(begun, parametrization, width, density):
    """Under both, the rates are SuPar's: what the parametrization multiplies them by is all that
    differs."""
    asked = begun.variant("sparse", parametrization="supar", density=density, warmup=0.0)
    model = dataclasses.replace(asked.model, parametrization=parametrization)
    return dataclasses.replace(asked, model=with_width(model, width))


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
