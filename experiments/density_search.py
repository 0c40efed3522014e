"""Which density each projection and each part of the depth gets, for a budget.

Trains one dense model for --steps, as it has the weights of all blocks.  Then it prunes each kind
of projection in each third of the depth alone to --densities (second order, as `sd.prune`): the
rise of the loss on tuning documents is its sensitivity.  A budget is a density: a choice costs at
most what equal density costs, in FLOPs of a token, or in milliseconds of a step by the planner on
--hardware.  The choice has the least sum of rises.  The same is done for the inputs of each kind
that count as zeros (TEAL, arXiv 2408.14690).

    python -m experiments.density_search --scale=pico --block=8            two cores: minutes
    python -m experiments.density_search --scale=pico --block=8 --train=3
        also trains five choices of each budget with three seeds

Prints each choice beside equal density, and the settings that train it.  Leaves
OUT/density_search.json and OUT/density_search.md; the same command goes on where it was stopped.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import (
    A_FRACTION,
    ABOVE_ZERO,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    setting,
)
from sparse_dataflow.hardware.chips import CHIPS

SHARED = ("scale", "corpus", "batch", "learning_rate", "pattern", "block")
DEFAULTS = {"scale": "pico", "pattern": "random"}
"""The pattern has a layout of every balanced density."""

INNER_SHARE = ("in (0, 1)", lambda number: 0 < number < 1)


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of its own."""

    budgets: tuple[float, ...] = setting(
        (0.25, 0.5), "Densities whose cost is the budget.", legal=INNER_SHARE
    )
    densities: tuple[float, ...] = setting(
        (0.125, 0.25, 0.375, 0.5, 0.75, 1.0),
        "Densities that a projection may have, which are measured.",
        legal=A_FRACTION,
    )
    depth: tuple[float, ...] = setting(
        (0.5, 1.0, 1.5),
        "Multiples of them that a part of the depth may have; 1 is none.",
        legal=ABOVE_ZERO,
    )
    zeros: tuple[float, ...] = setting(
        (0.2, 0.3, 0.4, 0.5, 0.6, 0.7),
        "Shares of a projection's inputs as zeros, which are measured; none chooses none.",
        legal=INNER_SHARE,
    )
    zero_budgets: tuple[float, ...] = setting(
        (0.4, 0.5), "Shares of zeros of all inputs whose saving is the budget.", legal=INNER_SHARE
    )
    hardware: str = setting(
        "",
        f"Chip whose milliseconds are the cost: this, or {', '.join(CHIPS)}, the start of one, or "
        "a TOML file; empty is FLOPs.",
    )
    steps: int = setting(200, "Steps of the dense model.", legal=AT_LEAST_ONE)
    train: int = setting(
        0, "Seeds with which five choices of each budget are trained.", legal=AT_LEAST_ZERO
    )
    train_steps: int = setting(400, "Steps of each of these.", legal=AT_LEAST_ONE)
    out: str = setting("runs/density_search", "Folder to make, or to go on in.", path=True)


def main(request, options):
    """Measures, chooses, trains what --train says, then writes the tables."""
    from .studies import density_search

    return density_search.search_densities(request, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options, defaults=DEFAULTS)
