"""Measures the points of `experiments.growth`, and writes its table and figure."""

import json
import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.files import folders, json_files, output
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect as hardware

from ..studies import panels
from . import growth_sweeps
from .growth_sweeps import SWEEPS

FITTED = 3
"""Last points of a curve that its slope is fitted to; the first ones are mostly fixed costs."""

LEAST_SECONDS = 2e-3
LEAST_BYTES = 2**22
"""Smaller values are noise, and have no slope."""

POINTS, FIGURE = "points.jsonl", "growth.png"

Points = dict[str, list[dict[str, float]]]


def report_growth(options) -> None:
    """Measures what is missing, prints and writes; see `experiments.growth`.

    Raises:
      UserError: the folder holds files of others, or a damaged point.
    """
    folder = Path(options.out)
    folders.claim(folder, "growth", accept=lambda folder: (folder / POINTS).exists())
    path, machine = folder / POINTS, hardware.detect(["float32"]).name
    done = read(path)
    for name in options.sweeps:
        for size in SWEEPS[name].sizes:
            if (name, size) in done:
                continue
            point = _in_new_process(name, size)
            done[name, size] = point
            line = {"sweep": name, "of": size, **point, **measurement.provenance(machine)}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{name} {size:,}: {_words(point)}", flush=True)
    points = {
        name: [done[name, size] for size in SWEEPS[name].sizes if (name, size) in done]
        for name in SWEEPS
    }
    print(table(points))
    draw(points, folder / FIGURE)
    print(f"kept in {folder}")


def read(path: Path) -> dict[tuple[str, int], dict[str, float]]:
    """Returns (sweep, size) -> quantities of the points that are measured.

    Raises:
      UserError: a line is none of a point, such as the last one of a run that was killed.
    """
    if not path.exists():
        return {}
    done = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json_files.parse(line)
            numbers = {n: v for n, v in row.items() if isinstance(v, int | float) and n != "of"}
            done[row["sweep"], row["of"]] = numbers
        except json_files.MALFORMED as error:
            raise UserError(
                f"{path}, line {number}, is damaged ({error}); remove it, so that its point is "
                "measured again."
            ) from None
    return done


def _in_new_process(name, size):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(growth_sweeps.measured, (name, size))


def slope(sizes: panels.Values, values: panels.Values) -> float:
    """Returns the slope of the line through the logarithms of the last points."""
    x, y = (np.log(np.asarray(each[-FITTED:], float)) for each in (sizes, values))
    return float(np.polyfit(x, y, 1)[0])


def curves(points: Sequence[Mapping[str, float]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns quantity -> (sizes, values) of one sweep, of those that are more than noise."""
    result = {}
    for name in points[0] if points else ():
        least = LEAST_BYTES if name.endswith("bytes") else LEAST_SECONDS
        if name.endswith(("seconds", "bytes")):
            pairs = [(p["size"], p[name]) for p in points if p.get(name, 0) >= least]
            if len(pairs) > 1:
                x, y = map(np.asarray, zip(*pairs))
                result[name] = x, y
    return result


def table(points: Points) -> str:
    """Returns a table of the slopes."""
    rows = []
    for sweep, sweep_points in points.items():
        for name, (x, y) in curves(sweep_points).items():
            quantity, _, kind = name.rpartition(" ")
            first, last = (_value(kind, value) for value in (y[0], y[-1]))
            ends = f"{x[0]:,.0f} to {x[-1]:,.0f}"
            slope_text = f"{slope(x, y):.2f}"
            rows.append((SWEEPS[sweep].unit, ends, quantity, first, last, slope_text))
    return output.markdown(("what grows", "from, to", "quantity", "first", "last", "slope"), rows)


def draw(points: Points, path: Path) -> None:
    """Draws the curves of all sweeps, with both axes logarithmic."""
    shown = []
    for sweep, sweep_points in points.items():
        seconds = {
            f"{n.removesuffix(' seconds')} ({slope(x, y):.2f})": panels.Curve(x, y)
            for n, (x, y) in curves(sweep_points).items()
            if n.endswith("seconds")
        }
        if seconds:
            unit = SWEEPS[sweep].unit
            shown.append(panels.Panel(sweep, unit, "seconds", seconds, log_x=2, log_y=True))
    if shown:
        panels.save_panels(path, shown, "Processor seconds (slope)")


def _value(kind, value):
    if kind == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    return f"{value:.3g} s"


def _words(point):
    return ", ".join(
        f"{name.rpartition(' ')[0]} {_value(name.rpartition(' ')[2], value)}"
        for name, value in point.items()
        if name.endswith(("seconds", "bytes"))
    )
