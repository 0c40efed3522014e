"""The planner's predictions against published runs: a table, a CSV file and a figure; no jax."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from sparse_dataflow.files import folders, tables
from sparse_dataflow.hardware import chips
from sparse_dataflow.planning import fitting, published
from sparse_dataflow.planning.efficiency import EFFICIENCIES, Efficiency
from sparse_dataflow.planning.fitting import Error
from sparse_dataflow.reporting import planner_figures
from sparse_dataflow.runs.planning.options import named_model

Constants = Mapping[str, Efficiency]
"""Chip family -> its constants."""


def run(fit: bool, out: str) -> None:
    """Prints every published row with its prediction, then writes truth.csv and truth.png.

    Args:
      fit: whether to fit the constants again, instead of taking those of `planning.efficiency`.
      out: output folder.

    Raises:
      UserError: the folder holds other files.
    """
    folder = Path(out)
    folders.refuse_foreign(folder, "planner_truth")
    constants = _fitted_constants() if fit else EFFICIENCIES
    errors = {source: fitting.errors(source, constants) for source in published.SOURCES}
    for source in errors:
        _print_source(source, errors[source])
    print()
    _print_summary([error for source in errors.values() for error in source])
    _print_scalings(constants)
    _print_sparse(constants)
    folders.claim(folder, "planner_truth")
    rows = [_row(source, e) for source in errors for e in errors[source]]
    tables.write_csv(folder / "truth.csv", rows)
    points = {
        source: [(e.row.seconds, e.seconds, e.row.split == "fit") for e in errors[source]]
        for source in errors
    }
    title = "Steps of published runs: predicted against measured"
    planner_figures.accuracy(folder / "truth.png", points, title)
    print(folder / "truth.png")


def _fitted_constants() -> Constants:
    families = fitting.fit_families()
    for family, constants in families.items():
        differs = "" if constants == EFFICIENCIES[family] else "  (differs)"
        print(f"{family}: {constants}{differs}")
    return {**EFFICIENCIES, **families}


def _print_source(source: str, errors: Iterable[Error]) -> None:
    print(f"\n{source}\n{'run':<30}{'published':>11}{'predicted':>11}{'error':>8}  split, plan")
    for e in errors:
        print(
            f"{e.row.name:<30}{e.row.value:>11.1f}{e.figure:>11.1f}{e.relative:>+8.1%}  "
            f"{e.row.split}, {e.row.plan_status}, limited by {e.limit}"
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
        "limit": error.limit,
    }


def _print_summary(errors: list[Error]) -> None:
    held_out = [e for e in errors if e.row.split == "test"]
    for label, rows in {
        "held out": held_out,
        "held out, plan verified": [e for e in held_out if e.row.plan_status == "verified"],
        "fitted": [e for e in errors if e.row.split == "fit"],
    }.items():
        median, worst = fitting.summary(rows)
        print(f"{label:<27}{len(rows):>3} rows: median {median:.1%}, worst {worst:.1%}")


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
