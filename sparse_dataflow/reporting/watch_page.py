"""The live page of runs that still train."""

import dataclasses
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from sparse_dataflow.core.config.projections import PROJECTIONS
from sparse_dataflow.core.layouts.evolution import new_shares
from sparse_dataflow.files.json_files import JsonObject
from sparse_dataflow.monitoring.saved_layouts import SavedLayouts
from sparse_dataflow.reporting import quantities
from sparse_dataflow.reporting.figures import drawings
from sparse_dataflow.reporting.figures import layouts as layout_figures
from sparse_dataflow.reporting.templates import html

_ROWS_SHOWN = 6
_VARIANTS = ("sparse", "dense", "narrow")


@dataclasses.dataclass(frozen=True)
class WatchedRun:
    """What a run folder has so far.

    Attributes:
      steps: planned steps by variant.
      histories: metrics rows by variant.
      goodput: a line about the run's time, or "".
      alerts: {"kind", "step", "text", "variant"} in order.
      layouts: of the sparse model, or why there are none in a sentence.
      problem: why the folder cannot be read; then the others are empty.
    """

    name: str
    steps: Mapping[str, int] = dataclasses.field(default_factory=dict)
    histories: Mapping[str, Sequence[JsonObject]] = dataclasses.field(default_factory=dict)
    goodput: str = ""
    alerts: Sequence[Mapping[str, str]] = ()
    layouts: SavedLayouts | str = ""
    problem: str = ""


def page(content: str, refresh: float, layer: int) -> str:
    """Returns the page around a content, which it reads anew every `refresh` seconds.

    Args:
      content: from `content`.
      refresh: seconds between two readings.
      layer: whose layouts the content shows.
    """
    values = {"content": Markup(content), "milliseconds": 1000 * refresh, "layer": layer}
    return html("watch.html.jinja", values)


def content(
    runs: Sequence[WatchedRun], differences: Sequence[tuple[str, list[str]]], layer: int
) -> str:
    """Returns the changing part of the page.

    Args:
      runs: one column each.
      differences: (path, its value in each run) of settings in which the runs differ.
      layer: whose layouts are drawn; the last one of a model with fewer layers.
    """
    columns = [_column(run, f"run{number}", layer) for number, run in enumerate(runs)]
    return html("watch_content.html.jinja", {"runs": columns, "differences": differences})


def _column(run, key, layer):
    histories = {name: run.histories[name] for name in _VARIANTS if run.histories.get(name)}
    loss = drawings.loss_curves(histories, "tokens", f"{key}-loss") if histories else None
    metrics = drawings.metric_curves(histories, f"{key}-metric")
    return {
        "run": run,
        "table": [_row(name, rows, run.steps.get(name, 0)) for name, rows in histories.items()],
        "figures": [figure for figure in (loss and loss[0], *metrics) if figure],
        "layouts": _layouts(run, key, layer),
        "updates": _updates(histories),
        "alerts": list(run.alerts)[-_ROWS_SHOWN:][::-1],
    }


def _row(name, rows, steps):
    """Returns (variant, steps done, training loss, held-out bits per byte, tokens per second)."""

    def last(kinds, field):
        values = [quantities.finite(row.get(field)) for row in rows if row.get("kind") in kinds]
        return next((value for value in reversed(values) if value is not None), None)

    def text(value, pattern):
        return quantities.MISSING if value is None else format(value, pattern)

    step = last(("train", "skipped"), "step") or 0
    ended = " (ended)" if any(row.get("kind") == "final" for row in rows) else ""
    return (
        name,
        f"{step:,.0f} of {steps:,}{ended}",
        text(last(("train",), "loss"), ".3f"),
        text(last(("eval", "final"), "bits_per_byte"), ".3f"),
        text(last(("train",), "tokens_per_second"), ",.0f"),
    )


def _layouts(run, key, layer):
    """Returns the content of the section on layouts: a sentence, and figures where there are."""
    saved = run.layouts
    if isinstance(saved, str):
        return {"text": saved, "exchanges": None, "pictures": [], "compared": False}
    now, before = saved.layouts, saved.first_layouts
    shares = new_shares(before, now)
    step, first = f"{saved.step:,}", f"{saved.first_step:,}"
    if not now:
        text = f"The model is dense since before step {step}: it stores every block."
    elif saved.step == saved.first_step:
        text, before = f"Since step {step}, unchanged.", {}
    else:
        text = f"After {step} steps, in the newest checkpoint; new since step {first}."
    return {
        "text": text,
        "exchanges": layout_figures.exchange_curves(
            run.histories.get("sparse", ()), f"{key}-exchanges"
        ),
        "compared": any(shares.values()),
        "pictures": [
            _picture(name, now[name], before.get(name), shares.get(name), layer, f"{key}-{name}")
            for name in PROJECTIONS
            if name in now
        ],
    }


def _picture(name, layers, before, share, layer, key):
    layer = min(layer, len(layers) - 1)
    layout, old = layers[layer], before[layer] if before else None
    side = layout_figures.cell_side(layout)
    blocks = f"{layout.in_blocks} × {layout.out_blocks} blocks of {layout.block}"
    lines = [blocks, f"{layout.nnz:,} stored, {layout.density:.1%}"]
    if share:
        lines.append(f"{share:.1%} of all layers' are new")
    if side > 1:
        lines.append(f"a cell is {side} × {side} blocks")
    title = f"{name}, layer {layer}"
    return title, layout_figures.layout_picture(layout, old, key, f"Layout of {title}"), lines


def _updates(histories):
    """Returns (variant, step, exchanged blocks, parameters) of the last layout updates."""
    updates = [
        (
            name,
            quantities.finite(row.get("step")) or 0.0,
            quantities.finite(row.get("exchanged")) or 0.0,
            bool(row.get("exchanged")) or any(key.startswith("changed/") for key in row),
            parameters,
        )
        for name, rows in histories.items()
        for row in rows
        if row.get("kind") == "evolution"
        and (parameters := quantities.finite(row.get("parameters"))) is not None
    ]
    return [
        (name, f"{step:,.0f}", f"{share:.1%}" if exchanges else "new phase", f"{parameters:,.0f}")
        for name, step, share, exchanges, parameters in updates[-_ROWS_SHOWN:][::-1]
    ]
