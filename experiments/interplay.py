"""Sparsity, fusion and pipelining together, predicted and measured (arXiv 2304.05511, first claim).

{dense, 1/2, 1/4, 1/8 of the blocks} x {unfused, fused} x {serial, pipelined}: sparsity alone lowers
the operational intensity of every section; fusion wins it back. Whole training steps are measured
on this machine, fused as XLA compiles them and unfused with its fusion switched off; predictions
come from the cost model with the rates of the dense and sparse sections measured here.

A chip is one core of this machine, and --stages of them work at once: serial, each on a model of
its own, or pipelined, as real processes that hand activations on (1F1B). A step has
--micro_batches; what is compared is a chip's time for one of them.

    python -m experiments.interplay                      nano, about ten minutes
    python -m experiments.interplay --hardware=h100 --scale=13b --measure=no

Leaves OUT/interplay.md, OUT/interplay.csv, OUT/interplay.png and OUT/roofline.png, and keeps what
was measured as JSON.
"""

from sparse_dataflow.config.presets import SIZES

from experiments import flags, planner_flags
from experiments.command_line import AT_LEAST_ONE, Flag, Group

INTERPLAY = Group(
    "Interplay",
    "what is predicted and measured",
    (
        Flag("scale", "choice", "nano", "Named size.", tuple(SIZES)),
        Flag(
            "hardware",
            "text",
            "this",
            "Chip that is predicted: this, the CPU under this process, or one as in layout_search.",
        ),
        Flag("measure", "switch", "yes", "Measure steps here."),
        Flag(
            "tokens",
            "integer",
            256,
            "Tokens of a micro-batch: as many sequences as fit, at least one.",
            legal=AT_LEAST_ONE,
        ),
        Flag("block", "integer", 64, "Side of a square block.", legal=AT_LEAST_ONE),
        Flag("stages", "integer", 2, "Of the pipeline.", legal=AT_LEAST_ONE),
        Flag("micro_batches", "integer", 8, "Of a step.", legal=AT_LEAST_ONE),
        Flag("rounds", "integer", 3, "Timed steps.", legal=AT_LEAST_ONE),
        Flag("out", "text", "runs/interplay", "Folder to make."),
        Flag("keep", "text", "experiments/results", "Folder for the JSON; empty keeps none."),
    ),
)
GROUPS = (INTERPLAY,)


def main(values):
    """Measures, predicts, prints and keeps; see the module docstring."""
    from experiments import interplay_report

    interplay_report.run(planner_flags.settings(values, [f.name for f in INTERPLAY.flags]))


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
