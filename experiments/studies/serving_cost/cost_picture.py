"""One picture of weight and conditional sparsity: the loss against everything that it costs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.training.cost import parameter_count

from ..panels import Curve, Panel, save_panels
from . import arms

NAMES = {
    "narrow": "narrow dense",
    "wide_2": "wide dense",
    "static_2_narrow_heads": "static blocks",
    "pruned_2_narrow_heads_early": "pruned in blocks",
    "experts_8": "8 experts",
    "experts_8_static_2": "8 experts, static blocks",
    "experts_8_pruned_2": "8 experts, pruned in blocks",
}
"""Arms of the picture, and their names there."""

BYTES = 4
"""Of a stored weight, in float32."""

LABEL = "held-out bits a symbol"


def draw(
    narrow: ModelConfig, rows: Sequence[Mapping], decoded: Sequence[Mapping], path: Path
) -> bool:
    """Draws the arms of NAMES with Muon and linear decay; returns whether there are two or more.

    Args:
      narrow: the narrow dense model.
      rows: from `report.row`.
      decoded: from `decoding.measure`; empty without a measurement.
      path: PNG file to write.
    """
    chosen = [
        r
        for r in rows
        if r["arm"] in NAMES and (r["optimizer"], r["schedule"]) == ("muon", "linear")
    ]
    lengths = [r["length"] for r in chosen]
    length = max(dict.fromkeys(lengths), key=lengths.count, default=0)
    at_length = {r["arm"]: r for r in chosen if r["length"] == length}
    if len(at_length) < 2:
        return False
    models = {name: arms.served_model(narrow, arms.ARMS[name]) for name in at_length}
    stored = {name: BYTES * parameter_count(model) / 1e3 for name, model in models.items()}
    seconds: dict[str, float] = {}
    for row in decoded:
        timed = arms.served_model(narrow, arms.ARMS[row["arm"]])
        if row["batch"] == 1:
            seconds |= {n: row["over_narrow"] for n, model in models.items() if model == timed}
    training = {}
    for name in (name for name in NAMES if name in at_length):
        arm_results = sorted((r for r in chosen if r["arm"] == name), key=lambda r: r["length"])
        training[NAMES[name]] = _curve([r["flops"] / 1e9 for r in arm_results], arm_results)

    def points(costs):
        return {
            NAMES[name]: _curve([costs[name]], [at_length[name]])
            for name in NAMES
            if name in at_length and name in costs
        }

    served = {name: row["served_flops"] / 1e3 for name, row in at_length.items()}
    ticks = sorted({float(f"{r['flops'] / 1e9:.2g}") for r in chosen if r["arm"] == "narrow"})
    means = [r["mean"] for r in at_length.values()]
    margin = 0.1 * (max(means) - min(means)) + 0.01
    limits = min(means) - margin, max(means) + margin
    panels = [
        Panel("Training", "training GFLOPs", LABEL, training, log_x=10, ticks=ticks),
        Panel("Served FLOPs", "thousand FLOPs a token", LABEL, points(served), limits=limits),
        Panel("Memory", "stored weights, kB", LABEL, points(stored), limits=limits),
    ]
    if seconds:
        label = "seconds a token over narrow"
        panels.append(
            Panel("Served seconds, 32 times as wide", label, LABEL, points(seconds), limits=limits)
        )
    title = "What a loss costs"
    if len(set(lengths)) > 1:
        title += f"; all but the first at {length} tokens a served weight"
    save_panels(path, panels, title)
    return True


def _curve(x, rows):
    """Returns means over seeds, with bars from the lowest to the highest seed."""
    losses = [list(r["losses"].values()) for r in rows]
    return Curve(
        x, [r["mean"] for r in rows], list(map(min, losses)), list(map(max, losses)), bars=True
    )
