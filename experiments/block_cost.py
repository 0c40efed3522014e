"""What a block costs, and how it changes with size: trained models, pruned.

Dense models of several widths are trained on equally many tokens a weight.  Each is pruned to half
and a quarter of all projections: squares, rows (1 input x several outputs), columns, single
weights, and a narrow dense model of equally many weights.  What stays is fitted to the outputs of
the dense model (`sd.prune`, in --rounds).  The cost of a block is its excess loss over that of the
narrow model.  With --recover the pruned models are trained with the dense model as teacher.

One law is fitted to the costs before recovery, over the weights of a block, the width and the
density.  It says from which width a shape beats the narrow model.  It is fitted again without the
largest width, and without one shape, and predicts what it has not seen.

    python -m experiments.block_cost
        two cores: two hours
    python -m experiments.block_cost --widths=32,48
        smaller models
    python -m experiments.block_cost --samples=1 --shapes=1,1x16 --recover=0,0.05
        two shapes, before and after a recovery

Leaves OUT/settings.json, OUT/runs.jsonl (a line for each pruned model), OUT/block_cost.json,
OUT/block_cost.md, OUT/block_cost.png, and the trained models in --models.  The same command goes on
where it was stopped.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import ABOVE_ZERO, AT_LEAST_ONE, AT_LEAST_ZERO, setting


@dataclasses.dataclass(frozen=True)
class Options:
    """What is trained and pruned."""

    widths: tuple[int, ...] = setting(
        (32, 48, 64, 96, 128), "d_model of the dense models.", legal=AT_LEAST_ONE
    )
    shapes: tuple[str, ...] = setting(
        (
            *("1", "2", "4", "8", "16", "1x4", "1x8", "1x16", "1x32", "1x64"),
            *("4x1", "16x1"),
        ),
        "Values of `block` of `sd.prune`; the narrow model is added.",
    )
    densities: tuple[float, ...] = setting((0.5, 0.25), "Parts that stay.", legal=ABOVE_ZERO)
    held_out: str = setting("1x16", "Shape that the law predicts without having seen it.")
    recover: tuple[float, ...] = setting(
        (0.0,),
        "Recoveries, as fractions of the training tokens; 0 is none.",
        legal=AT_LEAST_ZERO,
    )
    rounds: tuple[int, ...] = setting(
        (1,), "Rounds of selection, see `sd.prune`; the law is of one.", legal=AT_LEAST_ONE
    )
    samples: int = setting(3, "Samples of calibration text.", legal=AT_LEAST_ONE)
    sequences: int = setting(512, "Sequences of a sample.", legal=AT_LEAST_ONE)
    length: int = setting(20, "Training tokens for each weight.", legal=AT_LEAST_ONE)
    learning_rate: float = setting(
        16e-3, "Peak at width 48; falls with the root of the width.", legal=ABOVE_ZERO
    )
    vector_rate: float = setting(
        2.0, "Multiplier of the rate of embeddings and norms.", legal=ABOVE_ZERO
    )
    layers: int = setting(2, "Layers of every model.", legal=AT_LEAST_ONE)
    vocabulary: int = setting(40, "Symbols of the text.", legal=AT_LEAST_ONE)
    sequence: int = setting(32, "Symbols in a sequence.", legal=AT_LEAST_ONE)
    corpus: str = setting("python_stdlib", "Text; see experiments.gpt13b_sparse.", path=True)
    models: str = setting("runs/block_cost_models", "Folder of the trained models.", path=True)
    out: str = setting("runs/block_cost", "Folder to make, or to go on in.", path=True)


def main(options):
    """Trains and prunes what is left, then writes the tables and the figure."""
    from .studies.serving_cost import block_cost

    return block_cost.measure_block_cost(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
