"""Whether a model trains on chips that are not here: its step through their real compiler.

Says whether the step fits, its bytes a chip by category beside the planner's prediction, its FLOPs,
the collectives of the compiled program, and the time to compile. A plan that does not fit is
answered with the nearest that does, found by compiling.

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

With --account it says where a step's bytes go instead:

    python -m experiments.compile_plan --scale=13b --density=0.125 --topology=h200:1 --batch=2 \\
        --mesh=fsdp:1 --state_dtype=bfloat16 --remat=none --account

v5p:1x1x1 and v6e:1x1 are one TPU.

Needs the compiler of the chips: make aot-tpu, or make aot-gpu, installs it. Without --mesh the
planner's search chooses the plan. Takes half a minute to two minutes of one core, and 2 GB.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.planning.options import ModelOptions
from sparse_dataflow.core.config.model import DTYPES, REMATS
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, AT_LEAST_ZERO, setting
from sparse_dataflow.core.config.training import OPTIMIZERS


@dataclasses.dataclass(frozen=True)
class Options(ModelOptions):
    """What is compiled for which chips."""

    topology: str = setting(
        "v5p:2x2x1",
        "Chips: v5e:4x4, v5p:8x8x16, v6e:16x16 (chips along each axis of the torus), h200:8, "
        "h200:4x8 (nodes x GPUs); a100, h100 and b200 as h200.",
    )
    slices: int = setting(
        1,
        "TPU slices of that topology, joined by the data-centre network.",
        legal=AT_LEAST_ONE,
    )
    mesh: str = setting(
        "auto",
        "Chips along each axis, as in data:2,stage:4,fsdp:4,tensor:8; one size may be left out. "
        "auto is the fastest plan that the planner finds; it chooses the ZeRO stage, the number of "
        "micro-batches, remat and the schedule too.",
    )
    zero: int = setting(
        3,
        "What fsdp shards: 0 nothing, 1 moments, 2 gradients too, 3 parameters too.",
        legal=("0 to 3", lambda level: 0 <= level <= 3),
    )
    batch: int = setting(
        0,
        "Sequences per optimizer step; 0 is the scale's own, rounded to what the mesh divides.",
        legal=AT_LEAST_ZERO,
    )
    accumulation: int = setting(1, "Micro-batches of a step.", legal=AT_LEAST_ONE)
    remat: str = setting("full", "What a block recomputes for its gradient.", choices=REMATS)
    schedule: str = setting(
        "1f1b",
        "Pipeline schedule: gpipe, 1f1b, interleaved:V (V model chunks a stage) or zero_bubble.",
    )
    state_dtype: str = setting(
        "float32", "Dtype of the moments and of a micro-batch's gradients.", choices=DTYPES
    )
    optimizer: str = setting("adamw", "Optimizer of the matrices.", choices=OPTIMIZERS)
    tries: int = setting(
        3,
        "Plans that are compiled in search of one that fits, where this one does not.",
        legal=AT_LEAST_ZERO,
    )
    account: bool = setting(
        False,
        "Print the bytes that each part of one chip's step moves, from compiled steps of 2 and 4 "
        "layers, scaled to the model's; with --out, write them instead of the plan.",
    )
    out: str = setting("", "Folder for the JSON of the plan; empty writes none.", path=True)


def main(options):
    """Compiles and reports; see the module docstring."""
    from sparse_dataflow.commands.planning import compile_report

    return compile_report.report_compilation(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
