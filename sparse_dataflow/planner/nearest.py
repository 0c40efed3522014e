"""Parallel plans that should fit, ordered by similarity to a plan that does not."""

import dataclasses

from sparse_dataflow.planner import search
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.search import Request

CHANGES = (("remat",), ("micro_batch", "accumulation"), ("zero", "experts"), ("schedule", "chunks"))
"""Fields of a plan that count as one change each; the axes of MESH count as one more."""

CANDIDATES = 20_000
"""Number of the fastest plans to consider."""

MESH = ("data", "stage", "fsdp", "context", "feature", "tensor")


def changes(plan: ParallelPlan, other: ParallelPlan) -> int:
    """Counts the differences in mesh, micro-batch, ZeRO stage, schedule and remat."""
    if plan.stage == other.stage == 1:
        other = dataclasses.replace(other, schedule=plan.schedule, chunks=plan.chunks)
    groups = (*CHANGES, MESH)
    return sum(any(getattr(plan, n) != getattr(other, n) for n in names) for names in groups)


def fitting_plans(request: Request, rejected: ParallelPlan | None) -> list[ParallelPlan]:
    """Returns plans that should fit, fewest changes first, then fastest first.

    Args:
      request: the model, batch and chips.
      rejected: the plan that does not fit, which is excluded; None orders by speed alone.

    Raises:
      UserError: no plan is legal; see `search.check_legal`.
    """
    priced = search.price(request)
    search.check_legal(priced)
    plans = [plan for plan, _ in priced.ranked(CANDIDATES)]
    if rejected is None:
        return plans
    others = [plan for plan in plans if changes(rejected, plan)]
    return sorted(others, key=lambda plan: changes(rejected, plan))
