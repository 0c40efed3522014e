"""The commands that start a training run under a parallel plan; loads no jax."""

import math

from sparse_dataflow.commands.experiment_modules import command_of
from sparse_dataflow.commands.planning.options import ModelOptions
from sparse_dataflow.commands.request import spelling
from sparse_dataflow.core.config import settings
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.pipeline import action_tables
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.runs.run_config import GPT2_VOCABULARY

NODE = 8
"""GPUs of a node."""
CORPUS = "hf:allenai/c4/en"
"""Text that a command names: English of the web, about 156 billion tokens."""


def experiment(options: ModelOptions) -> str:
    """Returns the name of the experiment that trains the model of `options`."""
    return "gpt13b_dense" if options.density == 1 else "gpt13b_sparse"


def flags(options: ModelOptions, plan: ParallelPlan, tokens: float) -> str:
    """Returns the flags of `experiment` for a plan with numbers as its counts.

    Args:
      tokens: training tokens.
    """
    values: dict[str, object] = options.changes | {
        "data.corpus": CORPUS,
        "training.steps": math.ceil(tokens / (plan.batch * options.sequence_length)),
        "training.sequence": options.sequence_length,
        "training.batch": plan.batch,
        "training.micro_batches": plan.accumulation,
        "model.remat": plan.remat,
        "parallel.mesh": plan.mesh,
        "parallel.zero": plan.zero,
    }
    if options.model.vocab_size == GPT2_VOCABULARY:
        values["data.tokenizer"] = "gpt2"
    if plan.stage > 1:
        values["parallel.schedule"] = action_tables.format_rule(plan.schedule, int(plan.chunks))
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


def command(options: ModelOptions, plan: ParallelPlan, tokens: float) -> str:
    """Returns the command of one process; see `flags`."""
    return f"{command_of(experiment(options))} {flags(options, plan, tokens)}"


def launcher(options: ModelOptions, plan: ParallelPlan, tokens: float, chip: Chip) -> str:
    """Returns the line of launch/ that starts it on all chips; "" where one process has them."""
    if chip.name.startswith("tpu"):
        return (
            f"sh launch/tpu_vm.sh start NAME ZONE runs/{options.scale} {experiment(options)} "
            f"{flags(options, plan, tokens)}"
        )
    if plan.chips <= NODE:
        return ""
    nodes = math.ceil(plan.chips / NODE)
    return (
        f"EXPERIMENT={experiment(options)} sbatch --nodes={nodes} "
        f"--gpus-per-node={NODE} launch/slurm.sbatch {flags(options, plan, tokens)}"
    )
