"""The plan of an executor, and the memory of a model that it trains."""

from collections.abc import Sequence
from typing import Any

import jax

from sparse_dataflow.commands.preflight import relay_plan
from sparse_dataflow.core.config import remat
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.executor import Executor
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.pipeline.pipelined import Pipelined
from sparse_dataflow.planner import plan_memory
from sparse_dataflow.planner.memory import runs_fused
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.relay.relay_executor import RelayExecutor


def plan_of(
    model: ModelConfig, training: TrainingConfig, executor: Executor, kind: str, chip: Chip
) -> ParallelPlan:
    """Returns the plan by which an executor trains a model.

    Args:
      executor: any but the relay, which `relay_plan.largest_estimate` plans.
      kind: remat of the blocks.
    """
    axes: dict[str, Any] = dict.fromkeys(meshes.AXES, 1)
    settings: dict[str, Any] = {"sequence_parallel": False}
    if isinstance(executor, Sharded):
        axes = dict(executor.mesh.shape)
        settings = {
            "sequence_parallel": True,
            "zero": executor.zero,
            "experts": "exchange" if executor.exchange else "gather",
        }
    if isinstance(executor, Pipelined):
        settings |= {"schedule": executor.schedule, "chunks": executor.division.chunks}
    rows = training.micro_batches * axes["data"] * axes["fsdp"]
    return ParallelPlan(
        **axes,
        **settings,
        micro_batch=training.batch // rows,
        accumulation=training.micro_batches,
        remat=kind,
        fused_attention=runs_fused(model, chip, jax.default_backend() == "cpu"),
        tpu=chip.is_tpu,
        state_dtype=training.state_dtype,
        optimizer=training.optimizer,
    )


def memory_of(
    phases: Sequence[ModelConfig], training: TrainingConfig, executor: Executor, chip: Chip
) -> dict[str, int]:
    """Returns category -> bytes of the fullest device, in the phase that takes the most.

    Args:
      phases: the model in each of its phases.
    """
    if isinstance(executor, RelayExecutor):
        return relay_plan.largest_estimate(phases, training, executor, chip).device
    estimates = (
        plan_memory.run_bytes(
            model,
            training.sequence,
            plan_of(model, training, executor, "full", chip),
            training.freezes,
            remat.kinds(model.remat, model.num_layers),
        )
        for model in phases
    )
    largest = max(estimates, key=lambda estimate: float(estimate.total))
    return {name: round(float(size)) for name, size in largest.categories.items()}
