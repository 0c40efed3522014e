"""Tokens a second of the own tasks' log-likelihoods, against the forward pass of the training.

Models of random weights are asked the corpus's own tasks; scoring and the training's forward pass
run in turn in one process, dense and sparse. Scoring is timed from text to numbers, with programs
that are compiled. Its tokens are those that the requests hold, context and continuation, without
padding; the forward pass is the evaluation step on one micro-batch, all of whose tokens count.

    python -m experiments.scoring_bench
    python -m experiments.scoring_bench --scale=micro --num_fewshot=5

Needs the extra eval.
"""

from experiments import flags
from experiments.command_line import AT_LEAST_TWO, Flag, Group
from experiments.evaluate import refuse_without_lm_eval
from experiments.step_bench import BENCHMARK

SCORING = Group(
    "Scoring",
    "what is asked",
    (
        Flag("num_fewshot", "text", "0,5", "Comma list of examples in the prompt."),
        Flag(
            "items",
            "integer",
            100,
            "Items that are made for each own task.",
            legal=AT_LEAST_TWO,
        ),
    ),
)
GROUPS = (
    *flags.without(
        *("minutes", "steps", "twin", "learning_rate", "warmup", "final_rate"),
        groups=(flags.MODEL, flags.SPARSITY, flags.TRAINING, flags.DATA),
    ),
    SCORING,
    BENCHMARK,
)


def main(values):
    """Runs the benchmark; see the module docstring."""
    refuse_without_lm_eval()
    from experiments import scoring_speed

    scoring_speed.run(values, GROUPS)


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
