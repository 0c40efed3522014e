"""How time and memory grow with the size of a model, a corpus and a cluster, on this machine.

Every point runs in a process of its own.  Seconds are those of all cores together, the least of a
few rounds, so that other programs on the machine change them little.  A slope is that of the line
through the logarithms of the last points: 1 is linear, 2 quadratic.

    python -m experiments.growth                         half an hour on two busy cores
    python -m experiments.growth --sweeps=width,files    some of them

Leaves OUT/points.jsonl (a line for each point) and OUT/growth.png.  The same command goes on where
it was stopped; delete the lines of points to measure them again.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import setting

from .benchmarks.growth_sweeps import SWEEPS


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured."""

    sweeps: tuple[str, ...] = setting(tuple(SWEEPS), "What becomes larger.", choices=tuple(SWEEPS))
    out: str = setting("experiments/results/growth", "Folder to make, or to go on in.", path=True)


def main(options):
    """Measures the points that are missing, then writes the table and the figure."""
    from .benchmarks import growth_report

    growth_report.report_growth(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
