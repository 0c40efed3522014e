"""The pipeline's measured bubble beside the bubble of its table, on virtual CPU devices.

The executor's loop runs every schedule over --stages devices of this machine, with blocks that
sleep: each forward, input gradient, weight gradient and recomputation takes --milliseconds, so
devices do not compete for cores, and everything else (the loop, transfers, waiting for neighbours)
costs its real time. The measured bubble is one minus the time that blocks were seen to sleep over
stages times the length of the step; median of --rounds.

    python -m experiments.pipeline_bubble
    python -m experiments.pipeline_bubble --stages=4 --micro_batches=8 --page=schedules.html

A minute with the defaults. The overhead of a tick adds to the measured bubble; on a busy machine
make actions longer.
"""

import dataclasses
import os

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import ABOVE_ZERO, AT_LEAST_ONE, setting

from .benchmarks.options import KEEP_HELP, RESULTS


@dataclasses.dataclass(frozen=True)
class Options:
    """What is run and how often."""

    stages: int = setting(8, "Devices in a row.", legal=AT_LEAST_ONE)
    micro_batches: int = setting(
        16, "Micro-batches of a step; a multiple of --stages.", legal=AT_LEAST_ONE
    )
    chunks: int = setting(2, "Model chunks a stage, of interleaved.", legal=AT_LEAST_ONE)
    milliseconds: float = setting(40.0, "Time of one action of a stage.", legal=ABOVE_ZERO)
    rounds: int = setting(3, "Timed steps of each schedule.", legal=AT_LEAST_ONE)
    keep: str = setting(RESULTS, KEEP_HELP, path=True)
    page: str = setting("", "HTML file to draw the schedules in; empty draws none.", path=True)


def main(options):
    """Measures, prints and writes; see the module docstring."""
    # XLA's pool has a thread a core, and each sleeping device needs one.
    os.environ["NPROC"] = str(4 * options.stages)
    from .benchmarks import pipeline_bubble

    pipeline_bubble.measure_bubbles(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
