"""Where does weight sparsity pay: equal training FLOPs and equal served FLOPs.

The rival is a narrow dense model that trains for long.  A wide model starts dense, is pruned in
blocks while it trains, and is served with as many FLOPs a token, attention and output layer
included, after as many training FLOPs.  Products are dense and masked, which gives the numbers of
stored blocks; FLOPs are the planner's.  The length of a training is the narrow model's tokens for
each weight of its projections.

Every arm has the same trials of its learning rate at each length, on tuning documents, beginning
with the best rate of the nearest cell.  Losses are bits a symbol of other, held-out documents.
Differences to the narrow model are paired by seed, with intervals of Student's t.

    python -m experiments.serving_cost
        one core: hours
    python -m experiments.serving_cost --lengths=160 --arms=narrow,pruned_4,pruned_4_saliency
        other arms
    python -m experiments.serving_cost --decode=20
        also times tokens of the served models, 32 times as wide, with random weights

Leaves OUT/settings.json, OUT/runs.jsonl (a line for each run), OUT/serving_cost.json,
OUT/serving_cost.md, OUT/serving_cost.png (losses of pruned models), OUT/serving_cost_picture.png
(also of experts, against each cost) and, with --decode, OUT/decoding.json.  The same command
goes on where it was stopped; the tables have all runs of the folder, also of other lengths, arms,
optimizers or seeds.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, AT_LEAST_ZERO, setting
from sparse_dataflow.core.config.training import OPTIMIZERS

from .studies.serving_cost.arms import ARMS
from .studies.serving_cost.options import NarrowOptions


@dataclasses.dataclass(frozen=True)
class Options(NarrowOptions):
    """What is trained."""

    arms: tuple[str, ...] = setting(
        ("narrow", "pruned_2", "pruned_4"),
        "Models: see experiments/studies/serving_cost/arms.py.",
        choices=tuple(ARMS),
    )
    lengths: tuple[int, ...] = setting(
        (40, 160, 640), "Tokens of the narrow model for each weight.", legal=AT_LEAST_ONE
    )
    optimizers: tuple[str, ...] = setting(("muon",), "Each is tuned.", choices=OPTIMIZERS)
    schedule: str = setting(
        "linear",
        "Decay of the rate: to zero, to a tenth, or to zero in the last 30%.",
        choices=("linear", "cosine", "wsd"),
    )
    decode: int = setting(
        0, "Rounds of timed decoding, 32 times as wide; 0 is none.", legal=AT_LEAST_ZERO
    )
    out: str = setting("runs/serving_cost", "Folder to make, or to go on in.", path=True)


def main(options):
    """Trains what is not trained yet, then writes tables and figure."""
    from .studies.serving_cost import study

    return study.study_serving_cost(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
