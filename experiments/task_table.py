"""Scores of sparse models beside their dense twins, zero-shot and few-shot, over several seeds.

Trains a dense GPT, its block-sparse twin, a narrower dense model of the sparse one's FLOPs, one
that turns from sparse to dense, and sparse experts, on the same tokens; or takes models that are
there.  All answer the same items of `experiments.evaluate`.  The table has the score of each task,
the paired difference to the dense model with its 95% interval, chance, and the held-out loss.  The
last lines say at which difference in loss the scores begin to differ.

    python -m experiments.task_table                                   two cores: hours
    python -m experiments.task_table --models=dense=A:dense,sparse=A,pruned=DIR
    python -m experiments.task_table --models=dense=A:dense,dense=B:dense,sparse=A,sparse=B

A name that stands several times in --models has that many seeds, and the k-th dense model is
compared with the k-th of the others.  Leaves OUT/task_table.json and OUT/task_table.md, and the
scores of a seed in the report of its dense model; the same command goes on where it was stopped.
Needs the extra eval.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, AT_LEAST_TWO, AT_LEAST_ZERO, setting
from sparse_dataflow.evaluation import refuse_without_lm_eval

ARMS = ("sparse_to_dense", "experts")
"""Trained beside the dense, the sparse and the narrow model, which are one run."""

SHARED = ("scale", "corpus", "batch", "learning_rate", "density", "block")


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of its own."""

    models: str = setting(
        "",
        "Comma list of NAME=RUN, NAME=RUN:VARIANT and NAME=DIRECTORY, one name of which is dense; "
        "empty trains.",
        path=True,
    )
    steps: int = setting(2000, "Optimizer steps of each training.", legal=AT_LEAST_ONE)
    seeds: int = setting(3, "Trainings of each kind.", legal=AT_LEAST_ONE)
    arms: tuple[str, ...] = setting(ARMS, "Trained beside the twins.", choices=ARMS)
    tasks: str = setting("own", "As --tasks of evaluate.")
    num_fewshot: tuple[int, ...] = setting(
        (0, 1, 5), "Numbers of examples in the prompt.", legal=AT_LEAST_ZERO
    )
    items: int = setting(500, "Items of each own task.", legal=AT_LEAST_TWO)
    out: str = setting("runs/task_table", "Folder to make, or to go on in.", path=True)


def main(request, options):
    """Trains what is not trained yet, evaluates, then writes the table."""
    refuse_without_lm_eval()
    from .studies import task_table

    return task_table.fill_task_table(request, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options)
