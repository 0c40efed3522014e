"""The scaling law of sparse models: L(parameters, sparsity, tokens) (arXiv 2309.08520), fitted.

Trains a grid of widths, densities and lengths under SuPar, so that one learning rate serves all;
predicts the widest models' longest trainings from the others before those are run; prints
constants with bootstrap intervals and residuals, and draws which sparsity is best for a budget.

    python -m experiments.sparse_scaling_law                          one core: about an hour
    python -m experiments.sparse_scaling_law --runs=mine.csv          fits any runs: no training

A CSV needs the columns parameters (stored, of the projections), sparsity, tokens and loss (held
out, nats a token); runs whose column held_out says True are predicted, not fitted.  Leaves
OUT/runs.csv, OUT/law.json, OUT/law.md and OUT/law.png.
"""

from experiments import flags
from experiments.command_line import AT_LEAST_ONE, Flag, Group

LAW = Group(
    "Law",
    "what is trained and fitted",
    (
        Flag("runs", "text", "", "CSV of runs to fit; empty trains the grid."),
        Flag("widths", "text", "64,128,192", "Values of d_model."),
        Flag("densities", "text", "1,0.5,0.25,0.125", "Fractions of blocks stored."),
        Flag("lengths", "text", "500,1500,4500", "Optimizer steps of a training."),
        Flag(
            "seeds",
            "integer",
            1,
            "Trainings of each.",
            legal=AT_LEAST_ONE,
        ),
        Flag(
            "rounds",
            "integer",
            200,
            "Bootstrap rounds of the intervals.",
            legal=("10 or more", lambda n: n >= 10),
        ),
        Flag("out", "text", "runs/sparse_scaling_law", "Folder to make, or to go on in."),
    ),
)
GROUPS = (
    *flags.with_defaults(
        flags.without(
            *("minutes", "steps", "twin", "density", "density_budget", "rank", "hadamard"),
            "parametrization",
            groups=(flags.MODEL, flags.SPARSITY, flags.TRAINING, flags.DATA),
        ),
        # Heads keep their width, and the narrowest model has a layout at the lowest density.
        scale="pico",
        block=8,
    ),
    LAW,
)


def main(values):
    """Reads or trains the runs, then fits, prints and draws."""
    from experiments import scaling_law_runs

    return scaling_law_runs.run(values, GROUPS)


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
