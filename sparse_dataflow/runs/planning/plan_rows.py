"""Rows of the planner's tables; loads no jax."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_dataflow.hardware import chips
from sparse_dataflow.planning import cost, plan_memory, search


def row(request: search.Request, choice: Mapping, speed: float) -> dict[str, Any]:
    """Returns one plan as a row of a table: speed, MFU, memory, counts, and what limits it.

    Args:
      request: that the plan is one of.
      choice: choices of the plan, as `search.Priced.ranked` yields them.
      speed: its tokens per second and chip.
    """
    plan = search.scalar_plan(request.plan(choice))
    flops = cost.flops_per_token(request.config, request.sequence).total
    memory = plan_memory.plan_bytes(request.config, request.sequence, plan).total
    return {
        "tokens_per_second_per_chip": float(speed),
        "mfu": cost.mfu(flops, float(speed), request.chip, request.config.compute_dtype),
        "gib": float(memory) / chips.GIB,
        **{name: getattr(plan, name) for name in ("data", "stage", "fsdp", "tensor")},
        **{name: getattr(plan, name) for name in ("micro_batch", "accumulation", "chunks")},
        **{name: getattr(plan, name) for name in search.NAMES},
        "limit": search.explain(request, choice).limit,
    }


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows that have the same columns; at least one."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
