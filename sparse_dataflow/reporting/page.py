"""Content of the report page: headline, tables and figures."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from sparse_dataflow.reporting import quantities
from sparse_dataflow.reporting.figures import drawings, svg
from sparse_dataflow.reporting.figures.timeline import timeline
from sparse_dataflow.reporting.quantities import MISSING, finite
from sparse_dataflow.reporting.report_data import (
    LayoutData,
    ProfileData,
    ReportData,
    VariantData,
    evaluation_table,
)

_EQUAL_TIME_TOLERANCE = 0.05

SEED_SPREAD = 0.02
"""Relative difference of held-out losses that one seed cannot tell from chance: the range over the
seeds of the same model, 1.7% to 2.1% of the loss, in the tables of docs/evidence/quality.md."""

_LEAST_STEPS = 20
"""Steps from which the shares of a run's time say something."""

_MAX_PICTURES = 12
_PICTURE_WIDTH = 320


@dataclasses.dataclass(frozen=True)
class Measure:
    """A row of the headline table.

    Attributes:
      label: name of the quantity.
      field: attribute of VariantData.
      text: formatter of the row's values.
      better: adjective for a better sparse model, e.g. "faster".
      worse: adjective for a worse sparse model.
      higher_is_better: whether larger values are better.
      relative: whether the verdict is a percentage of the dense value, not a factor.
    """

    label: str
    field: str
    text: quantities.Formatter
    better: str
    worse: str
    higher_is_better: bool = False
    relative: bool = False


MEASURES = (
    Measure("Held-out loss, nats per token", "loss", quantities.fixed(3), "lower", "higher",
            relative=True),
    Measure("Held-out bits per byte", "bits_per_byte", quantities.fixed(3), "lower", "higher",
            relative=True),
    Measure("Stored parameters", "stored_parameters", quantities.count, "fewer", "more"),
    Measure("Weights on disk", "weight_bytes", quantities.size, "smaller", "larger"),
    Measure("Training memory", "training_bytes", quantities.size, "less", "more"),
    Measure("Tokens per second", "tokens_per_second", quantities.count, "faster", "slower",
            higher_is_better=True),
    Measure("Median step time", "step_seconds", quantities.seconds, "shorter", "longer"),
    Measure("FLOPs per token", "flops_per_token", quantities.flops, "fewer", "more"),
    Measure("Time per generated token, all texts at once", "token_seconds", quantities.seconds,
            "shorter", "longer"),
    Measure("MFU", "mfu", quantities.percent, "higher", "lower", higher_is_better=True),
)  # fmt: skip
RUN_MEASURES = (
    ("Training tokens", "tokens", quantities.count),
    ("Optimizer steps", "steps", lambda values: [f"{v:,}" for v in values]),
    ("Training wall-clock time", "train_seconds", quantities.durations),
)


def contents(data: ReportData) -> dict[str, object]:
    """Returns the variables of the template; variants in the order dense, narrow, sparse."""
    variants = sorted(data.variants, key=lambda v: v.name)
    seconds = _breakdown({v.name: v.section_seconds for v in variants}, quantities.seconds, "step")
    bytes_by_name = {
        v.name: {k.replace("_", " "): n for k, n in v.memory.items()} for v in variants
    }
    memory = _breakdown(bytes_by_name, quantities.size, "memory")
    pictures, omitted = layout_pictures(data.layouts)
    return {
        "data": data,
        "names": [v.name for v in variants],
        "headline": headline(variants),
        "longer": LONGER if len(variants) == 3 else "",
        "compared": compared(variants),
        "table": table(variants, data.flop_ceiling),
        "run_table": [(label, text([getattr(v, field) for v in variants]))
                      for label, field, text in RUN_MEASURES],
        "facts": facts(data),
        "curves": _curves(variants),
        "metrics": drawings.metric_curves({v.name: v.history for v in variants}, "metric"),
        "breakdowns": {"step": seconds, "memory": memory},
        "timelines": _timelines(variants),
        "routing": _routing(variants),
        "pictures": pictures,
        "omitted_pictures": omitted,
        "evaluation": evaluation_table(data.evaluation) if data.evaluation else None,
        "goodput": goodput(data.goodput, sum(v.steps for v in variants)),
        "noise": NOISE if any(_is_within_noise(variants, name) for name in compared(variants))
        else "",
        "kernels": kernels(data.profile) if data.profile else [],
    }  # fmt: skip


def kernels(profile: ProfileData) -> list[tuple[str, str, str, str]]:
    """Returns (name, seconds, share of all operations, executions) of the longest operations."""
    times = quantities.seconds([seconds for _, seconds, _ in profile.kernels])
    return [
        (name, time, f"{seconds / (profile.seconds or 1):.1%}", f"{count:,}")
        for (name, seconds, count), time in zip(profile.kernels, times)
    ]


def goodput(seconds: dict[str, float], steps: int = _LEAST_STEPS) -> str:
    """Returns the shares of a run's time as text; "" without data.

    Args:
      seconds: category -> seconds.
      steps: of all models of the run.
    """
    total = sum(seconds.values())
    if not total or "productive" not in seconds:
        return ""
    if steps < _LEAST_STEPS:
        return (
            f"not stated: {steps} steps are few beside the start of a run ({total:,.0f} s in all)"
        )
    shares = {name: value / total for name, value in seconds.items() if value / total >= 0.0005}
    productive = shares.pop("productive", 0.0)
    text = f"{productive:.1%} of {total:,.0f} s in productive steps"
    others = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    return f"{text}; {others}" if others else text


def compared(variants: Sequence[VariantData]) -> list[str]:
    """Returns the names of the models that the sparse model is compared with; [] without it."""
    names = [v.name for v in variants]
    return [name for name in names if name != "sparse"] if "sparse" in names else []


def headline(variants: Sequence[VariantData]) -> str:
    """Returns the result of the run in one or two sentences, in bits per byte or else in loss."""
    field, unit = "bits_per_byte", "bits per byte of held-out text"
    if any(finite(v.bits_per_byte) is None for v in variants):
        field, unit = "loss", "nats per token of held-out text"
    if any(finite(getattr(v, field)) is None for v in variants):
        return "This run has no held-out evaluation of all its models."
    if len(variants) == 1:
        (only,) = variants
        clock = quantities.durations([only.train_seconds])[0]
        score = f"{getattr(only, field):.3f}"
        return f"The {only.name} model reaches {score} {unit} after {clock} of training."
    scores, seconds = _at_equal_seconds(variants, field)
    if not scores:
        return _unequal(variants, field, unit)
    clock = quantities.durations([seconds])[0]
    by_the_way = any(scores[v.name] != getattr(v, field) for v in variants)
    way = ", by evaluations on the way" * by_the_way
    start = f"At equal wall-clock time ({clock} each{way})"
    rival = "dense" if "dense" in scores else next(n for n in scores if n != "sparse")
    by_name = {v.name: v for v in variants}

    def error(other):
        return _error([by_name["sparse"], by_name[other]], field)

    text = _pair(start, scores, rival, unit, error(rival))
    if len(variants) < 3:
        return text
    sparse, narrow = scores["sparse"], scores["narrow"]
    word = "better" if narrow < sparse else "worse"
    verdict = f"{abs(narrow - sparse) / sparse:.1%} {word} than the sparse model"
    unsure = _is_noise(sparse, narrow, error("narrow"))
    noise = ", within the noise of one seed" if unsure else ""
    return (
        f"{text} A narrower model without sparse weights, of equal FLOPs per token, reaches "
        f"{narrow:.3f}: {verdict}{noise}."
    )


LONGER = "A longer training favours the narrower model: see docs/evidence/quality.md."
"""What turns the comparison of a sparse model with a narrower one."""


def _at_equal_seconds(
    variants: Sequence[VariantData], field: str
) -> tuple[dict[str, float], float]:
    """Returns the losses of the models after equal training time, and that time.

    Those after the last steps where the times are equal; else those of the shortest time, between
    the held-out losses that were measured while the models trained; {} where there are none.
    """
    times = [v.train_seconds for v in variants]
    shortest = min(times)
    if max(times) - shortest <= _EQUAL_TIME_TOLERANCE * max(times):
        return {v.name: float(getattr(v, field)) for v in variants}, sum(times) / len(times)
    scores = {}
    for v in variants:
        rows = [row for row in v.history if row.get("kind") == "eval"]
        points = [(finite(row.get("seconds")), finite(row.get(field))) for row in rows]
        measured = sorted((x, y) for x, y in points if x is not None and y is not None)
        # A model that ended at the shortest time may have its last evaluation right there.
        if not measured or not measured[0][0] <= shortest <= 1.01 * measured[-1][0]:
            return {}, 0.0
        x, y = np.array(measured).T
        scores[v.name] = float(np.interp(shortest, x, y))
    return scores, shortest


def _error(variants: Sequence[VariantData], field: str) -> float:
    """Returns the standard error of the difference of held-out losses, in the unit of the field, as
    if the models were not evaluated on the same text: an upper bound."""
    errors = []
    for v in variants:
        finals = [row for row in v.history if row.get("kind") == "final"]
        error = finite(finals[-1].get("bits_per_byte_error")) or 0.0 if finals else 0.0
        value, bits = finite(getattr(v, field)), finite(v.bits_per_byte)
        errors.append(error * value / bits if value and bits else 0.0)
    return math.hypot(*errors)


def _unequal(variants, field, unit):
    """States the losses of models that were trained for different times."""
    titles = {"sparse": "the sparse model", "dense": "its dense twin", "narrow": "the narrower one"}
    times = {v.name: quantities.durations([v.train_seconds])[0] for v in variants}
    clauses = [
        f"{titles[v.name]} {getattr(v, field):.3f} after {times[v.name]}"
        for v in sorted(variants, key=lambda v: list(titles).index(v.name))
    ]
    text = f"{clauses[0].replace('model ', 'model reaches ', 1)}; {'; '.join(clauses[1:])}"
    return f"{text[:1].upper()}{text[1:]}, in {unit}: the times differ, so this decides nothing."


def _pair(start, scores, rival, unit, error):
    """Compares the sparse model with another one."""
    title = {"sparse": "sparse model", "dense": "dense twin", "narrow": "narrower model"}
    shown = {name: f"{value:.3f}" for name, value in scores.items()}
    if shown["sparse"] == shown[rival]:
        both = f"the sparse model and its {title[rival]}"
        return f"{start} {both} both reach {shown['sparse']} {unit}."
    better, worse = sorted(("sparse", rival), key=scores.__getitem__)
    if _is_noise(scores[better], scores[worse], error):
        return (
            f"{start} the sparse model reaches {shown['sparse']} and its {title[rival]} "
            f"{shown[rival]} {unit}: within the noise of one seed."
        )
    share = (scores[worse] - scores[better]) / scores[worse]
    return (
        f"{start} the {title[better]} is better: {shown[better]} {unit}, {share:.1%} less than the "
        f"{shown[worse]} of the {title[worse]}."
    )


def table(variants: Sequence[VariantData], flop_ceiling: float | None) -> list[dict[str, object]]:
    """Returns the rows of the headline table: label, cells by variant, verdicts and a note.

    A verdict compares the sparse model with one of `compared`.
    """
    rows = []
    for measure in MEASURES:
        by_name = {v.name: finite(getattr(v, measure.field)) for v in variants}
        models = {v.name: v for v in variants}

        def error(name, measure=measure, models=models):
            pair = models[name], models["sparse"]
            return _error(pair, measure.field) if measure.relative else 0.0

        values = list(by_name.values())
        row: dict[str, object] = {
            "label": measure.label,
            "field": measure.field,
            "cells": measure.text(values),
            "note": None,
        }
        row["verdicts"] = [
            _verdict(measure, by_name[name], by_name["sparse"], error(name))
            for name in compared(variants)
        ]
        if measure.field == "tokens_per_second":
            row["note"] = _ceiling(by_name.get("dense"), by_name.get("sparse"), flop_ceiling)
        rows.append(row)
    return rows


def _verdict(
    measure: Measure, dense: float | None, sparse: float | None, error: float
) -> tuple[str, bool | None]:
    """Returns (verdict, whether sparse is better), e.g. ("2.31× faster", True); None if equal.

    Args:
      error: standard error of the difference of two losses.
    """
    if not dense or not sparse or dense < 0 or sparse < 0:
        return MISSING, None
    better = (sparse > dense) == measure.higher_is_better
    word = measure.better if better else measure.worse
    if measure.relative:
        share = abs(sparse - dense) / dense
        if share < 5e-4:
            return "equal", None
        if _is_noise(sparse, dense, error):
            return f"{100 * share:.1f}% {word}, within noise", None
        return f"{100 * share:.1f}% {word}", better
    factor = max(dense, sparse) / min(dense, sparse)
    if factor < 1.02:
        return "equal" if factor < 1.005 else "about equal", None
    return f"{quantities.significant(factor)}× {word}", better


NOISE = (
    f"Within noise: the losses differ by less than {SEED_SPREAD:.0%}, the range over seeds of the "
    "same model at small scales, or by less than two standard errors of the held-out text. So one "
    "seed cannot tell which model is better."
)


def _is_noise(first: float, second: float, error: float = 0.0) -> bool:
    """Returns whether two held-out losses of one seed each may differ by chance: of the seed, or of
    the text, for which `error` is the standard error of their difference."""
    return abs(first - second) < max(SEED_SPREAD * min(first, second), 2 * error)


def _is_within_noise(variants: Sequence[VariantData], name: str) -> bool:
    """Returns whether a loss of the sparse model differs from that of `name` by chance alone."""
    by_name = {v.name: v for v in variants}
    models = by_name["sparse"], by_name[name]
    for field in ("loss", "bits_per_byte"):
        first, second = (finite(getattr(model, field)) for model in models)
        if first and second and _is_noise(first, second, _error(models, field)):
            return True
    return False


def _ceiling(dense: float | None, sparse: float | None, flop_ceiling: float | None) -> str | None:
    """Returns the FLOP ceiling and the share of it that the speed-up reaches, as text."""
    ceiling = finite(flop_ceiling)
    if not ceiling or not dense or sparse is None:
        return None
    share = sparse / dense / ceiling
    return f"{100 * share:.0f}% of the FLOP ceiling {quantities.significant(ceiling)}×"


def facts(data: ReportData) -> list[str]:
    """Returns sentences on the limits of the speed-up."""
    sentences = []
    if (share := finite(data.projection_share)) is not None:
        sentences.append(
            f"The projections have {100 * share:.1f}% of a dense step's FLOPs. Sparsity does not "
            "reduce the others: attention, embedding and loss."
        )
    if (ceiling := finite(data.flop_ceiling)) is not None:
        sentences.append(
            f"A dense step has {quantities.significant(ceiling)}× the FLOPs of a sparse step, on "
            "average over the steps, with the causal half of attention. This FLOP ceiling is the "
            "speed-up if all operations ran at the same FLOP rate."
        )
    return sentences


def _curves(variants: Sequence[VariantData]) -> list[dict[str, object]]:
    histories = {
        v.name: [
            row | {"flops": tokens * (finite(v.flops_per_token) or 0.0)}
            for row in v.history
            if (tokens := finite(row.get("tokens"))) is not None
        ]
        for v in variants
    }
    curves = [(x, drawings.loss_curves(histories, x, f"loss-{x}")) for x in ("seconds", "flops")]
    return [{"x": x, "svg": curve[0], "clipped": curve[1]} for x, curve in curves if curve]


def _routing(variants: Sequence[VariantData]) -> list[dict[str, str]]:
    """Returns the load of the experts of each variant that has some, at its last measurement."""
    pictures = []
    for v in variants:
        loads = [row["load"] for row in v.history if row.get("kind") == "routing"]
        dropped = [row["dropped"] for row in v.history if "dropped" in row]
        if loads:
            title = f"Load of the experts of the {v.name} model"
            picture = drawings.load_picture(loads[-1], f"load-{v.name}", title)
            share = f"{math.fsum(dropped) / max(1, len(dropped)):.2%}"
            pictures.append({"name": v.name, "svg": picture, "dropped": share})
    return pictures


def _timelines(variants: Sequence[VariantData]) -> list[dict[str, str]]:
    timelines = []
    for v in variants:
        if v.timeline:
            spans = [tuple(span) for span in v.timeline]
            overlap = f"{quantities.percent([v.hidden])[0]} of the transfers overlap with compute"
            picture = timeline(spans, f"timeline-{v.name}", f"{v.name}: {overlap}.")
            timelines.append({"name": v.name, "svg": picture, "overlap": overlap})
    return timelines


def _breakdown(
    bars: Mapping[str, Mapping[str, float]], text: quantities.Formatter, key: str
) -> dict[str, object] | None:
    """Returns stacked bars and their table; None where no variant has values."""
    largest = _largest_categories(bars)
    bars = {variant: fold(values, largest) for variant, values in bars.items()}
    bars = {variant: values for variant, values in bars.items() if sum(values.values()) > 0}
    if not bars:
        return None
    categories = list(dict.fromkeys(name for values in bars.values() for name in values))
    categories.sort(key=lambda name: name == "other")
    totals = dict(zip(bars, text([math.fsum(values.values()) for values in bars.values()])))
    # Formatted together, so that all cells have one unit.
    texts = iter(text([v for values in bars.values() for v in values.values()]))
    cells = {variant: {name: next(texts) for name in values} for variant, values in bars.items()}
    title = {"step": "Step time by section", "memory": "Training memory by category"}[key]
    return {
        "svg": drawings.stacked_bars(bars, categories, totals, f"breakdown-{key}", title),
        "variants": list(bars),
        "rows": [(i, name, [cells[v].get(name, MISSING) for v in bars])
                 for i, name in enumerate(categories)],
        "totals": [totals[v] for v in bars],
    }  # fmt: skip


def _largest_categories(bars: Mapping[str, Mapping[str, float]]) -> set[str]:
    """Returns the categories with their own colour: all, or the largest if there are too many."""
    sums: dict[str, float] = {}
    for values in bars.values():
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + (finite(value) or 0.0)
    names = sorted(sums, key=sums.__getitem__, reverse=True)
    if len(names) <= svg.CATEGORIES:
        return set(names)
    return set([name for name in names if name != "other"][: svg.CATEGORIES - 1])


def fold(values: Mapping[str, float], categories: set[str]) -> dict[str, float]:
    """Returns the positive values; sums those outside `categories` as "other"."""
    folded: dict[str, float] = {}
    for name, value in values.items():
        number = finite(value)
        if number is not None and number > 0:
            name = name if name in categories else "other"
            folded[name] = folded.get(name, 0.0) + number
    return folded


def layout_pictures(layouts: Sequence[LayoutData]) -> tuple[list[dict[str, object]], int]:
    """Returns (pictures of the distinct layouts on one scale, number of omitted layouts).

    Layers with the same layout of a projection share one picture.
    """
    groups: dict[object, list[LayoutData]] = {}
    for layout in layouts:
        stored = tuple(sorted((row, column) for row, column in layout.mask))
        shape = (layout.in_blocks, layout.out_blocks, layout.block)
        groups.setdefault((layout.projection, shape, stored), []).append(layout)
    chosen = list(groups.values())[:_MAX_PICTURES]
    longest = max((max(g[0].in_blocks, g[0].out_blocks) for g in chosen), default=1)
    cell = min(10.0, _PICTURE_WIDTH / longest)
    pictures = [_picture(group, cell, f"layout-{i}") for i, group in enumerate(chosen)]
    return pictures, len(groups) - len(chosen)


def _picture(group: Sequence[LayoutData], cell: float, key: str) -> dict[str, object]:
    layout = group[0]
    blocks = layout.in_blocks * layout.out_blocks
    layers = _layers([g.layer for g in group])
    title = f"{layout.projection}, {layers}" if layers else layout.projection
    return {
        "title": layout.projection,
        "layers": layers,
        "svg": drawings.block_picture(
            layout.in_blocks,
            layout.out_blocks,
            [("sparse", 1.0, layout.mask)],
            cell,
            key,
            f"Layout of {title}",
            f"{len(layout.mask)} of {blocks} blocks are stored.",
        ),
        "shape": f"{layout.in_blocks} × {layout.out_blocks} blocks of {layout.block}",
        "stored": f"{len(layout.mask):,} stored, {100 * len(layout.mask) / max(blocks, 1):.1f}%",
        "fan_in": _spread(layout.fan_in, [c for _, c in layout.mask], layout.out_blocks),
        "fan_out": _spread(layout.fan_out, [r for r, _ in layout.mask], layout.in_blocks),
        "balanced": layout.balanced,
    }


def _spread(fan: int, indices: Sequence[int], blocks: int) -> str:
    """Returns the fan of a layout, or its range where it differs between blocks."""
    counts = [0] * blocks
    for index in indices:
        counts[index] += 1
    low, high = min(counts, default=fan), max(counts, default=fan)
    return f"{fan}" if low == high else f"{low} to {high}"


def _layers(layers: Sequence[int | None]) -> str:
    """Returns e.g. "layer 3" or "layers 0–5, 8"; "" for a layout of all layers."""
    numbers = sorted({n for n in layers if n is not None})
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    texts = [f"{r[0]}–{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs]
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(texts)}" if texts else ""
