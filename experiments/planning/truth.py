"""The planner's predictions against published runs: a table, a CSV file and a figure; no jax."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from sparse_dataflow.commands.planning.options import named_model
from sparse_dataflow.files import folders, output
from sparse_dataflow.hardware import chips
from sparse_dataflow.planner import bands
from sparse_dataflow.planner.efficiency import EFFICIENCIES, Efficiency

from . import figures, fitting, png, published, run_memory
from .fitting import Error

Constants = Mapping[str, Efficiency]
"""Chip family -> its constants."""

_CONFIRMATION_COLUMNS = (
    '"inside": of the runs whose kind has a band, the share in it; "other": share in that of '
    'other\nsoftware; "plans": what nine of ten errors are from the median of their model, '
    "chips and source"
)
_LABELS = {"confirm": "confirmation", "test": "held out", "fit": "fitted", "terms": "new terms"}


def compare_published(fit: bool, out: str) -> None:
    """Prints the predictions of published rows, then writes truth.csv and truth.png.

    Confirmation rows are summed up by source; truth.csv has every row.

    Args:
      fit: whether to fit the constants again, instead of taking those of `planner.efficiency`.
      out: output folder.

    Raises:
      UserError: the folder holds other files.
    """
    folder = Path(out)
    folders.refuse_foreign(folder, "planner_truth")
    constants = _fitted_constants() if fit else EFFICIENCIES
    errors = {source: fitting.errors(source, constants) for source in published.SOURCES}
    confirmations = [
        {source: fitting.errors(source, constants) for source in sources}
        for sources in published.CONFIRMATIONS
    ]
    for source in errors:
        _print_source(source, errors[source])
    print()
    everything = [error for source in errors.values() for error in source]
    _print_summary(everything)
    _print_domains(everything)
    diagnosed = {source: fitting.errors(source, constants) for source in published.DIAGNOSED}
    _print_confirmation("rows of new terms", diagnosed)
    errors |= diagnosed
    for number, confirmation in enumerate(confirmations, 1):
        _print_confirmation(f"confirmation {number}", confirmation)
        errors |= confirmation
    print(_CONFIRMATION_COLUMNS)
    everything = [error for source in errors.values() for error in source]
    _print_memory(everything)
    _print_scalings(constants)
    _print_sparse(constants)
    folders.claim(folder, "planner_truth")
    rows = [_row(source, e) for source in errors for e in errors[source]]
    output.write_csv(folder / "truth.csv", rows)
    points = {
        label: [
            (e.row.seconds, e.seconds, split == "fit") for e in everything if e.row.split == split
        ]
        for split, label in _LABELS.items()
    }
    title = "Steps of published runs: predicted against measured"
    _plot(folder / "truth.png", points, title)
    print(folder / "truth.png")


def _fitted_constants() -> Constants:
    rows = [row for source in published.SOURCES for row in published.rows(source)]
    families = fitting.fit_all(rows)
    for family, constants in families.items():
        differs = "" if constants == EFFICIENCIES[family] else "  (differs)"
        print(f"{family}: {constants}{differs}")
    for domain, band in fitting.fit_bands(rows, families).items():
        print(f"{domain}: {band}{'' if band == bands.BANDS.get(domain) else '  (differs)'}")
    print(f"other software: {fitting.fit_other_software(rows, families):.2f}")
    return {**EFFICIENCIES, **families}


def _print_source(source: str, errors: Iterable[Error]) -> None:
    print(f"\n{source}\n{'run':<30}{'published':>11}{'predicted':>11}{'error':>8}  split, plan")
    for e in errors:
        print(
            f"{e.row.name:<30}{e.row.value:>11.1f}{e.figure:>11.1f}{e.relative:>+8.1%}  "
            f"{e.row.split}, {e.row.plan_status}, limited by {e.limit}"
            f"{', assumed: ' + ' '.join(e.row.assumed) if e.row.assumed else ''}"
        )


def _row(source: str, error: Error) -> dict:
    row = error.row
    return {
        "source": source,
        "run": row.name,
        "unit": row.unit,
        "published": row.value,
        "predicted": error.figure,
        "error": error.relative,
        "split": row.split,
        "number": row.number,
        "plan": row.plan_status,
        "assumed": " ".join(row.assumed),
        "constants": row.key,
        "regime": bands.regime(row.config, row.sequence),
        "memory_share": run_memory.run_bytes(row) / row.chip.capacity,
        "limit": error.limit,
    }


def _print_summary(errors: list[Error]) -> None:
    held_out = [e for e in errors if e.row.split == "test"]
    for label, rows in {
        "held out": held_out,
        "held out, 7B+ to 8k tokens": [e for e in held_out if _regime(e) == "large"],
        "held out, plan verified": [e for e in held_out if e.row.plan_status == "verified"],
        "fitted": [e for e in errors if e.row.split == "fit"],
    }.items():
        median, worst = fitting.summary(rows)
        print(f"{label:<27}{len(rows):>3} rows: median {median:.1%}, worst {worst:.1%}")


def _print_domains(errors: list[Error]) -> None:
    """Prints the band of each kind of run beside the errors of its held-out runs."""
    print(
        f"\n{'held out, by kind':<34}{'runs':>5}{'median':>8}{'worst':>8}{'band':>6}{'inside':>8}"
    )
    inside = []
    held_out = [e for e in errors if e.row.split == "test"]
    for key, regime in dict.fromkeys((e.row.key, _regime(e)) for e in held_out):
        kind = [e for e in held_out if (e.row.key, _regime(e)) == (key, regime)]
        band = bands.BANDS.get((key, regime))
        hits = [band is not None and abs(np.log1p(e.relative)) <= band.error for e in kind]
        inside += hits
        median, worst = fitting.summary(kind)
        printed = "none" if band is None else f"{band.error:.0%}"
        print(f"{f'{key}, {regime}':<34}{len(kind):>5}{median:>8.1%}{worst:>8.1%}{printed:>6}"
              f"{np.mean(hits):>8.0%}")  # fmt: skip
    print(f"{np.mean(inside):.0%} of {len(inside)} held-out runs are inside their band")


def _print_confirmation(title: str, errors: Mapping[str, list[Error]]) -> None:
    """Prints the errors of rows that no fit and no choice of terms has seen."""
    everything = [error for source in errors.values() for error in source]
    groups = {
        "all": everything,
        "7B+ to 8k tokens": [e for e in everything if _regime(e) == "large"],
        **errors,
    }
    head = f"{title:<22}{'runs':>5}{'median':>8}{'worst':>8}"
    print(f"\n{head}{'inside':>8}{'other':>8}{'plans':>8}")
    for label, rows in groups.items():
        median, worst = fitting.summary(rows)
        sizes = np.abs(np.log([e.seconds / e.row.seconds for e in rows]))
        kinds = [bands.BANDS.get((e.row.key, _regime(e))) for e in rows]
        inside = [size <= band.error for size, band in zip(sizes, kinds) if band]
        share = f"{np.mean(inside):.0%}" if inside else "-"
        other = f"{np.mean(sizes <= bands.OTHER_SOFTWARE):.0%}"
        columns = f"{share:>8}{other:>8}{_between_plans(rows):>8}"
        print(f"{label:<22}{len(rows):>5}{median:>8.1%}{worst:>8.1%}{columns}")


def _between_plans(errors: Iterable[Error]) -> str:
    """Returns the 90% quantile of log errors relative to other plans of the same model and chips.

    Groups of fewer than three plans do not count; "-" without groups.
    """
    groups: dict[tuple, list[float]] = {}
    for error in errors:
        row = error.row
        group = (row.source, row.config, row.sequence, row.plan.chips)
        groups.setdefault(group, []).append(np.log(error.seconds / row.seconds))
    large = [np.array(sizes) for sizes in groups.values() if len(sizes) > 2]
    if not large:
        return "-"
    return f"{np.quantile(np.concatenate([abs(s - np.median(s)) for s in large]), 0.9):.0%}"


def _print_memory(errors: list[Error]) -> None:
    shares = [run_memory.run_bytes(e.row) / e.row.chip.capacity for e in errors]
    over = {e.row.name: f"{share:.2f}" for e, share in zip(errors, shares) if share > 1.1}
    print(f"{len(over)} of {len(shares)} runs need more than 110% of their chip's memory: {over}")


def _regime(error: Error) -> str:
    return bands.regime(error.row.config, error.row.sequence)


def _print_scalings(constants: Constants) -> None:
    print("\nscaling efficiency, arXiv 2312.12705 (plans recalled: in no statistic above)")
    for study in published.scalings():
        efficiency = fitting.scaling_efficiency(study, constants[study.chip.family])
        print(
            f"{study.name:<14}{study.before.chips:>5} to {study.after.chips:>5} chips: published "
            f"{study.value:.0f}%, predicted {100 * efficiency:.0f}%"
        )


def _print_sparse(constants: Constants) -> None:
    chip = chips.lookup("a100-80gb")
    print("\n13B on a100-80gb, one micro-batch of 8 sequences, ms: dense, 1/8 of the blocks, ratio")
    for fused in (True, False):
        dense, sparse = (
            1e3 * fitting.block_seconds(config, chip, constants[chip.family], fused)
            for config in (named_model("13b"), named_model("13b", 1 / 8))
        )
        label = "fused" if fused else "unfused"
        print(f"{label:<9}{dense:>9.0f}{sparse:>9.0f}{dense / sparse:>7.2f}x")
    print("arXiv 2304.05511 reports 4.5x end to end, against a dense A100, on another chip")


def _plot(
    path: Path, points: Mapping[str, Sequence[tuple[float, float, bool]]], title: str
) -> None:
    """Plots predicted against published step times on logarithmic axes.

    Args:
      path: PNG file to write.
      points: source -> (published seconds, predicted seconds, whether the row was fitted).
      title: title of the figure.
    """
    values = [value for rows in points.values() for row in rows for value in row[:2]]
    ends = np.array([min(values) / 1.5, max(values) * 1.5])
    with png.figure(path, 6.4, 4.6, title) as (_, [[axes]]):
        axes.fill_between(ends, ends * 0.9, ends * 1.1, color="#dddddd", linewidth=0)
        axes.plot(ends, ends, color="#666666", linewidth=0.8)
        for colour, marker, (source, rows) in zip(figures.COLOURS, figures.MARKERS, points.items()):
            for fitted in (False, True):
                subset = [row for row in rows if row[2] == fitted]
                axes.plot(
                    [published for published, _, _ in subset],
                    [predicted for _, predicted, _ in subset],
                    marker,
                    color=colour,
                    markerfacecolor="white" if fitted else colour,
                    markersize=5,
                    label=None if fitted else source,
                )
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axes.set(xlabel="published, seconds per step", ylabel="predicted, seconds per step")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(figures.PLAIN)
        axes.legend(title="filled: held out; grey band: within 10%", fontsize=8)
