"""The commands that start a training run under a parallel plan; loads no jax."""

import math
from typing import Any

from sparse_dataflow.config import settings
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.parallel.pipeline import schedules
from sparse_dataflow.planning.parallel_plan import ParallelPlan
from sparse_dataflow.runs.planning.options import ModelOptions
from sparse_dataflow.runs.request import spelling

NODE = 8
"""GPUs of a node."""
MEMORY_FRACTION = 0.92
"""XLA_PYTHON_CLIENT_MEM_FRACTION of a GPU: JAX reserves 0.75 by default, the planner uses 0.9."""


def experiment(options: ModelOptions) -> str:
    """Returns the name of the experiment that trains the model of `options`."""
    return "gpt13b_dense" if options.density == 1 else "gpt13b_sparse"


def flags(options: ModelOptions, plan: ParallelPlan) -> str:
    """Returns the flags of `experiment` for a plan with numbers as its counts."""
    values: dict[str, Any] = {
        "training.sequence": options.sequence_length,
        "training.batch": plan.batch,
        "training.micro_batches": plan.accumulation,
        "model.remat": plan.remat,
        "parallel.mesh": plan.mesh,
        "parallel.zero": plan.zero,
    }
    if plan.stage > 1:
        values["parallel.schedule"] = schedules.format_schedule(plan.schedule, int(plan.chunks))
    if options.density < 1:
        values |= {"sparsity.density": options.density, "sparsity.block": options.block}
    if plan.exchanges:
        values["parallel.experts"] = plan.experts
    if options.model.experts:
        names = ("experts", "top_k", "expert_capacity")
        values |= {f"model.{name}": getattr(options.model, name) for name in names}
    if options.model.quantized:
        values["model.precision"] = options.precision
    words = [f"{spelling(path)}={settings.text(value)}" for path, value in values.items()]
    return " ".join([f"--scale={options.scale}", *words])


def command(options: ModelOptions, plan: ParallelPlan, chip: Chip) -> str:
    """Returns the command of one process."""
    return f"{_environment(chip)}python -m experiments.{experiment(options)} {flags(options, plan)}"


def launcher(options: ModelOptions, plan: ParallelPlan, chip: Chip) -> str:
    """Returns the line of launch/ that starts it on all chips; "" where one process has them."""
    if chip.name.startswith("tpu"):
        return (
            f"sh launch/tpu_vm.sh start NAME ZONE runs/{options.scale} {experiment(options)} "
            f"{flags(options, plan)}"
        )
    if plan.chips <= NODE:
        return ""
    nodes = math.ceil(plan.chips / NODE)
    return (
        f"{_environment(chip)}EXPERIMENT={experiment(options)} sbatch --nodes={nodes} "
        f"--gpus-per-node={NODE} launch/slurm.sbatch {flags(options, plan)}"
    )


def _environment(chip):
    if chip.name.startswith("tpu"):
        return ""
    return f"XLA_PYTHON_CLIENT_MEM_FRACTION={MEMORY_FRACTION} "
