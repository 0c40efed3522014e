"""Weak and strong scaling of 22B, 175B, 1T and sparse 13B to 8,192 chips, and what limits them.

Every point is the fastest legal layout that the planner finds for that number of chips. Weak: the
batch grows with the chips; strong: it stays. Needs no accelerator: these are predictions of the
cost model, whose errors `planner_truth` tells.

    python -m experiments.scaling_study                               about a minute
    python -m experiments.scaling_study --hardware=h200 --kinds=weak

Leaves OUT/scaling.csv, OUT/scaling.md and a figure of each kind.
"""

from experiments import flags, planner_flags
from experiments.command_line import AT_LEAST_ONE, Flag, Group

KINDS = ("weak", "strong")
MODELS = {"22b": ("22b", 1.0), "175b": ("175b", 1.0), "1t": ("1t", 1.0), "13b 1/8": ("13b", 0.125)}
CHIPS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Sequences a chip in weak scaling, and of every step in strong scaling (4.2 M tokens to 16.8 M).
WEAK = {"22b": 4, "175b": 4, "1t": 4, "13b 1/8": 4}
STRONG = {"22b": 4096, "175b": 4096, "1t": 8192, "13b 1/8": 4096}
MEMORY_BOUND = 1.05
"""A point is limited by memory where its best layout without that limit is faster by this."""

STUDY = Group(
    "Study",
    "what is scaled on what",
    (
        Flag(
            "hardware",
            "text",
            "mi250x,h100,tpu-v5p",
            "Chips, comma separated; see layout_search.",
        ),
        Flag("kinds", "list", "all", "Which studies.", lambda: KINDS),
        Flag(
            "most",
            "integer",
            CHIPS[-1],
            "The largest number of chips.",
            legal=AT_LEAST_ONE,
        ),
        Flag("out", "text", "runs/scaling_study", "Folder to make."),
    ),
)
GROUPS = (STUDY,)


def main(values):
    """Searches every point, then writes tables and figures."""
    import csv
    from pathlib import Path

    from sparse_dataflow.files import folders
    from sparse_dataflow.files.errors import UserError
    from sparse_dataflow.hardware import chips
    from sparse_dataflow.reporting import planner_figures

    hardware = [chips.lookup(name.strip()) for name in values.hardware.split(",")]
    counts = [n for n in CHIPS if n <= values.most]
    if not counts:
        raise UserError(f"--most={values.most} leaves no point; legal: {CHIPS[0]} or more.")
    folder = Path(values.out)
    folders.claim(folder, "scaling_study")
    rows = []
    for kind in values.kinds:
        panels = {}
        for chip in hardware:
            lines = {}
            for label in MODELS:
                found = [_point(kind, label, chip, n) for n in counts]
                found = [row for row in found if row]
                rows += found
                if found:
                    lines[label] = [(r["chips"], 100 * r["mfu"], r["limit"]) for r in found]
                    efficiency = found[-1]["tokens_per_second_per_chip"]
                    efficiency /= found[0]["tokens_per_second_per_chip"]
                    print(
                        f"{kind:<6} {label:<8} {chip.name:<11} {found[0]['chips']:>5} to "
                        f"{found[-1]['chips']:>5} chips: {efficiency:.0%} kept, MFU "
                        f"{found[0]['mfu']:.1%} to {found[-1]['mfu']:.1%}, limited by "
                        f"{found[-1]['limit']}",
                        flush=True,
                    )
            panels[chip.name] = lines
        title = f"{kind.capitalize()} scaling, best layout of each point, predicted"
        figure = planner_figures.scaling(panels, "MFU, %", title)
        print(planner_figures.save(figure, folder / f"{kind}.png"))
    with (folder / "scaling.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "scaling.md").write_text(_markdown(rows))
    print(folder / "scaling.md")


def _point(kind, label, chip, count):
    """The best layout of one point as a row, or None where no layout is legal."""
    from experiments import layout_report
    from sparse_dataflow.planning import search

    scale, density = MODELS[label]
    config = planner_flags.model(scale, density)
    batch = WEAK[label] * count if kind == "weak" else STRONG[label]
    request = search.Request(config, config.max_len, batch, chip, count)
    priced = search.price(request, search.space(request))
    best = priced.ranked(1)
    if not best:
        return None
    index, choice = best[0]
    speed = priced.throughput.reshape(-1)[index]
    found = layout_report.row(request, choice, speed)
    if priced.unbounded_speed > MEMORY_BOUND * speed:
        found["limit"] = "memory size"
    head = {"kind": kind, "model": label, "hardware": chip.name, "chips": count, "batch": batch}
    return head | found


def _markdown(rows):
    names = ["kind", "model", "hardware", "chips", "batch", "mfu", "tokens_per_second_per_chip"]
    names += ["stage", "fsdp", "tensor", "micro_batch", "schedule", "zero", "remat", "limit"]
    lines = [f"| {' | '.join(n.replace('_', ' ') for n in names)} |", "|" + " --- |" * len(names)]
    for row in rows:
        cells = dict(row)
        cells["mfu"] = f"{row['mfu']:.1%}"
        cells["tokens_per_second_per_chip"] = f"{row['tokens_per_second_per_chip']:,.1f}"
        lines.append(f"| {' | '.join(str(cells[n]) for n in names)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
