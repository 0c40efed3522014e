"""Tables, result file and figure of the study."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.training import cost
from sparse_dataflow.evaluation.significance import paired_difference
from sparse_dataflow.files import console, output
from sparse_dataflow.planner.decoding import decoding_bytes
from sparse_dataflow.runs.equal_cost import stored_parameters

from .. import panels
from . import arms, cost_picture, law, runs
from .runs import Cell, Lines

NAME, NARROW, NONE = "serving_cost", "narrow", "-"
DRAWN = 6
"""Arms of the figure, at most: the first ones with two lengths or more, if any has."""


def write(
    options, narrow: ModelConfig, corpus, lines: Lines, decoded: Sequence[Mapping], folder: Path
) -> None:
    """Writes serving_cost.json, serving_cost.md and both figures of all runs of a folder.

    Args:
      options: of the experiment.
      narrow: the narrow dense model.
      corpus: the text.
      lines: all runs.
      decoded: from `decoding.measure`; empty without a measurement.
      folder: of the study.
    """
    cells = dict.fromkeys(
        Cell(*(line[field.name] for field in dataclasses.fields(Cell))) for line in lines
    )
    rows = [row(narrow, cell, lines) for cell in cells]
    rows.sort(
        key=lambda r: (r["optimizer"], r["schedule"], r["length"], list(arms.ARMS).index(r["arm"]))
    )
    laws = [
        fitted(narrow, rows, optimizer) for optimizer in dict.fromkeys(r["optimizer"] for r in rows)
    ]
    served = _served(narrow, [r["arm"] for r in rows])
    result = {
        "narrow": dataclasses.asdict(narrow),
        "text": {
            "corpus": options.corpus,
            "content_hash": corpus.content_hash,
            "symbols": corpus.symbols,
            "bytes": {name: len(ids) for name, ids in corpus.splits.items()},
        },
        "commands": sorted({line["command"] for line in lines}),
        "dates": [min(line["date"] for line in lines), max(line["date"] for line in lines)],
        "machines": sorted({line["machine"] for line in lines}),
        "versions": lines[-1]["versions"],
        "commits": sorted({line["commit"] for line in lines}),
        "rows": rows,
        "served": served,
        "laws": [each for each in laws if each],
    }
    (folder / f"{NAME}.json").write_text(json.dumps(result, indent=1) + "\n")
    text = page(result)
    (folder / f"{NAME}.md").write_text(text)
    print(text)
    draw(rows, folder / f"{NAME}.png")
    cost_picture.draw(narrow, rows, decoded, folder / f"{NAME}_picture.png")


def row(narrow: ModelConfig, cell: Cell, lines: Lines) -> dict[str, Any]:
    """Returns the summary of a cell: its costs, and its losses by seed and to the narrow model."""
    measured = runs.measured(lines, cell)
    rival = runs.measured(lines, dataclasses.replace(cell, arm=NARROW))
    losses = {seed: line["held_out"] for seed, line in sorted(measured.items())}
    seeds = [seed for seed in losses if seed in rival]
    one = next(iter(measured.values()))
    trials = {
        line["multiplier"]: line["tuning"]
        for line in runs.cell_lines(lines, cell)
        if line["seed"] == 0
    }
    summary = {
        **dataclasses.asdict(cell),
        "multiplier": one["multiplier"],
        "trials": dict(sorted(trials.items())),
        "losses": losses,
        "mean": float(np.mean(list(losses.values()))),
        "to_narrow": None,
        **{
            name: one[name]
            for name in (
                "steps",
                "tokens",
                "flops",
                "mean_weights",
                "served_flops",
                "stored_weights",
            )
        },
        "seconds": float(np.median([line["seconds"] for line in measured.values()])),
    }
    if cell.arm != NARROW and seeds:
        mean = float(np.mean([rival[seed]["held_out"] for seed in seeds]))
        difference = paired_difference(
            [losses[seed] for seed in seeds], [rival[seed]["held_out"] for seed in seeds], seeds
        )
        summary["to_narrow"] = {
            "seeds": len(seeds),
            "percent": 100 * difference.difference / mean,
            "low": None if difference.low is None else 100 * difference.low / mean,
            "high": None if difference.high is None else 100 * difference.high / mean,
        }
    return summary


def fitted(
    narrow: ModelConfig, rows: Sequence[Mapping], optimizer: str
) -> dict[str, object] | None:
    """Returns the law of the dense models, and its errors with other runs.

    It is fitted to dense models alone, then predicts pruned ones by their mean weights (as in arXiv
    2501.12486) or by those that are served.  The last length is held out: a second fit without it
    predicts it.  None with too few runs.
    """
    chosen = [r for r in rows if r["optimizer"] == optimizer and r["schedule"] == "linear"]
    chosen = [r for r in chosen if not arms.ARMS[r["arm"]].experts]
    longest = max((r["length"] for r in chosen), default=0)
    dense = [r for r in chosen if not arms.ARMS[r["arm"]].pruned]
    result: dict[str, object] = {"optimizer": optimizer, "held_out_length": longest}
    for name in ("mean_weights", "stored_weights"):

        def law_of(cells, name=name):
            return law.fit(*zip(*((r[name], r["tokens"], r["mean"]) for r in cells)))

        def percent(fit, cells, name=name):
            errors = law.errors(fit, *zip(*((r[name], r["tokens"], r["mean"]) for r in cells)))
            names = (f"{r['arm']} {r['length']}" for r in cells)
            return dict(zip(names, (100 * errors).tolist()))

        try:
            full_law, short_law = law_of(dense), law_of([r for r in dense if r["length"] < longest])
        except (ValueError, TypeError):
            return None
        result[name] = {
            "law": dataclasses.asdict(full_law),
            "dense_cells": len(dense),
            "percent": percent(full_law, chosen),
            "held_out_percent": percent(short_law, [r for r in chosen if r["length"] == longest]),
        }
    return result


def _served(narrow, names):
    """Returns what each arm costs to serve: FLOPs and bytes of a token, weights, widths."""
    result = {}
    for name in dict.fromkeys(names):
        model = arms.served_model(narrow, arms.ARMS[name])
        sections = cost.flops_per_token(model, model.max_len, training=False)
        result[name] = {
            "d_model": model.d_model,
            "d_ff": model.d_ff,
            "density": arms.served_density(narrow, arms.ARMS[name]),
            "flops": sections.total,
            "projection_share": sections.projection_share,
            "stored_weights": stored_parameters(model),
            "bytes_a_token_batch_1": decoding_bytes(model, 1, model.max_len),
            "bytes_a_token_batch_8": decoding_bytes(model, 8, model.max_len) / 8,
        }
    return result


def page(result: Mapping) -> str:
    """Returns the Markdown tables of the result file."""
    parts = ["# Equal served and training FLOPs", "Commands:", ""]
    parts += [f"    {console.with_commands(command)}" for command in result["commands"]]
    served = output.markdown(
        (
            "arm", "d_model", "d_ff", "density", "served FLOPs", "in projections",
            "stored weights", "bytes, batch 1",
        ),
        [
            (
                name, s["d_model"], s["d_ff"], f"{s['density']:.3f}", f"{s['flops']:.0f}",
                f"{s['projection_share']:.1%}", s["stored_weights"],
                f"{s['bytes_a_token_batch_1']:.0f}",
            )
            for name, s in result["served"].items()
        ],
    )  # fmt: skip
    parts += ["", "## Served models", "", served]
    keys = dict.fromkeys((r["optimizer"], r["schedule"], r["length"]) for r in result["rows"])
    for optimizer, schedule, length in keys:
        chosen = [
            r
            for r in result["rows"]
            if (r["optimizer"], r["schedule"], r["length"]) == (optimizer, schedule, length)
        ]
        table = output.markdown(
            (
                "arm", "bits a symbol", "seeds", "to narrow, 95% interval", "rate", "steps",
                "mean weights",
            ),
            [
                (
                    r["arm"], f"{r['mean']:.4f}", len(r["losses"]), difference_text(r),
                    _rate(r), r["steps"], f"{r['mean_weights']:.0f}",
                )
                for r in chosen
            ],
        )  # fmt: skip
        flops = chosen[0]["flops"]
        parts += [
            "",
            f"## {optimizer}, {schedule}, {length} tokens a weight, {flops:.3g} FLOPs",
            "",
            table,
        ]
    for fit in result["laws"]:
        parts += ["", f"## Law, {fit['optimizer']}", ""]
        for name in ("mean_weights", "stored_weights"):
            each = fit[name]
            constants = ", ".join(f"{k} {v:.4g}" for k, v in each["law"].items())
            errors = np.abs(list(each["held_out_percent"].values()))
            parts += [
                f"By {name.replace('_', ' ')}, fitted to {each['dense_cells']} dense cells: "
                f"{constants}. Fitted without length {fit['held_out_length']}, it predicts that "
                f"with a median error of {np.median(errors):.2f}%, largest {errors.max():.2f}%.",
                "",
                output.markdown(
                    ("cell", "predicted over measured", "held out"),
                    [
                        (cell, f"{error:+.2f}%", _signed(each["held_out_percent"].get(cell)))
                        for cell, error in each["percent"].items()
                    ],
                ),
                "",
            ]
    return "\n".join(parts) + "\n"


def _signed(percent):
    return NONE if percent is None else f"{percent:+.2f}%"


def difference_text(summary: Mapping) -> str:
    """Returns the difference to the narrow model in percent, with its interval."""
    difference = summary["to_narrow"]
    if not difference:
        return NONE
    text = f"{difference['percent']:+.2f}%"
    if difference["low"] is not None:
        text += f" ({difference['low']:+.2f}% to {difference['high']:+.2f}%)"
    return text


def _rate(summary):
    trials = summary["trials"]
    best = min(trials, key=trials.__getitem__)
    edge = len(trials) > 1 and best in (min(trials), max(trials))
    return f"{summary['multiplier']:g}x{' (edge)' * edge}"


def draw(rows: Sequence[Mapping], path: Path) -> None:
    """Draws loss over training FLOPs and the gain over the narrow model, of equal served FLOPs."""
    served = next((r["served_flops"] for r in rows if r["arm"] == NARROW), 0)
    drawn = [r for r in rows if r["schedule"] == "linear"]
    drawn = [r for r in drawn if not served or abs(r["served_flops"] / served - 1) < 0.01]
    lengths = {arm: len({r["length"] for r in drawn if r["arm"] == arm}) for arm in arms.ARMS}
    most = min(2, max(lengths.values()))
    names = [name for name in lengths if lengths[name] >= most][:DRAWN]
    shown = []
    optimizer_budgets: dict[str, dict[int, float]] = {r["optimizer"]: {} for r in drawn}
    for r in drawn:
        optimizer_budgets[r["optimizer"]][r["length"]] = float(f"{r['flops'] / 1e9:.2g}")
    for optimizer, budgets in optimizer_budgets.items():
        if len(budgets) < most:
            continue
        curves, gains = {}, {}
        for name in names:
            arm_results = [r for r in drawn if (r["optimizer"], r["arm"]) == (optimizer, name)]
            if not arm_results:
                continue
            curves[name] = panels.Curve(
                [r["flops"] / 1e9 for r in arm_results],
                [r["mean"] for r in arm_results],
                marked=True,
            )
            to = [(r["length"], r["to_narrow"]) for r in arm_results if r["to_narrow"]]
            if to:
                gains[name] = panels.Curve(
                    [length for length, _ in to],
                    [each["percent"] for _, each in to],
                    [_end(each, "low") for _, each in to],
                    [_end(each, "high") for _, each in to],
                    bars=True,
                )
        shown.append(
            panels.Panel(
                f"{optimizer}: equal served FLOPs", "training GFLOPs", "held-out bits a symbol",
                curves, log_x=10, ticks=sorted(budgets.values()),
            )
        )  # fmt: skip
        if gains:
            shown.append(
                panels.Panel(
                    f"{optimizer}: gain over overtraining", "tokens a served weight",
                    "loss to the narrow model, %", gains, log_x=2,
                    ticks=sorted({r["length"] for r in drawn}),
                )
            )  # fmt: skip
    panels.save_panels(path, shown)


def _end(difference, name):
    value = difference[name]
    return difference["percent"] if value is None or not math.isfinite(value) else value
