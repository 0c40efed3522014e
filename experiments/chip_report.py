"""How much faster than dense this chip trains block-sparse models: one command, one page.

Finds the chip, then measures in order of importance, within --minutes: a block forward and
backward, the three products of each projection (grouped, and with index tables), a training step
of the largest scale that fits, a generated token, the overlap of the relay, products of a random
layout, and other libraries where they are installed. Dense and sparse models take turns at density
1/8. Each row runs in a process of its own: a row that fails or takes too long costs that row alone.

    python -m experiments.chip_report
    python -m experiments.chip_report --minutes=30
    python -m experiments.chip_report --scale=pico       two minutes on two CPU cores

Leaves report.html, whose first sentence is the answer, and report.json, which is written after
every row. The same command continues: rows that are done are skipped, others are tried again.
Start it in a shell or a notebook where nothing else uses the chip. Exits with 1 if the answer was
not measured.

With --study it measures what the developers of this package want to know of an H100 or H200, in one
process: rates, the time of a 13B layer by what is kept and by kernel, profiles of a step and of
generated tokens, three trainings on text, and the whole step where it fits. All programs are
compiled first. Each row is written to study.json at once, and the next call skips what is there.
Where a machine is lent for short calls, two of seven minutes do, and the folder goes along:

    python -m experiments.chip_report --study --minutes=6.5 --out=runs/study
    python -m experiments.chip_report --study --minutes=6.5 --out=runs/study   (the same again)
    python -m experiments.chip_report --study --rehearse      every row, with small shapes, on a CPU

The text of the trainings is that of the Python sources installed there; --text=FILE takes a file.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import ABOVE_ZERO, setting
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import SIZES


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured, and for how long."""

    minutes: float = setting(
        9.0,
        "Time of this call, in minutes; remaining rows wait for the next call.",
        legal=ABOVE_ZERO,
    )
    scale: str = setting(
        "auto",
        "Scale of the block and the products; auto is 13b on an accelerator and nano on a CPU.",
        choices=("auto", *SIZES),
    )
    out: str = setting(
        "",
        "Folder of the report; empty is runs/chip_report-CHIP, with --study runs/chip_study-CHIP.",
        path=True,
    )
    study: bool = setting(False, "Measure the rows of a study instead; see above.")
    rehearse: bool = setting(False, "With --study: small shapes, to try it on any machine.")
    text: str = setting(
        "", "With --study: file of text to train on; empty takes Python sources.", path=True
    )


def main(options):
    """Measures, prints and writes; see the module docstring."""
    if options.study:
        from .benchmarks.chip_study import study

        return study.study_chip(options)
    if options.rehearse or options.text:
        raise UserError("--rehearse and --text need --study; add it or leave them out.")
    from .benchmarks.chip_report import collect

    return collect.collect_report(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
