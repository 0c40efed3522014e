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
"""Least cost that a law is fitted to."""
DRAWN = (NARROW, "1", "1x4", "1x16", "1x64", "2", "4", "8", "16")
"""Shapes in the picture, which has ten colours."""


@dataclasses.dataclass(frozen=True)
class Law:
    """The cost of blocks: the excess loss of a pruned model over that of the narrow model.

    log2 cost = constants of `_terms`.  It falls with the width towards a floor.
    """

    constants: dict[str, float]

    def cost(self, sides: tuple[int, int], width: float, density: float) -> float:
        """Returns the cost of blocks of so many inputs and outputs; below 1 they win.

        Args:
          width: d_model; infinity gives the floor.
        """
        terms = _terms(sides, width, density)
        return 2.0 ** sum(self.constants[name] * value for name, value in terms.items())

    def width(self, sides: tuple[int, int], density: float) -> float | None:
        """Returns the width from which blocks win; None if none, or if they win at any."""
        floor, small = (math.log2(self.cost(sides, width, density)) for width in (math.inf, 64))
        return 64 * (small - floor) / -floor if floor < 0 and small > floor else None

    def floor(self, sides: tuple[int, int], density: float) -> float:
        """Returns the cost that no width falls below."""
        return self.cost(sides, math.inf, density)


def _terms(sides, width, density):
    # The first doublings of a block's weights cost most; their shape does not matter.
    size = math.log2(1 + math.log2(math.prod(sides)))
    narrowness, cut = 64 / width, math.log2(1 / density)
    return {
        "1": 1.0,
        "size": size,
        "size squared": size**2,
        "narrowness": narrowness,
        "narrowness x size": narrowness * size,
        "density": cut,
        "density x size": cut * size,
        "density x narrowness x size": cut * narrowness * size,
    }


def fit(cells: Sequence[dict]) -> Law | None:
    """Returns the law of least squared error of log2 cost, of rows of `mean_cells`.

    None where the cells do not decide all constants.
    """
    terms = [_terms(_sides(c["shape"]), c["width"], c["density"]) for c in cells]
    matrix = np.array([list(each.values()) for each in terms])
    if not terms or np.linalg.matrix_rank(matrix) < len(terms[0]):
        return None
    targets = np.log2([max(cell["to_narrow"], LEAST) for cell in cells])
    constants = np.linalg.lstsq(matrix, targets, rcond=None)[0]
    return Law(dict(zip(terms[0], constants.tolist())))


def _sides(shape):
    groups = Groups.parse(shape)
    return groups.rows, groups.cols


def place_of(line: dict) -> tuple:
    """Returns (width, shape, density, sample, recovery, rounds) of a run."""
    place = tuple(line[name] for name in ("width", "shape", "density", "sample"))
    return *place, line.get("recovery", 0.0), line.get("rounds", 1)


def mean_cells(lines: runs.Lines) -> list[dict]:
    """Returns a row for each width, shape, density, recovery and rounds: its mean excess over the
    dense model, which is not trained further."""
    cells: dict[tuple, list[dict]] = {}
    for line in lines:
        width, shape, density, _, recovery, rounds = place_of(line)
        cells.setdefault((width, shape, density, recovery, rounds), []).append(line)
    rows = []
    for (width, shape, density, recovery, rounds), each in sorted(cells.items()):
        excess = [line["loss"] - line["dense"] for line in each]
        rows.append(
            {
                "width": width, "shape": shape, "density": density, "recovery": recovery,
                "rounds": rounds, "samples": len(each), "excess": float(np.mean(excess)),
                "spread": float(np.ptp(excess)) if len(excess) > 1 else None,
                "dense": each[0]["dense"],
            }
        )  # fmt: skip
    rivals = {_place(row): row["excess"] for row in rows if row["shape"] == NARROW}
    for row in rows:
        rival = rivals.get(_place(row))
        row["to_narrow"] = None if rival is None else row["excess"] / rival
    return rows


def _place(row):
    """Returns what a row shares with its rival."""
    return row["width"], row["density"], row["recovery"], row["rounds"]


def report(folder: Path, lines: runs.Lines, held_out: str) -> dict:
    """Writes block_cost.json, block_cost.md and block_cost.png; returns the content of the first.

    Args:
      held_out: shape that one of the laws does not see.
    """
    cells = mean_cells(lines)
    blocks = [
        cell for cell in cells
        if cell["shape"] != NARROW and cell["to_narrow"] is not None
        and not cell["recovery"] and cell["rounds"] == 1
    ]  # fmt: skip
    largest = max(cell["width"] for cell in cells)
    rules = {
        f"width {largest}": lambda cell: cell["width"] == largest,
        f"shape {held_out}": lambda cell: cell["shape"] == held_out,
    }
    predictions = {}
    for name, is_hidden in rules.items():
        law = fit([cell for cell in blocks if not is_hidden(cell)])
        hidden = [cell for cell in blocks if is_hidden(cell)]
        if law is not None and hidden:
            predictions[name] = [{**cell, "predicted": _cost(law, cell)} for cell in hidden]
    law = fit(blocks)
    result = {
        "commands": sorted({line["command"] for line in lines}),
        "law": law and law.constants,
        "wins_from_width": law and _by_shape(law.width, blocks),
        "floor": law and _by_shape(law.floor, blocks),
        "cells": cells,
        "held_out": predictions,
        "errors": {name: _errors(each) for name, each in predictions.items()},
    }
    (folder / "block_cost.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "block_cost.md").write_text(page(result))
    draw(cells, folder / "block_cost.png")
    print(page(result))
    return result


def _cost(law, cell):
    """Returns the cost that a law predicts for a cell."""
    return law.cost(_sides(cell["shape"]), cell["width"], cell["density"])


def _by_shape(value, cells):
    """Returns density -> shape -> what a law says of the shape's (sides, density)."""
    values: dict[str, dict[str, float | None]] = {}
    for cell in sorted(cells, key=lambda cell: (-cell["density"], _order(cell))):
        each = value(_sides(cell["shape"]), cell["density"])
        values.setdefault(f"{cell['density']:g}", {})[cell["shape"]] = each
    return values


def _errors(predictions):
    """Returns the errors of predicted costs, which are parts of the narrow model's excess loss."""
    errors = [abs(cell["predicted"] - cell["to_narrow"]) for cell in predictions]
    return {"median": float(np.median(errors)), "largest": float(np.max(errors))}


def page(result: dict) -> str:
    """Returns the tables, as Markdown."""
    cells = result["cells"]
    widths = sorted({cell["width"] for cell in cells})
    shapes = list(dict.fromkeys(cell["shape"] for cell in sorted(cells, key=_order)))
    text = ["# What a block costs", "", "Commands:", ""]
    text += [f"    {console.with_commands(each)}" for each in result["commands"]]
    for treatment, each in _by_treatment(cells):
        by_place = {(cell["width"], cell["shape"]): cell for cell in each}
        for title, number in (
            ("excess loss over the dense model, bits a symbol", lambda c: f"{c['excess']:.3f}"),
            ("the same over the narrow model's", _to_narrow),
        ):
            text += ["", f"## {_treatment(*treatment)}: {title}", ""]
            rows = [
                (shape, *(
                    number(by_place[width, shape]) if (width, shape) in by_place else "-"
                    for width in widths
                ))
                for shape in shapes if any(cell["shape"] == shape for cell in each)
            ]  # fmt: skip
            text.append(output.markdown(("what stays", *map(str, widths)), rows))
    text += ["", "## The law", ""]
    if result["law"] is None:
        return (
            "\n".join([*text, "The cells do not decide it: measure more widths or shapes."]) + "\n"
        )
    rows = [
        (name, f"{each['median']:.0%}", f"{each['largest']:.0%}")
        for name, each in result["errors"].items()
    ]
    text += ["Errors in what it has not seen, over the narrow model's excess loss:", ""]
    text.append(output.markdown(("not seen", "median error", "largest error"), rows))
    text += ["", "Width from which a shape beats the narrow model, and its cost in a wide one:", ""]
    places, floors = result["wins_from_width"], result["floor"]
    rows = [
        (shape, *(
            cell for density in places
            for cell in (_width(places[density].get(shape)), _number(floors[density].get(shape)))
        ))
        for shape in shapes if shape != NARROW
    ]  # fmt: skip
    headers = [f"density {density}{of}" for density in places for of in ("", ", at least")]
    text.append(output.markdown(("what stays", *headers), rows))
    return "\n".join(text) + "\n"


def _width(width):
    return "-" if width is None or not 1 <= width < 1e5 else f"{width:.0f}"


def _number(value):
    return "-" if value is None else f"{value:.2f}"


def _by_treatment(cells):
    """Returns [((rounds, recovery, density), cells)], one round and no recovery first."""
    treatments: dict[tuple[int, float, float], list[dict]] = {}
    for cell in cells:
        place = cell["rounds"], cell["recovery"], cell["density"]
        treatments.setdefault(place, []).append(cell)
    return sorted(treatments.items(), key=lambda item: (*item[0][:2], -item[0][2]))


def _treatment(rounds, recovery, density):
    text = f"density {density:g}" + (f", recovery {recovery:.0%}" if recovery else "")
    return text + (f", {rounds} rounds" if rounds > 1 else "")


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
        for shape in DRAWN:
            points = [
                (cell["width"], cell["to_narrow"])
                for cell in each
                if cell["shape"] == shape and cell["to_narrow"] is not None
            ]
            if len(points) > 1:
                x, y = map(list, zip(*points))
                rival = shape == NARROW
                curves[shape] = Curve(x, y, marked=not rival, dashed=rival)
        if len(curves) > 1:
            widths = sorted({cell["width"] for cell in each})
            label = "excess loss over the narrow model's"
            panels.append(Panel(_treatment(*treatment), "width", label, curves, 2, True, widths))
    if panels:
        save_panels(path, panels)
