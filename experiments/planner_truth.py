"""Predicted against published: Frontier, Megatron on A100 and H100, MaxText on TPU v4 to v6e.

Every row of sparse_dataflow/planning/published with its prediction and error. One set of constants
a chip family; those rows marked "fit" made the constants, those marked "test" did not. Needs no
accelerator and loads no jax.

    python -m experiments.planner_truth             half a minute
    python -m experiments.planner_truth --fit       fits the constants anew and compares

Leaves OUT/truth.csv and OUT/truth.png.
"""

from experiments import flags
from experiments.command_line import Flag, Group

TRUTH = Group(
    "Truth",
    "what is compared",
    (
        Flag("fit", "switch", "no", "Fit the constants anew."),
        Flag("out", "text", "runs/planner_truth", "Folder to make."),
    ),
)
GROUPS = (TRUTH,)


def main(values):
    """Prints and keeps the table; see the module docstring."""
    import csv
    from pathlib import Path

    from sparse_dataflow.files import folders
    from sparse_dataflow.planning import fitting, published
    from sparse_dataflow.planning.efficiency import EFFICIENCIES
    from sparse_dataflow.reporting import planner_figures

    folder = Path(values.out)
    folders.refuse_foreign(folder, "planner_truth")
    constants = dict(EFFICIENCIES)
    if values.fit == "yes":
        found = fitting.fitted()
        for family, fitted in found.items():
            print(f"{family}: {fitted}{'' if fitted == constants[family] else '  (differs)'}")
        constants |= found
    everything = {source: fitting.errors(source, constants) for source in published.SOURCES}
    rows, points = [], {}
    for source, errors in everything.items():
        print(
            f"\n{source}\n{'run':<30}{'published':>11}{'predicted':>11}{'error':>8}  split, layout"
        )
        for e in errors:
            r = e.row
            print(
                f"{r.name:<30}{r.value:>11.1f}{e.figure:>11.1f}{e.relative:>+8.1%}  {r.split}, "
                f"{r.layout_status}, limited by {e.limit}"
            )
            rows.append([source, r.name, r.unit, r.value, e.figure, e.relative, r.split])
            rows[-1] += [r.number, r.layout_status, e.limit]
        points[source] = [
            (e.row.seconds, fitting.predicted(e.row, constants[e.row.chip.family]),
             e.row.split == "fit")
            for e in errors
        ]  # fmt: skip
    print()
    for label, test in (
        ("held out", lambda r: r.split == "test"),
        (
            "held out, layout verified",
            lambda r: r.split == "test" and r.layout_status == "verified",
        ),
        ("fitted", lambda r: r.split == "fit"),
    ):
        errors = [e for es in everything.values() for e in es if test(e.row)]
        median, worst = fitting.summary(errors)
        print(f"{label:<27}{len(errors):>3} rows: median {median:.1%}, worst {worst:.1%}")
    _print_scalings(constants)
    _print_sparse(constants)
    folders.claim(folder, "planner_truth")
    with (folder / "truth.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            "source run unit published predicted error split number layout limit".split()
        )
        writer.writerows(rows)
    title = "Steps of published runs: predicted against measured"
    print(planner_figures.save(planner_figures.truth(points, title), folder / "truth.png"))


def _print_scalings(constants):
    from sparse_dataflow.planning import fitting, published

    print("\nscaling efficiency, arXiv 2312.12705 (layouts recalled: in no statistic above)")
    for study in published.scalings():
        found = fitting.scaling_efficiency(study, constants[study.chip.family])
        print(
            f"{study.name:<14}{study.before.chips:>5} to {study.after.chips:>5} chips: published "
            f"{study.value:.0f}%, predicted {100 * found:.0f}%"
        )


def _print_sparse(constants):
    from experiments import planner_flags
    from sparse_dataflow.hardware import chips
    from sparse_dataflow.planning import fitting

    chip = chips.lookup("a100-80gb")
    dense = planner_flags.model("13b")
    sparse = planner_flags.model("13b", 1 / 8)
    print("\n13B on a100-80gb, one micro-batch of 8 sequences, ms: dense, 1/8 of the blocks, ratio")
    for fused in (True, False):
        found = [
            1e3 * fitting.block_seconds(config, chip, constants[chip.family], fused)
            for config in (dense, sparse)
        ]
        print(
            f"{'fused' if fused else 'unfused':<9}{found[0]:>9.0f}{found[1]:>9.0f}"
            f"{found[0] / found[1]:>7.2f}x"
        )
    print("arXiv 2304.05511 reports 4.5x end to end, against a dense A100, on another chip")


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
