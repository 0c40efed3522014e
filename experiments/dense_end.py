"""Trains sparse for most of the steps and dense at the end: which dense training equals it?

arXiv 2602.06183 trains the MLPs with 2:4 weights and sparse activations, and ends with dense steps;
it reports 1.4 to 1.7 times at equal quality.  Here an arm trains stored blocks for --ratios of its
steps and then turns dense.  Its rivals are dense trainings of several lengths, each with a schedule
of its own: between their ends the length is interpolated whose loss is the arm's.  "Speed-up" is
that length over the arm's, times the ratio of the mean steps: measured here, and by the planner on
--chips at the size --estimate.

    python -m experiments.dense_end --scale=pico --block=8 --steps=1000        two cores: four hours
    python -m experiments.dense_end --scale=125m --steps=20000 --corpus=...    a GPU

Leaves OUT/dense_end.json and OUT/dense_end.md; the same command goes on where it was stopped.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import ABOVE_ZERO, AT_LEAST_ONE, setting
from sparse_dataflow.core.config.training import BUILT_IN
from sparse_dataflow.runs.run_config import SIZES

ARMS = {
    "all_eighth": ((), 1 / 8),
    "mlp_eighth": (("mlp_gate", "mlp_in", "mlp_out"), 1 / 8),
    "mlp_half": (("mlp_gate", "mlp_in", "mlp_out"), 1 / 2),
}
"""Name -> (sparse projections, () for all; density).  Half of the MLP is what 2:4 weights store."""

SHARED = ("scale", "corpus", "batch", "learning_rate", "pattern", "block")


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of its own."""

    steps: int = setting(1000, "Steps of the arms.", legal=AT_LEAST_ONE)
    ratios: tuple[float, ...] = setting(
        (0.7, 0.9),
        "Shares of the steps that are sparse.",
        legal=("in (0, 1)", lambda share: 0 < share < 1),
    )
    lengths: tuple[float, ...] = setting(
        (0.6, 0.8, 1.0), "Steps of the dense trainings, over --steps.", legal=ABOVE_ZERO
    )
    optimizers: tuple[str, ...] = setting(BUILT_IN, "Of all trainings.", choices=BUILT_IN)
    arms: tuple[str, ...] = setting(tuple(ARMS), "What is sparse.", choices=tuple(ARMS))
    seeds: int = setting(3, "Trainings of each.", legal=AT_LEAST_ONE)
    chips: str = setting("h200:8", "Chips of the estimate.")
    estimate: str = setting("1.3b", "Size of the estimate.", choices=tuple(SIZES))
    out: str = setting("runs/dense_end", "Folder to make, or to go on in.", path=True)


def main(request, options):
    """Trains what is not trained yet, then writes the table."""
    from .studies import dense_end

    return dense_end.study_dense_end(request, ARMS, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options)
