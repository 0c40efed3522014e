"""Which width, depth and density are best for a budget of serving and of training.

The budget is the FLOPs of a served token, or milliseconds on a chip, and the FLOPs or tokens of the
training.  Losses come from the average-parameter law (arXiv 2501.12486), fitted to finished runs of
`experiments.serving_cost` with terms of depth and of d_ff / d_model.  Costs are the planner's.
Candidates are dense models, and wide ones that are pruned while they train in a way that the runs
have measured.  The law knows the text and the sizes of its runs alone: other budgets are refused.

    python -m experiments.shape_search --served_flops=32640 --training_flops=2.2e11
    python -m experiments.shape_search --served_ms=2e-5 --hardware=h100 --tokens=2e6
    python -m experiments.shape_search --served_ms=2e-5 --hardware=h100 --tokens=2e6 --pareto=4
        also draws the best loss of each smaller budget
    python -m experiments.shape_search --studies=runs/serving_cost --served_flops=1e5 --tokens=4e6
        by runs of your own text and sizes
    python -m experiments.shape_search --served_flops=32640 --training_flops=2.2e11 --train=3
        also trains the three best, and two others, and compares

Prints the candidates with what the law predicts and its error, and how a proxy ranks them that
needs no training: the stored parameters of the decoder (LiteTransformerSearch, arXiv 2203.02094).
With --pareto leaves OUT/pareto.md and OUT/pareto.png.  With --train leaves OUT/runs.jsonl
(a line for each run), OUT/settings.json, OUT/shape_search.json and OUT/shape_search.md; the same
command goes on where it was stopped.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, AT_LEAST_ZERO, setting
from sparse_dataflow.core.config.training import OPTIMIZERS
from sparse_dataflow.hardware.chips import CHIPS


@dataclasses.dataclass(frozen=True)
class Options:
    """The budget, and what the law is fitted to."""

    served_flops: float = setting(
        0.0, "Most forward FLOPs of a token; 0 is no limit.", legal=AT_LEAST_ZERO
    )
    served_ms: float = setting(
        0.0,
        "Most milliseconds of a token at batch 1, by the chip's rates; 0 is no limit.",
        legal=AT_LEAST_ZERO,
    )
    hardware: str = setting(
        "",
        f"Chip of --served_ms: {', '.join(CHIPS)}, the start of one, or a TOML file; empty is "
        "this machine.",
    )
    training_flops: float = setting(
        0.0, "Most FLOPs of the training; 0 is no limit.", legal=AT_LEAST_ZERO
    )
    tokens: float = setting(0.0, "Most training tokens; 0 is no limit.", legal=AT_LEAST_ZERO)
    optimizer: str = setting("muon", "Of the runs.", choices=OPTIMIZERS)
    studies: str = setting(
        "",
        "Folders of serving_cost, comma separated; empty is the runs of this project.",
        path=True,
    )
    pareto: int = setting(
        0,
        "Served budgets of a table and picture over milliseconds or FLOPs: that of the line, and "
        "smaller ones by the root of 2; 0 is none.",
        legal=AT_LEAST_ZERO,
    )
    train: int = setting(
        0, "Number of the best that are trained, with two others.", legal=AT_LEAST_ZERO
    )
    trials: int = setting(2, "Trials of the rate of each.", legal=AT_LEAST_ONE)
    seeds: int = setting(1, "Measured seeds of each.", legal=AT_LEAST_ONE)
    out: str = setting(
        "runs/shape_search", "Folder of --train and --pareto, to make or to go on in.", path=True
    )


def main(options):
    """Searches, prints, and trains what --train says."""
    from .studies.serving_cost import shapes

    return shapes.search_shapes(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
