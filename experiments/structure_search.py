"""Which structure of the weights is better than the best dense model of equal training FLOPs?

A study file says which arms are searched, in which space, and how long: TOML whose keys are the
fields of `experiments.studies.structure.design.Design`.  Every arm has the same number of trials,
by successive halving over shapes and learning rates on tuning documents.  Its best model is then
measured with several seeds on other, held-out documents, and compared with the rival, the dense
arm.  All trainings of a budget have equal FLOPs, so a smaller model trains for more tokens.

    python -m experiments.structure_search --out=runs/structure
        one core: days
    python -m experiments.structure_search --study=mine.toml --out=runs/mine

Leaves OUT/settings.json, OUT/runs.jsonl (a line for each training), OUT/structure_search.json,
OUT/structure_search.md and OUT/structure_search.png, also where it was stopped.  The same command
goes on, on another machine with these files.  So does a study file with more arms, budgets or
seeds.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import setting

SHARED = ("corpus",)


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of its own."""

    study: str = setting("", "Study file to train; empty is results/structure_pico.", path=True)
    out: str = setting("runs/structure_search", "Folder to make, or to go on in.", path=True)


def main(request, options):
    """Trains what is not trained yet, then writes tables and picture."""
    from .studies.structure import run

    return run.search_structures(request, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options)
