"""Makes a trained dense model smaller: stored blocks against a narrower dense model.

A dense model is trained. Then it is cut to 1/2 or 1/4 of its projections, and trained again for a
part of its training.  Stored blocks are chosen by norm, activations, saliency, or by how well the
remaining weights make up for them.  The rival has the same served FLOPs: a narrow dense model of
the channels, heads and hidden features with the largest activations (Minitron, arXiv 2407.14679).
"rebuilt" weights, of blocks and of the rival, are fitted to the outputs of the trained model.
"taught" ones learn from it.

A recovery of 5% has the FLOPs of a training of the served model on 5% of the trained model's
tokens; the forward passes of a teacher count.  Every cell has the same trials of its rate, on
tuning documents; losses are bits a symbol of held-out documents, on average over the same seeds.

    python -m experiments.prune_trained
        one core: an hour

Leaves OUT/runs.jsonl (a line for each run) and OUT/recovery.md.  The same command goes on where it
was stopped.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import ABOVE_ZERO, AT_LEAST_ONE, setting
from sparse_dataflow.core.config.training import OPTIMIZERS

from .studies.serving_cost.options import StudyOptions
from .studies.serving_cost.recovery import METHODS, SERVED


@dataclasses.dataclass(frozen=True)
class Options(StudyOptions):
    """What is trained."""

    methods: tuple[str, ...] = setting(
        (
            *("narrow_taught", "narrow_rebuilt_taught", "blocks_taught", "blocks_rebuilt_taught"),
            *("blocks_2_rebuilt_taught", "single_rebuilt_taught"),
        ),
        "Ways to make the model smaller: see experiments/studies/serving_cost/recovery.py.",
        choices=tuple(METHODS),
    )
    served: tuple[str, ...] = setting(
        ("1/2", "1/4"), "Parts of the projections that are served.", choices=tuple(SERVED)
    )
    recoveries: tuple[int, ...] = setting(
        (1, 5, 20), "Recoveries, in percent of the training.", legal=AT_LEAST_ONE
    )
    length: int = setting(
        160, "Tokens of the dense training for each of its weights.", legal=AT_LEAST_ONE
    )
    optimizer: str = setting("muon", "Of all trainings.", choices=OPTIMIZERS)
    learning_rate: float = setting(
        16e-3, "Peak of the dense training; recoveries begin with half.", legal=ABOVE_ZERO
    )
    out: str = setting("runs/prune_trained", "Folder to make, or to go on in.", path=True)


def main(options):
    """Trains what is not trained yet, then writes the tables."""
    from .studies.serving_cost import recovery

    return recovery.run(options)


if __name__ == "__main__":
    command_line.run(main, __doc__, options=Options)
