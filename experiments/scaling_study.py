"""Weak and strong scaling of 22B, 175B, 1T and sparse 13B to 8,192 chips, and what limits them.

Every point is the fastest legal parallel plan that the planner finds for that number of chips.
Weak: the batch grows with the chips; strong: the batch is constant. Needs no accelerator: these are
predictions of the cost model; `planner_truth` prints its errors.

    python -m experiments.scaling_study                               about a minute
    python -m experiments.scaling_study --hardware=h200 --kinds=weak

Leaves OUT/scaling.csv, OUT/scaling.md and a figure of each kind.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.planning.options import CHIP_COUNTS, STUDIES
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, setting


@dataclasses.dataclass(frozen=True)
class Options:
    """What is scaled on which chips."""

    hardware: str = setting(
        "mi250x,h100,tpu-v5p", "Kinds of chips, comma separated; each a name, or a TOML file."
    )
    kinds: tuple[str, ...] = setting(STUDIES, "Kinds of scaling.", choices=STUDIES)
    most: int = setting(CHIP_COUNTS[-1], "The largest number of chips.", legal=AT_LEAST_ONE)
    out: str = setting(
        "runs/scaling_study", "Output folder; made where it does not exist.", path=True
    )


def main(options):
    """Searches every point, then writes tables and figures."""
    from .planning import scaling

    scaling.study_scaling(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
