"""Result file, tables and picture of a study of structure, finished or not."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparse_dataflow.commands import measurement
from sparse_dataflow.core.training import cost
from sparse_dataflow.evaluation.significance import paired_difference
from sparse_dataflow.files import output
from sparse_dataflow.runs.equal_cost import stored_parameters

from ..engine import Results
from ..panels import Curve, Panel, save_panels
from ..time_to_quality import bits_per_byte
from .search import MEASURE, Cell, Search, words

NAME = "structure_search"
_TRIAL_COLUMNS = ("arm", "trials", "best of each rung", "best model", "rate")
_COLUMNS = (
    "arm", "held-out bits per byte", "seeds", "to the rival, 95% interval", "tokens a weight",
    "stored MB", "seconds a step", "seconds of training",
)  # fmt: skip
_NONE = "-"


def write(search: Search, results: Results, folder: Path, machine: str) -> str:
    """Writes structure_search.json, .md and .png; returns the text."""
    cells = [summary(search, cell, results) for cell in search.cells]
    for each in cells:
        each["to_rival"] = _to_rival(each, cells, search.design.rival)
    finished = sum(each["trained"] for each in cells)
    content = {
        "unfinished": finished < search.total(),
        "trained": finished,
        "planned": search.total(),
        "design": dataclasses.asdict(search.design),
        "settings": search.base.config.to_json(),
        "cells": cells,
    }
    measurement.keep(str(folder), NAME, machine, [content])
    text = page(cells, content)
    (folder / f"{NAME}.md").write_text(text)
    if any(each["rungs"] for each in cells):
        save_panels(folder / f"{NAME}.png", _panels(cells, search.design.rival))
    return text


def summary(search: Search, cell: Cell, results: Mapping[str, dict]) -> dict[str, Any]:
    """Returns what is known of an arm with an optimizer at a budget."""
    stages = [search.stage(cell, n, results) for n in range(len(search.design.trials) + 2)]
    names = {search.name(trial): trial for stage in stages for trial in stage}
    done = {name: trial for name, trial in names.items() if name in results}
    rungs = []
    for stage, share in zip(stages, search.design.shares):
        bits = {t: bits_per_byte(results[search.name(t)]) for t in stage if search.name(t) in done}
        if bits:
            lowest = min(bits, key=bits.__getitem__)
            flops = share * search.design.budgets[cell.budget]
            rung = {"flops": flops, "trials": len(bits), "bits_per_byte": _finite(bits[lowest])}
            losses = [_finite(each) for each in bits.values()]
            rungs.append({**rung, "all": losses, "model": dict(lowest.model)})
    tuned = [t for t in done.values() if t.role != MEASURE and t.share == 1]
    best = min(tuned, key=lambda t: bits_per_byte(results[search.name(t)]), default=None)
    measured = {t.seed: results[n] for n, t in done.items() if t.role == MEASURE}
    model = search.variant(best).model if best else None
    return {
        **dataclasses.asdict(cell),
        "trained": len(done),
        "rungs": rungs,
        "best": words(best.model) if best else None,
        "rate": search.changes(best)["training.learning_rate"] if best else None,
        "by_seed": {str(seed): result["bits_per_byte"] for seed, result in measured.items()},
        "bits_per_byte": _mean(measured),
        "stored_weights": stored_parameters(model) if model else None,
        "stored_bytes": 4 * cost.parameter_count(model) if model else None,
        "tokens": next((r["tokens"] for r in measured.values()), None),
        "flops": next((r["flops"] for r in measured.values()), None),
        "step_seconds": min(
            (r.get("step_seconds", math.inf) for r in measured.values()), default=None
        ),
        "seconds": min((r["seconds"] for r in measured.values()), default=None),
    }


def _finite(bits):
    return bits if math.isfinite(bits) else None


def _mean(measured):
    bits = [bits_per_byte(result) for result in measured.values()]
    return _finite(sum(bits) / len(bits)) if bits else None


def _to_rival(cell, cells, rival):
    """Returns the paired difference to the rival's bits per byte, relative to them; None for the
    rival and without two seeds of both."""
    key = cell["budget"], cell["optimizer"]
    other = next(c for c in cells if (c["budget"], c["optimizer"], c["arm"]) == (*key, rival))
    seeds = [seed for seed in cell["by_seed"] if seed in other["by_seed"]]
    bits, rival_bits = ([each["by_seed"][seed] for seed in seeds] for each in (cell, other))
    if cell is other or len(seeds) < 2 or None in (*bits, *rival_bits):
        return None
    difference = paired_difference(bits, rival_bits, seeds)
    mean = sum(rival_bits) / len(seeds)
    names = ("difference", "low", "high")
    return {name: getattr(difference, name) / mean for name in names}


def page(cells: list[dict], content: Mapping[str, Any]) -> str:
    """Returns the tables of a study as Markdown."""
    parts = []
    if content["unfinished"]:
        parts.append(
            f"Unfinished: {content['trained']} of {content['planned']} trainings. An arm without a "
            "held-out loss is still searched."
        )
    for key in dict.fromkeys((cell["budget"], cell["optimizer"]) for cell in cells):
        group = [cell for cell in cells if (cell["budget"], cell["optimizer"]) == key]
        if not any(cell["rungs"] for cell in group):
            continue
        flops = content["design"]["budgets"][key[0]]
        parts.append(f"## {key[0]}, {key[1]}: {flops:.3g} training FLOPs")
        rows = [
            (
                cell["arm"],
                sum(rung["trials"] for rung in cell["rungs"]),
                ", ".join(_bits(rung["bits_per_byte"]) for rung in cell["rungs"]) or _NONE,
                cell["best"] or _NONE,
                _NONE if cell["rate"] is None else f"{cell['rate']:.3g}",
            )
            for cell in group
        ]
        parts.append(output.markdown(_TRIAL_COLUMNS, rows))
        rows = [_row(cell) for cell in group if cell["by_seed"]]
        if rows:
            parts.append(output.markdown(_COLUMNS, rows))
    return "\n\n".join(parts) + "\n"


def _bits(bits):
    return "diverged" if bits is None else f"{bits:.4f}"


def _row(cell):
    difference = cell["to_rival"]
    text = _NONE
    if difference:
        text = "{difference:+.2%} ({low:+.2%} to {high:+.2%})".format(**difference)
    return (
        cell["arm"],
        _bits(cell["bits_per_byte"]),
        len(cell["by_seed"]),
        text,
        f"{cell['tokens'] / cell['stored_weights']:.0f}",
        f"{cell['stored_bytes'] / 1e6:.2f}",
        f"{cell['step_seconds']:.3f}",
        f"{cell['seconds']:.0f}",
    )


def _panels(cells, rival):
    """Returns for each budget and optimizer the best trial of each rung, and the measured loss over
    stored bytes and over seconds."""
    panels = []
    for key in dict.fromkeys((cell["budget"], cell["optimizer"]) for cell in cells):
        group = [c for c in cells if (c["budget"], c["optimizer"]) == key and c["rungs"]]
        if not group:
            continue
        title = f"{key[0]}, {key[1]}"
        rungs = {
            c["arm"]: Curve(
                [r["flops"] for r in c["rungs"]],
                [r["bits_per_byte"] or math.nan for r in c["rungs"]],
                dashed=c["arm"] == rival,
            )
            for c in group
        }
        label = "bits per byte"
        panels.append(Panel(f"{title}: best trial", "training FLOPs", label, rungs, log_x=10))
        measured = [c for c in group if c["bits_per_byte"] is not None]
        for name, x_label in (("stored_bytes", "stored MB"), ("seconds", "seconds of training")):
            scale = 1e-6 if name == "stored_bytes" else 1.0
            points = {
                c["arm"]: Curve(
                    [scale * c[name]],
                    [c["bits_per_byte"]],
                    [min(b for b in c["by_seed"].values() if b)],
                    [max(b for b in c["by_seed"].values() if b)],
                    bars=True,
                )
                for c in measured
            }
            if points:
                panels.append(Panel(f"{title}: measured", x_label, f"held-out {label}", points))
    return panels
