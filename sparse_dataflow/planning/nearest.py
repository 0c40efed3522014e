"""Layouts in the order in which one would try them where a layout does not fit."""

import dataclasses

import numpy as np

from sparse_dataflow.planning import search
from sparse_dataflow.planning.memory import USABLE
from sparse_dataflow.planning.run_layout import RunLayout
from sparse_dataflow.planning.search import Request

CHANGES = (("remat",), ("micro_batch", "accumulation"), ("zero",), ("schedule", "chunks"))
"""What may differ from the asked layout at the price of one change each; the mesh is another."""

LOOKED_AT = 20_000
"""Layouts, the fastest, that are ordered by nearness; a search may have millions."""

MESH = ("data", "stage", "fsdp", "tensor")


def changes(asked: RunLayout, other: RunLayout) -> int:
    """How many choices differ, of the mesh, the micro-batch, ZeRO, the schedule and the remat."""
    if asked.stage == other.stage == 1:
        other = dataclasses.replace(other, schedule=asked.schedule, chunks=asked.chunks)
    differ = lambda names: any(getattr(asked, n) != getattr(other, n) for n in names)  # noqa: E731
    return sum(map(differ, (*CHANGES, MESH)))


def fitting(request: Request, asked: RunLayout | None, spare: float = 1.0) -> list[RunLayout]:
    """The layouts that should fit, nearest first; of equally near ones the fastest first.

    Args:
      request: the model, batch and chips.
      asked: what did not fit, and is left out; None orders by speed alone.
      spare: fraction of the usable memory that they may take.
    """
    priced = search.price(request, search.space(request))
    limit = spare * USABLE * request.chip.capacity
    legal = priced.legal & (priced.memory <= limit)
    speed = np.where(legal, priced.throughput, 0.0).reshape(-1)
    order = np.argsort(-speed, kind="stable")[: int(np.count_nonzero(speed))]
    found = [search.single(request.layout(priced.choice(int(i)))) for i in order[:LOOKED_AT]]
    if asked is None:
        return found
    others = [layout for layout in found if layout != asked and changes(asked, layout)]
    return sorted(others, key=lambda layout: changes(asked, layout))
