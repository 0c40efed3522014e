"""The scaling law of sparse models: L(parameters, sparsity, tokens) (arXiv 2309.08520), fitted.

Trains a grid of widths, densities and lengths under SuPar, so that one learning rate serves all;
predicts the widest models' longest trainings from the others before those are run; prints
constants with bootstrap intervals and residuals, and draws which sparsity is best for a budget.

    python -m experiments.sparse_scaling_law                          one core: about an hour
    python -m experiments.sparse_scaling_law --runs=mine.csv          fits any runs: no training

A CSV needs the columns parameters (stored, of the projections), sparsity, tokens and loss (held
out, nats a token); runs whose column held_out says True are predicted, not fitted.  Leaves
OUT/runs.csv, OUT/law.json, OUT/law.md and OUT/law.png; the same command goes on where it was
stopped.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import A_FRACTION, AT_LEAST_ONE, setting

SHARED = ("scale", "corpus", "batch", "learning_rate", "pattern", "block")
DEFAULTS = {"scale": "pico", "block": 8}
"""Heads keep their width, and the narrowest model has a layout at the lowest density."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of its own."""

    runs: str = setting("", "CSV of runs to fit; empty trains the grid.", path=True)
    widths: tuple[int, ...] = setting((64, 128, 192), "Values of d_model.", legal=AT_LEAST_ONE)
    densities: tuple[float, ...] = setting(
        (0.125, 0.25, 0.5, 1), "Fractions of the blocks stored.", legal=A_FRACTION
    )
    lengths: tuple[int, ...] = setting(
        (500, 1500, 4500), "Optimizer steps of a training.", legal=AT_LEAST_ONE
    )
    seeds: int = setting(1, "Trainings of each.", legal=AT_LEAST_ONE)
    rounds: int = setting(
        200, "Bootstrap rounds of the intervals.", legal=("10 or more", lambda n: n >= 10)
    )
    out: str = setting("runs/sparse_scaling_law", "Folder to make, or to go on in.", path=True)


def main(request, options):
    """Reads or trains the runs, then fits, prints and draws."""
    from .studies import scaling_law

    return scaling_law.fit_scaling_law(request, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options, defaults=DEFAULTS)
