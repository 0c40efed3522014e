"""Predicted against measured: the time of a training step on this machine's CPU.

Measures the rate of each section of one block by itself, and of the head and the optimizer, puts
them into the planner's cost model, and compares its prediction for the whole model's step with the
step itself, dense and sparse.

    python -m experiments.predict_check                              nano and 125m, about 2 minutes
    python -m experiments.predict_check --scales=micro --tokens=2048

Writes the result as JSON.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import A_FRACTION, AT_LEAST_ONE, AT_LEAST_ZERO, setting
from sparse_dataflow.runs.run_config import SIZES

from .benchmarks.options import KEEP_HELP, RESULTS


@dataclasses.dataclass(frozen=True)
class Options:
    """What is predicted and measured."""

    scales: tuple[str, ...] = setting(("nano", "125m"), "Named sizes.", choices=tuple(SIZES))
    tokens: int = setting(
        1024,
        "Tokens of a step: as many sequences of the scale's length as fit, at least one.",
        legal=AT_LEAST_ONE,
    )
    sequence: int = setting(
        0, "Tokens in a sequence; 0 is the scale's own, 512 at most.", legal=AT_LEAST_ZERO
    )
    density: float = setting(0.125, "Fraction of blocks of the sparse model.", legal=A_FRACTION)
    block: int = setting(
        0,
        "Side of a square block; 0 is a sixteenth of the scale's width.",
        legal=AT_LEAST_ZERO,
    )
    rounds: int = setting(5, "Timed steps.", legal=AT_LEAST_ONE)
    keep: str = setting(RESULTS, KEEP_HELP, path=True)


def main(options):
    """Measures, predicts, prints and writes; see the module docstring."""
    from .benchmarks import prediction

    prediction.check_predictions(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
