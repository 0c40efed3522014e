"""Predicted against published: 1,011 runs of Megatron, NeMo, MaxText, Pax, torchtitan and others.

Prints every row of experiments/planning/published with its prediction and error, then the error
band of every kind of run and how many held-out runs are inside theirs. Each chip family and
software stack has its constants: rows marked "fit" determined them, rows marked "test" did not.
360 confirmation runs, which no fit has seen, are summed up by source. Needs no accelerator and
loads no jax.

    python -m experiments.planner_truth             ten seconds
    python -m experiments.planner_truth --fit       fits constants and bands again: half an hour
    python -m experiments.planner_truth --headline  the sparse 13B step beside dense ones; a second

Leaves OUT/truth.csv and OUT/truth.png.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import setting


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compared."""

    fit: bool = setting(False, "Fit the constants again.")
    headline: bool = setting(
        False, "Print the sparse 13B step beside dense ones, from a clone's results, and stop."
    )
    out: str = setting(
        "runs/planner_truth", "Output folder; made where it does not exist.", path=True
    )


def main(options):
    """Prints and writes the table; see the module docstring."""
    from .planning import headline, truth

    if options.headline:
        print(headline.table())
        return
    truth.compare_published(options.fit, options.out)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
