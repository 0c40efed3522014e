"""Tokens a second of the log-likelihoods of a corpus's own tasks, against the forward pass.

Models of random weights score the corpus's own tasks; scoring and the training's forward pass run
in turn in one process, dense and sparse. Scoring is timed from text to numbers, with compiled
programs. Its tokens are those of the requests, context and continuation, without padding; the
forward pass is the evaluation step on one micro-batch, all of whose tokens count.

    python -m experiments.scoring_bench
    python -m experiments.scoring_bench --scale=micro --num_fewshot=5

Needs the extra eval.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import AT_LEAST_TWO, AT_LEAST_ZERO, setting
from sparse_dataflow.evaluation import refuse_without_lm_eval

from .benchmarks.options import BenchOptions

SHARED = ("scale", "corpus", "batch", "density", "pattern", "block", "seed")


@dataclasses.dataclass(frozen=True)
class Options(BenchOptions):
    """What is scored."""

    num_fewshot: tuple[int, ...] = setting(
        (0, 5), "Numbers of examples in the prompt.", legal=AT_LEAST_ZERO
    )
    items: int = setting(100, "Items that are made for each task.", legal=AT_LEAST_TWO)


def main(request, options):
    """Measures, prints and writes; see the module docstring."""
    refuse_without_lm_eval()
    from .benchmarks import scoring

    scoring.measure_scoring(request, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options)
