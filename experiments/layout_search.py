"""Which layout trains a model fastest on given chips, and what decides it; no accelerator needed.

Prices every legal layout (tensor, pipeline and sharded data parallelism, micro-batch, schedule,
ZeRO, rematerialisation) by the planner's cost model, after arXiv 2312.12705.

    python -m experiments.layout_search --scale=175b --hardware=mi250x --chips=1024 --batch=10240
    python -m experiments.layout_search --scale=13b --density=0.125 --hardware=h100 --chips=64

Prints the ten best, the terms of the best one, how much each choice decides, and the command that
runs it; where the compiler for the chips is installed (make aot-tpu), the ten are compiled, and the
table says which of them fit. Writes OUT/trials.csv, OUT/sensitivity.png and OUT/roofline.png.
"""

from experiments import flags, planner_flags
from experiments.command_line import AT_LEAST_ONE, AT_LEAST_ZERO, Flag, Group

SEARCH = Group(
    "Search",
    "what is laid out on what",
    (
        planner_flags.SCALE,
        planner_flags.HARDWARE,
        Flag(
            "chips",
            "integer",
            8,
            "How many, all of which are used.",
            legal=AT_LEAST_ONE,
        ),
        Flag(
            "batch",
            "integer",
            0,
            "Sequences in an optimizer step; 0 is the scale's own.",
            legal=AT_LEAST_ZERO,
        ),
        planner_flags.SEQUENCE,
        planner_flags.DENSITY,
        planner_flags.BLOCK,
        Flag(
            "verify",
            "number",
            10.0,
            "Minutes in which the best ten are compiled for their chips (TPU v5e, v5p, v6e and "
            "H200, where that compiler is installed); 0 compiles none.",
            legal=AT_LEAST_ZERO,
        ),
        Flag(
            "explain",
            "integer",
            1,
            "How many of the best have every term of their step's time and memory printed.",
            legal=AT_LEAST_ZERO,
        ),
        Flag("out", "text", "runs/layout_search", "Output folder; made where it does not exist."),
    ),
)
GROUPS = (SEARCH,)


def main(values):
    """Searches and reports; see the module docstring."""
    from experiments import layout_report

    layout_report.run(planner_flags.settings(values, [flag.name for flag in SEARCH.flags]))


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
