"""Tables, result file and figure of iso_flop."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparse_dataflow.commands import measurement
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training import cost
from sparse_dataflow.evaluation.significance import paired_difference
from sparse_dataflow.files import output
from sparse_dataflow.runs.equal_cost import stored_parameters
from sparse_dataflow.runs.run_config import RunConfig

from . import iso_flop_plan, panels, rate_search
from .iso_flop_plan import TUNE, Arm, Curve, Plan, Run
from .study import HELD_OUT, TUNING, Study
from .time_to_quality import bits_per_byte, effort

NONE = "-"
_ARM_COLUMNS = (
    "budget", "equal", "density", "stored", "width", "heads", "blocks an output reads",
    "FLOPs a token", "stored in projections", "mismatch",
)  # fmt: skip
_CURVE_COLUMNS = (
    "density", "bits per byte", "seeds", "to dense, 95% interval", "rate", "seconds a step",
    "to quality: tokens", "FLOPs", "seconds",
)  # fmt: skip


def write(base: Study, plan: Plan, results: Mapping[str, dict], folder: Path) -> None:
    """Writes iso_flop.json, iso_flop.md, iso_flop.png and, of several lengths, iso_flop_length.png;
    prints the tables.

    Args:
      base: the study.
      plan: what was trained.
      results: name of every run of the list -> its result.
      folder: of the study.
    """
    splits = _splits(base, plan)
    curves = [summary(plan, curve, results) for curve in plan.curves]
    longer = [arm_summary(plan, arm, results) for arm in plan.longer]
    arms = [_shape(arm, base.config) for arm in plan.arms]
    options = {name: getattr(plan, name) for name in ("trials", "seeds", "headline_seeds")}
    result = {
        "settings": base.config.to_json(),
        "options": options,
        "splits": splits,
        "arms": arms,
        "curves": curves,
        "longer": longer,
    }
    measurement.keep(str(folder), "iso_flop", base.chip.name, [result])
    sizes = ", ".join(
        f"{s['bytes']:,} bytes of {s['documents']} files ({n})" for n, s in splits.items()
    )
    text = "\n".join(
        [
            arms_table(plan, base.config),
            f"Evaluated on {sizes.replace('_', ' ')}.\n",
            *(curve_table(curve) for curve in curves),
            *([longer_table(longer)] if longer else []),
        ]
    )
    (folder / "iso_flop.md").write_text(text)
    draw(curves, folder / "iso_flop.png")
    if len({curve["steps"] for curve in curves}) > 1:
        draw_lengths(curves, folder / "iso_flop_length.png")
    say(text)


def _splits(base, plan):
    """Returns name of a split -> its documents and the bytes that the last evaluation reads."""
    chosen = iso_flop_plan.variant_of(base, Run(plan.arms[0], TUNE, 1.0, 0))
    documents = {TUNING: base.tuning_documents}
    documents[HELD_OUT] = len(base.corpus.validation) - base.tuning_documents
    return {
        name: {"documents": count, "bytes": base.split_data(chosen, name, 1).final_bytes}
        for name, count in documents.items()
    }


def _shape(arm: Arm, config: RunConfig) -> dict[str, object]:
    model = arm.model
    blocks = [model.linear(n).block for n in model.sparse_projections]
    return {
        "name": arm.name,
        "equal": arm.equal,
        "budget": arm.budget,
        "optimizer": arm.optimizer,
        "steps": arm.steps,
        "density": arm.density,
        "stored_density": arm.stored_density,
        "width": model.d_model,
        "heads": model.num_heads,
        "fan_in": round(arm.stored_density * model.d_model / blocks[0]) if blocks else None,
        "flops_per_token": iso_flop_plan.flops_per_token(config, model),
        "stored_in_projections": stored_parameters(model),
        "parameters": cost.parameter_count(model),
        "mismatch": arm.mismatch,
    }


def arms_table(plan: Plan, config: RunConfig) -> str:
    """Returns a Markdown table of the models, equal for all optimizers and lengths."""
    first, rows = plan.curves[0], []
    for arm in plan.arms:
        if (arm.optimizer, arm.steps) == (first.optimizer, first.steps):
            s = _shape(arm, config)
            rows.append(
                (
                    f"{arm.budget:g}",
                    arm.equal or "dense",
                    f"{arm.density:g}",
                    f"{s['stored_density']:.4f}",
                    s["width"],
                    s["heads"],
                    s["fan_in"] or NONE,
                    f"{s['flops_per_token']:.3g}",
                    f"{s['stored_in_projections']:,}",
                    f"{arm.mismatch:+.1%}",
                )
            )
    return output.markdown(_ARM_COLUMNS, rows) + "\n"


def summary(plan: Plan, curve: Curve, results: Mapping[str, dict]) -> dict[str, object]:
    """Returns the measured arms of a curve, and its minimum.

    Bits per byte are means over the seeds that all arms have.  Differences to the dense arm are
    paired by seed, over all seeds that both have, as a seed draws the same order of the data in
    every arm; intervals are Student's t at 95%.  Time to quality is what an arm, at any length,
    needs to reach the final loss of the best-tuned dense arm of the budget and length, over
    optimizers, by the seeds that all arms have.
    """
    dense = curve.arms[0]
    dense_results = iso_flop_plan.measured_results(plan, dense, results)
    dense_bits = {seed: bits_per_byte(result) for seed, result in dense_results.items()}
    target = quality_target(plan, curve, results)
    arms: list[dict[str, Any]] = []
    for arm in curve.arms:
        measured = iso_flop_plan.measured_results(plan, arm, results)
        bits = {seed: bits_per_byte(result) for seed, result in measured.items()}
        seeds = [seed for seed in bits if seed in dense_bits]
        first = [bits[seed] for seed in seeds]
        second = [dense_bits[seed] for seed in seeds]
        difference = None
        if arm != dense and all(map(math.isfinite, first + second)):
            difference = dataclasses.asdict(paired_difference(first, second, seeds))
        reached = None
        if target is not None:
            reached = effort(_by_length(plan, arm, results), target)
        arms.append(
            {
                **arm_summary(plan, arm, results),
                "to_dense": difference,
                "time_to_quality": dataclasses.asdict(reached) if reached else None,
            }
        )
    finite = [a for a in arms if a["bits_per_byte"] is not None]
    lowest = min(finite, key=lambda a: a["bits_per_byte"], default=None)
    return {
        "equal": curve.equal,
        "budget": curve.budget,
        "optimizer": curve.optimizer,
        "steps": curve.steps,
        "tokens": next(iter(dense_results.values()))["tokens"],
        "target": target,
        "minimum": lowest["name"] if lowest else None,
        "significant": bool(lowest and _is_below(lowest["to_dense"])),
        "arms": arms,
    }


def arm_summary(plan: Plan, arm: Arm, results: Mapping[str, dict]) -> dict[str, object]:
    """Returns what an arm was, its rate and its losses, by itself."""
    measured = iso_flop_plan.measured_results(plan, arm, results)
    losses = iso_flop_plan.trial_losses(plan, arm, results)
    common = iso_flop_plan.mean_bits(plan, arm, results)
    seconds = [r["step_seconds"] for r in measured.values() if "step_seconds" in r]
    return {
        "name": arm.name,
        "density": arm.density,
        "stored_density": arm.stored_density,
        "bits_per_byte": common if math.isfinite(common) else None,
        "by_seed": {str(seed): result["bits_per_byte"] for seed, result in measured.items()},
        "trials": {f"{m:.4g}": b if math.isfinite(b) else None for m, b in losses.items()},
        "multiplier": rate_search.best_multiplier(losses),
        "bracketed": rate_search.is_bracketed(losses),
        "step_seconds": min(seconds, default=None),
    }


def _by_length(plan, arm, results):
    """Returns optimizer steps -> results of the common seeds of an arm at each finite length."""
    by_length = {}
    for each in plan.arms:
        if dataclasses.replace(each, steps=arm.steps) != arm:
            continue
        measured = iso_flop_plan.measured_results(plan, each, results)
        common = [result for seed, result in measured.items() if seed < plan.seeds]
        if all("curve" in result for result in common):
            by_length[each.steps] = common
    return by_length


def _is_below(difference):
    """Returns whether the whole interval is below zero."""
    return bool(difference) and difference["high"] is not None and difference["high"] < 0


def quality_target(plan: Plan, curve: Curve, results: Mapping[str, dict]) -> float | None:
    """Returns the bits per byte of the best-tuned dense model of a budget and length over all
    optimizers; None where every one diverged."""
    same = [c for c in plan.curves if (c.budget, c.steps) == (curve.budget, curve.steps)]
    target = min(iso_flop_plan.mean_bits(plan, each.arms[0], results) for each in same)
    return target if math.isfinite(target) else None


def _equal(curve):
    return "FLOPs" if curve["equal"] == "flops" else curve["equal"]


def _title(curve):
    return f"Equal {_equal(curve)}, budget {curve['budget']:g}, {curve['steps']:,} steps"


def curve_table(curve: Mapping[str, Any]) -> str:
    """Returns a Markdown table of one `summary`, and a sentence with its minimum."""
    rows = []
    for arm in curve["arms"]:
        reached = arm["time_to_quality"]
        effort_cells = ["not reached", NONE, NONE]
        if reached:
            effort_cells = [f"{reached[name]:.3g}" for name in ("tokens", "flops", "seconds")]
        measured = _bits(arm), len(arm["by_seed"]), _difference(curve, arm)
        rows.append((f"{arm['density']:g}", *measured, _rate(arm), _seconds(arm), *effort_cells))
    table = output.markdown(_CURVE_COLUMNS, rows)
    return f"## {_title(curve)}, {curve['optimizer']}\n\n{table}\n\n{_verdict(curve)}\n"


def longer_table(longer: Sequence[Mapping[str, Any]]) -> str:
    """Returns a Markdown table of the sparse arms that were trained for more lengths."""
    rows = [
        (arm["name"], _bits(arm), len(arm["by_seed"]), _rate(arm), _seconds(arm)) for arm in longer
    ]
    table = output.markdown(("arm", "bits per byte", "seeds", "rate", "seconds a step"), rows)
    return f"## More lengths of the sparse arms\n\n{table}\n"


def _bits(arm):
    return "diverged" if arm["bits_per_byte"] is None else f"{arm['bits_per_byte']:.4f}"


def _seconds(arm):
    return NONE if arm["step_seconds"] is None else f"{arm['step_seconds']:.3f}"


def _rate(arm):
    return f"{arm['multiplier']:.3g}x{'' if arm['bracketed'] else ' (edge)'}"


def _difference(curve, arm):
    difference, dense = arm["to_dense"], curve["arms"][0]["bits_per_byte"]
    if difference is None or dense is None:
        return NONE
    text = f"{difference['difference'] / dense:+.2%}"
    if difference["low"] is not None:
        text += f" ({difference['low'] / dense:+.2%} to {difference['high'] / dense:+.2%})"
    return text


def _verdict(curve):
    lowest = next((arm for arm in curve["arms"] if arm["name"] == curve["minimum"]), None)
    if lowest is None:
        return "No arm has a finite loss."
    if lowest["density"] == 1:
        return "Minimum: the dense model."
    words = "by more than" if curve["significant"] else "but not by more than"
    return f"Minimum: density {lowest['density']:g}, below dense {words} the interval."


def draw(curves: list[dict[str, object]], path: Path) -> None:
    """Draws bits per byte over stored density: a panel for each equal cost, budget and length, a
    curve for each optimizer.  A sparse point is the dense one plus the paired difference, and its
    bar is the 95% interval of that."""
    drawn: dict[str, list] = {}
    for curve in curves:
        drawn.setdefault(_title(curve), []).append(curve)
    panels.save_panels(
        path,
        [
            panels.Panel(
                title,
                "stored density",
                "held-out bits per byte",
                {c["optimizer"]: _drawn_curve(c) for c in chosen},
                log_x=2,
                ticks=[a["density"] for a in chosen[0]["arms"]],
            )
            for title, chosen in drawn.items()
        ],
    )


def draw_lengths(curves: list[dict[str, Any]], path: Path) -> None:
    """Draws `relative_difference` and `relative_effort` over the tokens of a training: three panels
    for each equal cost and budget, a curve for each density and optimizer."""
    drawn = []
    for equal, budget in dict.fromkeys((c["equal"], c["budget"]) for c in curves):
        chosen = [c for c in curves if (c["equal"], c["budget"]) == (equal, budget)]
        words = f"Equal {_equal(chosen[0])}, budget {budget:g}"
        for label, values in _BY_LENGTH.items():
            rows: dict[str, list] = {}
            for each in chosen:
                for arm in each["arms"]:
                    name = "dense" if arm["density"] == 1 else f"density {arm['density']:g}"
                    if value := values(chosen, each, arm):
                        row = each["tokens"] / 1e6, *value
                        rows.setdefault(f"{name}, {each['optimizer']}", []).append(row)
            if not rows:
                continue
            lines = {name: np.transpose(sorted(points)) for name, points in rows.items()}
            drawn.append(
                panels.Panel(
                    words,
                    "training tokens, millions",
                    label,
                    {
                        name: panels.Curve(x, y, low, high, bars=True)
                        for name, (x, y, low, high) in lines.items()
                    },
                    log_x=2,
                    ticks=sorted({each["tokens"] / 1e6 for each in chosen}),
                )
            )
    if drawn:
        panels.save_panels(path, drawn)


def relative_difference(
    chosen: Sequence[Mapping], curve: Mapping, arm: Mapping
) -> list[float] | None:
    """Returns the difference to the dense arm in percent and its interval; None without one."""
    difference, dense = arm["to_dense"], curve["arms"][0]["bits_per_byte"]
    if not difference or difference["low"] is None or dense is None:
        return None
    return [100 * difference[name] / dense for name in ("difference", "low", "high")]


def relative_effort(
    name: str, chosen: Sequence[Mapping], curve: Mapping, arm: Mapping
) -> list[float] | None:
    """Returns three times the FLOPs or seconds (`name`) to the best dense model's final loss,
    relative to that model's; None if the arm does not reach it."""
    same = [c["arms"][0]["time_to_quality"] for c in chosen if c["steps"] == curve["steps"]]
    if not arm["time_to_quality"]:
        return None
    return [arm["time_to_quality"][name] / min(each[name] for each in same if each)] * 3


_BY_LENGTH: Mapping[str, Callable[..., list[float] | None]] = {
    "bits per byte to dense, %": relative_difference,
    "FLOPs to the dense loss, relative to dense": functools.partial(relative_effort, "flops"),
    "seconds to the dense loss, relative to dense": functools.partial(relative_effort, "seconds"),
}


def _drawn_curve(curve):
    arms = [arm for arm in curve["arms"] if arm["bits_per_byte"] is not None]
    dense = curve["arms"][0]["bits_per_byte"]

    def drawn(name):
        values = [(arm["to_dense"] or {}).get(name) for arm in arms]
        points = [arm["bits_per_byte"] for arm in arms]
        return [p if value is None else dense + value for value, p in zip(values, points)]

    x = [arm["stored_density"] for arm in arms]
    bits, low, high = map(drawn, ("difference", "low", "high"))
    return panels.Curve(x, bits, low, high, bars=True)
