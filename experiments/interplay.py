"""Sparsity, fusion and pipelining together, predicted and measured (arXiv 2304.05511, first claim).

{dense, 1/2, 1/4, 1/8 of the blocks} x {unfused, fused} x {serial, pipelined}: sparsity alone lowers
the operational intensity of every section; fusion wins it back. Whole training steps are measured
on this machine, fused as XLA compiles them and unfused with its fusion switched off; predictions
come from the cost model with the rates of the dense and sparse sections measured here.

A chip is one core of this machine, and --stages of them work at once: serial, each on a model of
its own, or pipelined, as real processes that hand activations on (1F1B). A step has
--micro_batches; the table compares a chip's time for one of them.

    python -m experiments.interplay                      nano, about ten minutes
    python -m experiments.interplay --hardware=h100 --scale=13b --measure=no

Leaves OUT/interplay.md, OUT/interplay.csv, OUT/interplay.png and OUT/roofline.png, and writes the
measurements as JSON.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, setting
from sparse_dataflow.runs.run_config import SIZES

from .benchmarks.options import KEEP_HELP, RESULTS


@dataclasses.dataclass(frozen=True)
class Options:
    """What is predicted and measured."""

    scale: str = setting("nano", "Named size.", choices=tuple(SIZES))
    hardware: str = setting(
        "this",
        "Chip that is predicted: this, the CPU under this process; a name; or a TOML file.",
    )
    measure: bool = setting(True, "Measure steps here.")
    tokens: int = setting(
        256,
        "Tokens of a micro-batch: as many sequences as fit, at least one.",
        legal=AT_LEAST_ONE,
    )
    block: int = setting(64, "Side of a square block.", legal=AT_LEAST_ONE)
    stages: int = setting(2, "Stages of the pipeline.", legal=AT_LEAST_ONE)
    micro_batches: int = setting(8, "Micro-batches of a step.", legal=AT_LEAST_ONE)
    rounds: int = setting(3, "Timed steps.", legal=AT_LEAST_ONE)
    out: str = setting("runs/interplay", "Folder to make.", path=True)
    keep: str = setting(RESULTS, KEEP_HELP, path=True)


def main(options):
    """Measures, predicts, prints and writes; see the module docstring."""
    from .benchmarks import interplay_report

    interplay_report.report_interplay(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
