"""The law, the tables and the picture of `experiments.block_cost`."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sparse_dataflow.files import console, output
from sparse_dataflow.pruning.groups import Groups

from ..panels import Curve, Panel, save_panels
from . import runs

NARROW = "narrow"
"""The rival of all shapes: a dense model with fewer heads and hidden features."""
LEAST = 1e-3
"""Least excess loss that a law is fitted to."""


@dataclasses.dataclass(frozen=True)
class Law:
    """Excess loss of a pruned model over the dense one, in bits a symbol.

    log2 excess = constants of TERMS, of log2 of the sides, the width and 1 / density.
    """

    constants: dict[str, float]

    def excess(self, sides: tuple[int, int], width: float, density: float) -> float:
        """Returns the excess loss of blocks of so many inputs and outputs."""
        terms = _terms(sides, width, density)
        return 2.0 ** sum(self.constants[name] * value for name, value in terms.items())


def _terms(sides, width, density):
    rows, columns, width, cut = (math.log2(v) for v in (*sides, width / 64, 1 / density))
    return {
        "1": 1.0,
        "rows": rows,
        "columns": columns,
        "rows squared": rows**2,
        "columns squared": columns**2,
        "rows x columns": rows * columns,
        "width": width,
        "density": cut,
        "density x sides": cut * (rows + columns),
        "width x sides": width * (rows + columns),
    }


def fit(cells: Sequence[dict]) -> Law | None:
    """Returns the law of least squared error of log2 excess, of rows of `cells`.

    None where the cells do not decide all constants.
    """
    terms = [_terms(_sides(c["shape"]), c["width"], c["density"]) for c in cells]
    matrix = np.array([list(each.values()) for each in terms])
    if not terms or np.linalg.matrix_rank(matrix) < len(terms[0]):
        return None
    wanted = np.log2([max(cell["excess"], LEAST) for cell in cells])
    constants = np.linalg.lstsq(matrix, wanted, rcond=None)[0]
    return Law(dict(zip(terms[0], constants.tolist())))


def _sides(shape):
    groups = Groups.parse(shape)
    return groups.rows, groups.cols


def place_of(line: dict) -> tuple:
    """Returns (width, shape, density, sample, recovery) of a run."""
    return *(line[n] for n in ("width", "shape", "density", "sample")), line.get("recovery", 0.0)


def mean_cells(lines: runs.Lines) -> list[dict]:
    """Returns a row for each width, shape, density and recovery: its mean excess over the dense
    model, which is not trained further."""
    cells: dict[tuple, list[dict]] = {}
    for line in lines:
        width, shape, density, _, recovery = place_of(line)
        cells.setdefault((width, shape, density, recovery), []).append(line)
    rows = []
    for (width, shape, density, recovery), each in sorted(cells.items()):
        excess = [line["loss"] - line["dense"] for line in each]
        rows.append(
            {
                "width": width, "shape": shape, "density": density, "recovery": recovery,
                "samples": len(each), "excess": float(np.mean(excess)),
                "spread": float(np.ptp(excess)), "dense": each[0]["dense"],
            }
        )  # fmt: skip
    rivals = {_place(row): row["excess"] for row in rows if row["shape"] == NARROW}
    for row in rows:
        rival = rivals.get(_place(row))
        row["to_narrow"] = None if rival is None else row["excess"] / rival
    return rows


def _place(row):
    """Returns what a row shares with its rival."""
    return row["width"], row["density"], row["recovery"]


def report(folder: Path, lines: runs.Lines, held_out: str) -> dict:
    """Writes block_cost.json, block_cost.md and block_cost.png; returns the content of the first.

    Args:
      held_out: shape that one of the laws does not see.
    """
    cells = mean_cells(lines)
    blocks = [cell for cell in cells if cell["shape"] != NARROW and not cell["recovery"]]
    largest = max(cell["width"] for cell in cells)
    rules = {
        f"width {largest}": lambda cell: cell["width"] == largest,
        f"shape {held_out}": lambda cell: cell["shape"] == held_out,
    }
    predictions = {}
    for name, is_hidden in rules.items():
        law = fit([cell for cell in blocks if not is_hidden(cell)])
        if law is None:
            continue
        predictions[name] = [
            {**cell, "predicted": law.excess(
                    _sides(cell["shape"]), cell["width"], cell["density"])}
            for cell in blocks if is_hidden(cell)
        ]  # fmt: skip
    law = fit(blocks)
    result = {
        "commands": sorted({line["command"] for line in lines}),
        "law": law and law.constants,
        "cells": cells,
        "held_out": predictions,
        "errors": {name: _errors(each) for name, each in predictions.items()},
    }
    (folder / "block_cost.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "block_cost.md").write_text(page(result))
    draw(cells, folder / "block_cost.png")
    print(page(result))
    return result


def _errors(predictions):
    """Returns the errors of predicted excess losses, over the narrow model's."""
    errors = [
        abs(cell["predicted"] - cell["excess"]) * cell["to_narrow"] / cell["excess"]
        for cell in predictions
        if cell["to_narrow"] is not None
    ]
    if not errors:
        return {}
    return {"median": float(np.median(errors)), "largest": float(np.max(errors))}


def page(result: dict) -> str:
    """Returns the tables, as Markdown."""
    cells = result["cells"]
    widths = sorted({cell["width"] for cell in cells})
    shapes = list(dict.fromkeys(cell["shape"] for cell in sorted(cells, key=_order)))
    parts = ["# What a block costs", "", "Commands:", ""]
    parts += [f"    {console.with_commands(each)}" for each in result["commands"]]
    for (density, recovery), each in _by_treatment(cells):
        by_place = {(cell["width"], cell["shape"]): cell for cell in each}
        for title, number in (
            ("excess loss over the dense model, bits a symbol", lambda c: f"{c['excess']:.3f}"),
            ("the same over the narrow model's", _to_narrow),
        ):
            parts += ["", f"## {_treatment(density, recovery)}: {title}", ""]
            rows = [
                (shape, *(
                    number(by_place[width, shape]) if (width, shape) in by_place else "-"
                    for width in widths
                ))
                for shape in shapes if any(cell["shape"] == shape for cell in each)
            ]  # fmt: skip
            parts.append(output.markdown(("what stays", *map(str, widths)), rows))
    parts += [
        "",
        "## Errors of the law in what it has not seen, over the narrow model's excess",
        "",
    ]
    rows = [
        (name, f"{each['median']:.0%}", f"{each['largest']:.0%}")
        for name, each in result["errors"].items()
        if each
    ]
    parts.append(output.markdown(("not seen", "median error", "largest error"), rows))
    return "\n".join(parts) + "\n"


def _by_treatment(cells):
    """Returns [((density, recovery), cells)], before any recovery and from the highest density."""
    treatments: dict[tuple[float, float], list[dict]] = {}
    for cell in cells:
        treatments.setdefault((cell["density"], cell["recovery"]), []).append(cell)
    return sorted(treatments.items(), key=lambda item: (item[0][1], -item[0][0]))


def _treatment(density, recovery):
    return f"density {density:g}" + (f", recovery {recovery:.0%}" if recovery else "")


def _to_narrow(cell):
    return "-" if cell["to_narrow"] is None else f"{cell['to_narrow']:.2f}"


def _order(cell):
    """Returns the key that sorts shapes: the narrow model, then rows, then squares."""
    if cell["shape"] == NARROW:
        return (0, 0)
    rows, columns = _sides(cell["shape"])
    return (1 + (rows == columns and rows > 1), columns)


def draw(cells: Sequence[dict], path: Path) -> None:
    """Draws the cost of shapes over that of the narrow model, against at least two widths."""
    panels = []
    for treatment, each in _by_treatment(cells):
        curves: dict[str, Curve] = {}
        for shape in dict.fromkeys(cell["shape"] for cell in sorted(each, key=_order)):
            points = [
                (cell["width"], cell["to_narrow"])
                for cell in each
                if cell["shape"] == shape and cell["to_narrow"] is not None
            ]
            if len(points) > 1:
                x, y = map(list, zip(*points))
                curves[shape] = Curve(x, y)
        if curves:
            title = _treatment(*treatment)
            panels.append(Panel(title, "width", "excess loss over the narrow model's", curves))
    if panels:
        save_panels(path, panels)
