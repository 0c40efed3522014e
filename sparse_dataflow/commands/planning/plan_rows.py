"""Rows of the planner's tables; loads no jax."""

from typing import Any

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.sparsity import GROUPED_PATTERNS
from sparse_dataflow.core.training import cost
from sparse_dataflow.hardware import chips
from sparse_dataflow.planner import search
from sparse_dataflow.planner.efficiency import slower_than_dense
from sparse_dataflow.planner.memory import USABLE
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.settle_advice import MESH


def row(request: search.Request, plan: ParallelPlan, speed: float) -> dict[str, Any]:
    """Returns one plan as a row of a table: speed, MFU, memory, counts, and what limits it.

    Args:
      request: that the plan answers.
      plan: with integers as its counts.
      speed: its tokens per second and chip.
    """
    flops = cost.flops_per_token(request.config, request.sequence).total
    return {
        "tokens_per_second_per_chip": speed,
        "tokens_per_second": speed * request.chips,
        "mfu": cost.mfu(flops, speed, request.chip, request.config.compute_dtype, devices=1),
        "gib": float(request.chip_bytes(plan)) / chips.GIB,
        "memory_share": float(request.chip_bytes(plan)) / (USABLE * request.chip.capacity),
        **{name: getattr(plan, name) for name in MESH},
        **{name: getattr(plan, name) for name in ("micro_batch", "accumulation", "chunks")},
        **{name: getattr(plan, name) for name in search.NAMES},
        "limit": request.time(plan).limit,
    }


def slow_products(config: ModelConfig, chip: chips.Chip) -> str:
    """Returns a sentence on the projections that sparsity is estimated to slow down, or ""."""
    names = slower_than_dense(config, chip.family)
    if not names:
        return ""
    spec = config.linear(names[0])
    products = "equal groups" if spec.pattern in GROUPED_PATTERNS else "index tables"
    return (
        f"Sparsity is estimated to slow down {', '.join(names)} on {chip.name}: blocks of "
        f"{spec.block} ({products}) are too small for it. Legal: a larger --block."
    )
