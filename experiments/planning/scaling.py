"""Weak and strong scaling, predicted: the fastest plan for every number of chips; loads no jax."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.ticker import NullFormatter

from sparse_dataflow.commands.planning import plan_rows
from sparse_dataflow.commands.planning.options import CHIP_COUNTS, STUDIES, named_model
from sparse_dataflow.files import folders, output
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import chips
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planner import search

from . import figures, png

MODELS = {"22b": ("22b", 1.0), "175b": ("175b", 1.0), "1t": ("1t", 1.0), "13b 1/8": ("13b", 0.125)}
"""Label -> (scale, density)."""

WEAK = 4
"""Sequences per chip in weak scaling."""

STRONG = {"22b": 4096, "175b": 4096, "1t": 8192, "13b 1/8": 4096}
"""Sequences per step in strong scaling: 8.4 M and 16.8 M tokens."""

MEMORY_BOUND = 1.05
"""A point is limited by memory where its best plan without that limit is faster by this factor."""


def study_scaling(options) -> None:
    """Prints a line for each model and chip, then writes scaling.csv, scaling.md and figures.

    Args:
      options: of `experiments.scaling_study`.

    Raises:
      UserError: no such chip, no study, no point, or the folder holds other files.
    """
    hardware = [chips.lookup(name.strip()) for name in options.hardware.split(",")]
    counts = [n for n in CHIP_COUNTS if n <= options.most]
    if not counts:
        raise UserError(f"--most={options.most} leaves no point; legal: {CHIP_COUNTS[0]} or more.")
    if not options.kinds:
        raise UserError(f"--kinds=none leaves no study; legal: {', '.join(STUDIES)}.")
    with folders.claimed(Path(options.out), "scaling_study") as folder:
        rows = [row for kind in options.kinds for row in _study(kind, hardware, counts, folder)]
        output.write_csv(folder / "scaling.csv", rows)
        (folder / "scaling.md").write_text(_markdown(rows))
        print(folder / "scaling.md")


def _study(kind: str, hardware: list[Chip], counts: list[int], folder: Path) -> list[dict]:
    """The points of one kind; prints a line for each model and chip, and writes the figure."""
    rows = []
    panels: dict[str, dict[str, list]] = {chip.name: {} for chip in hardware}
    for chip in hardware:
        for label in MODELS:
            points = list(filter(None, (_point(kind, label, chip, n) for n in counts)))
            rows += points
            if points:
                panels[chip.name][label] = [
                    (p["chips"], 100 * p["mfu"], p["limit"]) for p in points
                ]
                _print_line(kind, label, chip, points[0], points[-1])
    if not rows:
        raise UserError(
            f"No model fits on {counts[-1]} chips of {', '.join(panels)}; legal: more chips by "
            "--most, or others by --hardware."
        )
    title = f"{kind.capitalize()} scaling, best plan of each point, predicted"
    _plot(folder / f"{kind}.png", panels, "MFU, %", title)
    print(folder / f"{kind}.png")
    return rows


def _point(kind: str, label: str, chip: Chip, count: int) -> dict | None:
    """The best plan of one point as a row, or None where no plan is legal."""
    config = named_model(*MODELS[label])
    batch = WEAK * count if kind == "weak" else STRONG[label]
    request = search.Request(config, config.max_len, batch, chip, count)
    priced = search.price(request)
    best = priced.ranked(1)
    if not best:
        return None
    plan, speed = best[0]
    row = plan_rows.row(request, plan, speed)
    if priced.unbounded_speed > MEMORY_BOUND * speed:
        row["limit"] = "memory size"
    head = {"kind": kind, "model": label, "hardware": chip.name, "chips": count, "batch": batch}
    return head | row


def _print_line(kind, label, chip, first, last):
    share = last["tokens_per_second_per_chip"] / first["tokens_per_second_per_chip"]
    print(
        f"{kind:<6} {label:<8} {chip.name:<11} {first['chips']:>5} to {last['chips']:>5} chips: "
        f"{share:.0%} of the throughput per chip, MFU {first['mfu']:.1%} to {last['mfu']:.1%}, "
        f"limited by {last['limit']}",
        flush=True,
    )


def _markdown(rows):
    names = ["kind", "model", "hardware", "chips", "batch", "mfu", "tokens_per_second_per_chip"]
    names += ["stage", "fsdp", "tensor", "micro_batch", "schedule", "zero", "remat", "limit"]
    formats = {"mfu": ".1%", "tokens_per_second_per_chip": ",.1f"}
    cells = ([f"{row[name]:{formats.get(name, '')}}" for name in names] for row in rows)
    return output.markdown([name.replace("_", " ") for name in names], cells) + "\n"


def _plot(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float, str]]]],
    ylabel: str,
    title: str,
) -> None:
    """Plots lines over the number of chips; markers show the limit of each point.

    Args:
      path: PNG file to write.
      panels: panel title -> line label -> (chips, value, limit) of each point.
      ylabel: label of the values.
      title: title of the figure.
    """
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    points = [point for lines in panels.values() for line in lines.values() for point in line]
    limits = list(dict.fromkeys(limit for _, _, limit in points))
    width, columns = 3.1 * len(panels) + 1.8, len(panels)
    with png.figure(path, width, 3.3, title, columns=columns, sharey=True) as (figure, [row]):
        for axes, (panel, lines) in zip(row, panels.items()):
            for label, line in lines.items():
                colour, (sizes, values, _) = figures.COLOURS[labels.index(label)], zip(*line)
                axes.plot(sizes, values, color=colour, linewidth=1.2)
                for count, value, limit in line:
                    marker = figures.MARKERS[limits.index(limit) % len(figures.MARKERS)]
                    axes.plot(count, value, marker, color=colour, ms=5, markeredgecolor="white")
            axes.set(xscale="log", title=panel, xlabel="chips")
            axes.set_ylim(0, 1.08 * max(value for _, value, _ in points))
            ticks = sorted({count for line in lines.values() for count, _, _ in line})
            axes.set_xticks(ticks[::2], [f"{t:,}" for t in ticks[::2]])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.tick_params(axis="x", labelsize=7)
        row[0].set(ylabel=ylabel)
        figures.legend(figure, row[0], "-", labels, limits)
