"""Whether a model trains on chips that are not here: its step through their real compiler.

Says whether the step fits, what it takes of a chip by category beside the planner's prediction, its
FLOPs, what is sent between the chips, read from the compiled program, and the time to compile. A
plan that does not fit is answered with the nearest that does, found by compiling.

    python -m experiments.compile_plan --scale=1t --topology=v5p:16x16x12 \\
        --mesh=data:3,fsdp:128,tensor:8 --batch=3072
    python -m experiments.compile_plan --scale=175b --topology=v5p:8x8x16 \\
        --mesh=stage:8,fsdp:16,tensor:8 --batch=1024 --accumulation=64
    python -m experiments.compile_plan --scale=13b --density=0.125 --topology=v5e:4x4 --batch=16 \\
        --mesh=fsdp:16
    python -m experiments.compile_plan --scale=13b --density=0.125 --topology=h200:1 --batch=4 \\
        --mesh=fsdp:1
    python -m experiments.compile_plan --scale=13b --topology=h200:1 --batch=1 --mesh=fsdp:1 \\
        --state_dtype=bfloat16

Needs the compiler of the chips: make aot-tpu, or make aot-gpu, installs it. Without --mesh the
planner's search chooses the layout. Takes half a minute to two minutes of one core, and 2 GB.
"""

from sparse_dataflow.config.model import DTYPES

from experiments import flags, planner_flags
from experiments.command_line import AT_LEAST_ONE, AT_LEAST_ZERO, Flag, Group

AUTOMATIC = 0

PLAN = Group(
    "Plan",
    "what is compiled for what; what is left at its default the planner's search chooses",
    (
        planner_flags.SCALE,
        planner_flags.DENSITY,
        planner_flags.BLOCK,
        Flag(
            "topology",
            "text",
            "v5p:2x2x1",
            "Chips: v5e:4x4, v5p:8x8x16, v6e:16x16 (chips along each axis of the torus), h200:8, "
            "h200:4x8 (nodes x GPUs).",
        ),
        Flag(
            "slices",
            "integer",
            1,
            "TPU slices of that topology, joined by the data-centre network.",
            legal=AT_LEAST_ONE,
        ),
        Flag(
            "mesh",
            "text",
            "auto",
            "Chips along each axis, as in data:2,stage:4,fsdp:4,tensor:8; one size may be left "
            "out. auto is the fastest layout of all chips that the planner finds.",
        ),
        Flag(
            "zero",
            "integer",
            3,
            "What fsdp deals out: 0 nothing, 1 moments, 2 gradients too, 3 parameters too.",
            legal=("0 to 3", lambda level: 0 <= level <= 3),
        ),
        Flag(
            "batch",
            "integer",
            AUTOMATIC,
            "Sequences in an optimizer step; 0 is the scale's own, or the least that the mesh "
            "deals out evenly, where that is more.",
            legal=AT_LEAST_ZERO,
        ),
        planner_flags.SEQUENCE,
        Flag(
            "accumulation",
            "integer",
            1,
            "Micro-batches of a step.",
            legal=AT_LEAST_ONE,
        ),
        Flag(
            "remat",
            "choice",
            "full",
            "What a block keeps for its gradient.",
            ("none", "dots", "full"),
        ),
        Flag(
            "schedule",
            "text",
            "1f1b",
            "Of a mesh with stages: gpipe, 1f1b, interleaved:V with V parts of the model on each, "
            "zero_bubble.",
        ),
        Flag(
            "state_dtype",
            "choice",
            "float32",
            "Type of Adam's moments, and of the gradients of a micro-batch.",
            lambda: DTYPES,
        ),
        Flag(
            "tries",
            "integer",
            3,
            "Layouts that are compiled in search of one that fits, where the asked one does not.",
            legal=AT_LEAST_ZERO,
        ),
        Flag("out", "text", "", "Folder to keep the plan in, as JSON; empty keeps nothing."),
    ),
)
GROUPS = (PLAN,)


def main(values):
    """Compiles and reports; see the module docstring."""
    from experiments import compile_report

    asked = planner_flags.settings(values, [flag.name for flag in PLAN.flags])
    return compile_report.run(asked)


if __name__ == "__main__":
    flags.run(main, __doc__, GROUPS)
