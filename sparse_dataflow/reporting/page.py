"""What the report's page says: its headline, its tables and its figures, computed from the data."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sparse_dataflow.reporting import figures, quantities, svg
from sparse_dataflow.reporting.quantities import MISSING, finite
from sparse_dataflow.reporting.report_data import (
    EvaluationData,
    LayoutData,
    ReportData,
    VariantData,
)
from sparse_dataflow.reporting.timeline_figure import timeline

_EQUAL_CLOCK = 0.05
_PICTURES = 12
_PICTURE_WIDTH = 320


@dataclasses.dataclass(frozen=True)
class Measure:
    """A row of the headline table.

    Attributes:
      label: what is measured.
      field: attribute of VariantData.
      text: prints the row's values.
      better: word for a sparse model that does better, e.g. "faster".
      worse: word for one that does worse.
      higher_is_better: whether a larger value is the better one.
      relative: shown as a percentage of the dense value instead of as "n times".
    """

    label: str
    field: str
    text: quantities.Row
    better: str
    worse: str
    higher_is_better: bool = False
    relative: bool = False


MEASURES = (
    Measure("Held-out loss, nats per token", "loss", quantities.fixed(3), "lower", "higher",
            relative=True),
    Measure("Held-out bits per byte", "bits_per_byte", quantities.fixed(3), "lower", "higher",
            relative=True),
    Measure("Parameters stored", "stored_parameters", quantities.count, "fewer", "more"),
    Measure("Training memory", "training_bytes", quantities.size, "less", "more"),
    Measure("Tokens per second", "tokens_per_second", quantities.count, "faster", "slower",
            higher_is_better=True),
    Measure("Step time, median", "step_seconds", quantities.seconds, "shorter", "longer"),
    Measure("FLOPs a token", "flops_per_token", quantities.flops, "fewer", "more"),
    Measure("MFU", "mfu", quantities.percent, "higher", "lower", higher_is_better=True),
)  # fmt: skip
RUN_MEASURES = (
    ("Tokens trained on", "tokens", quantities.count),
    ("Optimizer steps", "steps", lambda values: [f"{v:,}" for v in values]),
    ("Training wall-clock", "train_seconds", quantities.durations),
)


def contents(data: ReportData) -> dict[str, Any]:
    """What the template fills in; variants in the order dense, sparse."""
    variants = sorted(data.variants, key=lambda v: v.name)
    seconds = _breakdown({v.name: v.section_seconds for v in variants}, quantities.seconds, "step")
    memory = _breakdown({v.name: v.memory for v in variants}, quantities.size, "memory")
    pictures, left_out = layout_pictures(data.layouts)
    return {
        "data": data,
        "names": [v.name for v in variants],
        "headline": headline(variants),
        "table": table(variants, data.flop_ceiling),
        "run_table": [(label, text([getattr(v, field) for v in variants]))
                      for label, field, text in RUN_MEASURES],
        "facts": facts(data),
        "curves": _curves(variants),
        "breakdowns": {"step": seconds, "memory": memory},
        "timelines": _timelines(variants),
        "pictures": pictures,
        "pictures_left_out": left_out,
        "evaluation": evaluation_table(data.evaluation) if data.evaluation else None,
        "goodput": goodput(data.goodput),
    }  # fmt: skip


def goodput(seconds: dict[str, float]) -> str:
    """The share of a run's time that counts, and what the rest was; empty where it is not known."""
    total = sum(seconds.values())
    if not total or "productive" not in seconds:
        return ""
    rest = ", ".join(
        f"{name} {_percent(part / total)}"
        for name, part in seconds.items()
        if name != "productive" and part / total >= 0.0005
    )
    told = f"{_percent(seconds['productive'] / total)} of {total:,.0f} s in steps that count"
    return f"{told}; {rest}" if rest else told


def evaluation_table(evaluation: EvaluationData) -> list[dict[str, Any]]:
    """Rows of the evaluation's table: what was asked, cells by model, baselines, difference.

    A difference is called better or worse for the first model only where its 95% interval leaves
    out zero.
    """
    rows = []
    for row in evaluation.rows:
        # Shares are printed in percent, all else as it is.
        text = _percent if row.metric in ("acc", "acc_norm", "exact_match") else _plain_number
        better, interval = None, ""
        if row.low is not None and row.high is not None:
            interval = f"{text(row.low)} to {text(row.high)}"
            if row.low * row.high > 0:
                better = (row.low < 0) == row.lower_is_better
        rows.append({
            "task": row.task,
            "shots": "" if row.shots is None else f"{row.shots}-shot",
            "about": f"{row.metric}; {row.items:,} items of {row.documents:,} documents",
            "cells": [
                (text(row.values.get(name)),
                 f"± {text(row.errors[name])}" if row.errors.get(name) is not None else "")
                for name in evaluation.models
            ],
            "baselines": [text(v) for v in (row.chance, row.unigram, row.bigram)],
            "difference": text(row.difference, sign=True) if row.difference is not None else "",
            "interval": interval,
            "p": "" if row.p is None else f"p = {row.p:.2g}" if row.p >= 1e-4 else "p < 0.0001",
            "better": better,
        })  # fmt: skip
    return rows


def _percent(value: float | None, sign: bool = False) -> str:
    return MISSING if value is None else f"{100 * value:{'+' if sign else ''}.1f}%"


def _plain_number(value: float | None, sign: bool = False) -> str:
    return MISSING if value is None else f"{value:{'+' if sign else ''}.3f}"


def headline(variants: Sequence[VariantData]) -> str:
    """The run's result in one sentence, in bits per byte where evaluated so, else in loss."""
    field, unit = "bits_per_byte", "bits per byte of held-out text"
    if any(finite(v.bits_per_byte) is None for v in variants):
        field, unit = "loss", "nats per token of held-out text"
    if any(finite(getattr(v, field)) is None for v in variants):
        return "No held-out evaluation was made for every model of this run."
    score = {v.name: f"{getattr(v, field):.3f}" for v in variants}
    clock = {v.name: quantities.durations([v.train_seconds])[0] for v in variants}
    if len(variants) == 1:
        (name,) = score
        return f"The {name} model is at {score[name]} {unit} after {clock[name]} of training."
    times = [v.train_seconds for v in variants]
    if max(times) - min(times) > _EQUAL_CLOCK * max(times):
        return (
            f"The sparse model is at {score['sparse']} {unit} after {clock['sparse']} of training; "
            f"its dense twin at {score['dense']} after {clock['dense']}."
        )
    start = f"At equal wall-clock ({quantities.durations([sum(times) / 2])[0]} each)"
    if score["sparse"] == score["dense"]:
        return f"{start} the sparse model and its dense twin are level at {score['sparse']} {unit}."
    if float(score["sparse"]) < float(score["dense"]):
        return (
            f"{start} the sparse model is ahead, at {score['sparse']} {unit}; "
            f"its dense twin is at {score['dense']}."
        )
    return (
        f"{start} the dense twin is ahead, at {score['dense']} {unit}; "
        f"the sparse model is at {score['sparse']}."
    )


def table(variants: Sequence[VariantData], flop_ceiling: float | None) -> list[dict[str, Any]]:
    """Rows of the headline table: label, cells by variant, verdict and what to say under it."""
    rows = []
    for measure in MEASURES:
        values = [finite(getattr(v, measure.field)) for v in variants]
        row: dict[str, Any] = {
            "label": measure.label,
            "field": measure.field,
            "cells": measure.text(values),
            "under": None,
        }
        if len(variants) == 2:
            row["verdict"], row["better"] = _verdict(measure, *values)
        if measure.field == "tokens_per_second":
            row["under"] = _ceiling(values, flop_ceiling)
        rows.append(row)
    return rows


def _verdict(measure: Measure, dense: float | None, sparse: float | None):
    """How the sparse value compares: ("2.31× faster", True); better is None where neither is."""
    if not dense or not sparse or dense < 0 or sparse < 0:
        return MISSING, None
    better = (sparse > dense) == measure.higher_is_better
    word = measure.better if better else measure.worse
    if measure.relative:
        share = abs(sparse - dense) / dense
        return (f"{100 * share:.1f}% {word}", better) if share >= 5e-4 else ("equal", None)
    times = max(dense, sparse) / min(dense, sparse)
    if times < 1.005:
        return "equal", None
    return f"{quantities.significant(times)}× {word}", better


def _ceiling(values: Sequence[float | None], flop_ceiling: float | None) -> str | None:
    """The FLOP ceiling beside the speed ratio, and the share of it that was reached."""
    ceiling = finite(flop_ceiling)
    if not ceiling or len(values) < 2 or not values[0] or values[1] is None:
        return None
    share = values[1] / values[0] / ceiling
    return f"FLOP ceiling {quantities.significant(ceiling)}×, {100 * share:.0f}% of it reached"


def facts(data: ReportData) -> list[str]:
    """Sentences under the table on what bounds the ratio."""
    sentences = []
    if (share := finite(data.projection_share)) is not None:
        sentences.append(
            f"Projections hold {100 * share:.1f}% of a dense step's FLOPs; the "
            "rest (attention, embedding, loss) costs the same however sparse they are."
        )
    if (ceiling := finite(data.flop_ceiling)) is not None:
        sentences.append(
            f"A dense step has {quantities.significant(ceiling)}× the FLOPs of a sparse "
            "step: the FLOP ceiling, which the speed-up could reach if every operation ran at one "
            "rate."
        )
    return sentences


def _curves(variants: Sequence[VariantData]) -> list[dict[str, Any]]:
    histories = {v.name: v.history for v in variants}
    drawn = [(x, figures.loss_curves(histories, x, f"loss-{x}")) for x in ("tokens", "seconds")]
    return [{"x": x, "svg": made[0], "clipped": made[1]} for x, made in drawn if made]


def _timelines(variants: Sequence[VariantData]) -> list[dict[str, Any]]:
    found = []
    for v in variants:
        if v.timeline:
            spans = [tuple(span) for span in v.timeline]
            told = (
                f"{quantities.percent([v.hidden])[0]} of the transfer ran while the device computed"
            )
            drawn = timeline(spans, f"timeline-{v.name}", f"{v.name}: {told}.")
            found.append({"name": v.name, "svg": drawn, "told": told})
    return found


def _breakdown(
    parts: Mapping[str, Mapping[str, float]], text: quantities.Row, key: str
) -> dict[str, Any] | None:
    """A stacked bar and its table; None where no variant has any part."""
    parts = {variant: fold(values, _largest_parts(parts)) for variant, values in parts.items()}
    parts = {variant: values for variant, values in parts.items() if sum(values.values()) > 0}
    if not parts:
        return None
    names = list(dict.fromkeys(name for values in parts.values() for name in values))
    # The rest is drawn last whichever variant brought it in.
    names.sort(key=lambda name: name == "other")
    totals = dict(zip(parts, text([math.fsum(values.values()) for values in parts.values()])))
    every = text([v for values in parts.values() for v in values.values()])
    printed = iter(every)
    cells = {variant: {name: next(printed) for name in values} for variant, values in parts.items()}
    title = {"step": "A step's time by section", "memory": "Training memory by category"}[key]
    return {
        "svg": figures.stacked_bars(parts, names, totals, f"parts-{key}", title),
        "variants": list(parts),
        "rows": [(i, name, [cells[v].get(name, MISSING) for v in parts])
                 for i, name in enumerate(names)],
        "totals": [totals[v] for v in parts],
    }  # fmt: skip


def _largest_parts(parts: Mapping[str, Mapping[str, float]]) -> set[str]:
    """The parts that get a colour of their own: all, or the largest where colours run out."""
    weight: dict[str, float] = {}
    for values in parts.values():
        for name, value in values.items():
            weight[name] = weight.get(name, 0.0) + (finite(value) or 0.0)
    names = sorted(weight, key=weight.__getitem__, reverse=True)
    if len(names) <= svg.PARTS:
        return set(names)
    return set([name for name in names if name != "other"][: svg.PARTS - 1])


def fold(values: Mapping[str, float], kept: set[str]) -> dict[str, float]:
    """`values` with parts outside `kept` added up as "other"; parts not above 0 are dropped."""
    folded: dict[str, float] = {}
    for name, value in values.items():
        number = finite(value)
        if number is not None and number > 0:
            name = name if name in kept else "other"
            folded[name] = folded.get(name, 0.0) + number
    return folded


def layout_pictures(layouts: Sequence[LayoutData]) -> tuple[list[dict[str, Any]], int]:
    """Pictures of the distinct layouts, all to one scale, and how many distinct ones were left out.

    Layers that share a projection's layout share one picture.
    """
    groups: dict[Any, list[LayoutData]] = {}
    for layout in layouts:
        stored = tuple(sorted((row, column) for row, column in layout.mask))
        shape = (layout.in_blocks, layout.out_blocks, layout.block)
        groups.setdefault((layout.projection, shape, stored), []).append(layout)
    chosen = list(groups.values())[:_PICTURES]
    longest = max((max(g[0].in_blocks, g[0].out_blocks) for g in chosen), default=1)
    cell = min(10.0, _PICTURE_WIDTH / longest)
    pictures = [_picture(group, cell, f"layout-{i}") for i, group in enumerate(chosen)]
    return pictures, len(groups) - len(chosen)


def _picture(group: Sequence[LayoutData], cell: float, key: str) -> dict[str, Any]:
    layout = group[0]
    blocks = layout.in_blocks * layout.out_blocks
    where = _layers([g.layer for g in group])
    title = f"{layout.projection}{f', {where}' if where else ''}"
    return {
        "title": layout.projection,
        "where": where,
        "svg": figures.block_picture(
            layout.in_blocks, layout.out_blocks, layout.mask, cell, key, f"Layout of {title}"
        ),
        "shape": f"{layout.in_blocks} × {layout.out_blocks} blocks of {layout.block}",
        "stored": f"{len(layout.mask):,} stored, {100 * len(layout.mask) / max(blocks, 1):.1f}%",
        "fan_in": _spread(layout.fan_in, [c for _, c in layout.mask], layout.out_blocks),
        "fan_out": _spread(layout.fan_out, [r for r, _ in layout.mask], layout.in_blocks),
        "balanced": layout.balanced,
    }


def _spread(stated: int, where: Sequence[int], blocks: int) -> str:
    """A fan as stated, or its range in the mask where blocks differ in it."""
    counts = [0] * blocks
    for index in where:
        counts[index] += 1
    low, high = min(counts, default=stated), max(counts, default=stated)
    return f"{stated}" if low == high else f"{low} to {high}"


def _layers(layers: Sequence[int | None]) -> str:
    """Layers in words: "layer 3", "layers 0–5, 8"; empty for a layout of all layers."""
    numbers = sorted({n for n in layers if n is not None})
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    texts = [f"{r[0]}–{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs]
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(texts)}" if texts else ""
