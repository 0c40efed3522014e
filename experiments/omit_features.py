"""Continues a trained model with hidden features left out for a while, against full training.

Sparsity-accelerated training (arXiv 2406.01392): a dense model is trained, and then trained on.
Arms are ways to train on: "full", and --evolution=omit_features with features that are "sampled" by
their activations, the "top" ones, or "uniform" ones.  All have the FLOPs of the full arm's --more
steps, and a learning-rate schedule of their own.

    python -m experiments.omit_features --scale=pico --steps=1000 --more=500   two cores: an hour
    python -m experiments.omit_features --scale=125m --steps=20000 --more=10000 --corpus=...   a GPU

Leaves OUT/omission.json and OUT/omission.md; the same command goes on where it was stopped.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import ABOVE_ZERO, AT_LEAST_ONE, setting
from sparse_dataflow.core.config.sparsity import FEATURE_CHOICES

FULL = "full"
ARMS = (FULL, *FEATURE_CHOICES)
SHARED = ("scale", "corpus", "batch", "learning_rate")


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of its own."""

    steps: int = setting(1000, "Steps of the training that is continued.", legal=AT_LEAST_ONE)
    more: int = setting(500, "Steps of the full arm after it.", legal=AT_LEAST_ONE)
    rate: float = setting(
        0.5, "Peak of the learning rate of all arms, over that of the first.", legal=ABOVE_ZERO
    )
    omitted: float = setting(
        0.5,
        "Share of the hidden features that is left out first.",
        legal=("in (0, 1)", lambda share: 0 < share < 1),
    )
    seeds: int = setting(3, "Trainings of each arm.", legal=AT_LEAST_ONE)
    arms: tuple[str, ...] = setting(ARMS, "Ways to train on.", choices=ARMS)
    out: str = setting("runs/omit_features", "Folder to make, or to go on in.", path=True)


def main(request, options):
    """Trains what is not trained yet, then writes the table."""
    from .studies import omission

    return omission.study_omission(request, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options)
