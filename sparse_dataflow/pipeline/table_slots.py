"""Buffer slots in which the stages of a pipeline keep values for later ticks, as data.

A slot is in use from the tick that writes it to its last read. So a buffer has exactly the
table's peak of slots: about `stages` micro-batches for 1F1B, all of them for GPipe.
"""

import dataclasses

import numpy as np

from sparse_dataflow.pipeline.action_tables import BACKWARD, FORWARD, RECOMPUTE, WEIGHTS, Table


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """Slots of a table's buffers; int32 [stages, ticks] each, -1 for none.

    Attributes:
      saved: values that a forward saves for the backward, until the weight gradients.
      recomputed: values of a recomputation, until the weight gradients.
      pending: values of an input gradient for the weight gradients.
      activation: received activations that a forward reads.
      gradient: received gradient that a backward reads; the last virtual stage's forward writes it.
      activation_arrives: slot for the activations from the previous stage, before the action.
      gradient_arrives: slot for the gradient from the next stage, before the action.
      peak: field name of a buffer -> int32 [stages], maximum number of slots in use.
    """

    saved: np.ndarray
    recomputed: np.ndarray
    pending: np.ndarray
    activation: np.ndarray
    gradient: np.ndarray
    activation_arrives: np.ndarray
    gradient_arrives: np.ndarray
    peak: dict[str, np.ndarray]


def allocate(table: Table) -> Slots:
    """Allocates the minimum number of slots for a table."""
    when, last = table.when, table.virtual_stages - 1
    forward, backward, weights = when[FORWARD], when[BACKWARD], when[WEIGHTS]
    never = np.full_like(forward, -1)
    trains = BACKWARD in table.actions
    # A transfer arrives one tick later; the first and the last virtual stage make their own inputs.
    # Column v gets what virtual stage v - 1 sends: on a ring of stages that is the previous stage,
    # in every chunk.
    activation_arrives = np.roll(forward, 1, axis=1) + 1
    activation_arrives[:, 0] = -1
    gradient_arrives = np.roll(backward, -1, axis=1) + 1 if trains else never.copy()
    # The last virtual stage gets its gradient from the head, which its own forward runs. So its
    # slot is in use from that tick, but nothing arrives by a transfer: the line below the loop says
    # so.
    gradient_arrives[:, last] = forward[:, last] if trains else -1
    lifetimes = {
        "saved": (forward if trains else never, weights, (FORWARD, RECOMPUTE, BACKWARD, WEIGHTS)),
        "recomputed": (when[RECOMPUTE], weights, (RECOMPUTE, BACKWARD, WEIGHTS)),
        "pending": (backward, weights, (BACKWARD, WEIGHTS)),
        "activation": (activation_arrives, forward, (FORWARD,)),
        "gradient": (gradient_arrives, backward, (BACKWARD,)),
    }
    by_tick, peak, slots = {}, {}, {}
    for name, (start, stop, readers) in lifetimes.items():
        slots[name] = _colour(start, stop, table.stages)
        by_tick[name] = _at(table, slots[name], readers)
        by_stage = slots[name].reshape(table.micro_batches, -1, table.stages)
        peak[name] = by_stage.max(axis=(0, 1)) + 1
    by_tick["activation_arrives"] = _arrivals(table, activation_arrives, slots["activation"])
    # The slot is allocated; from here on, -1 says that no transfer brings this gradient.
    gradient_arrives[:, last] = -1
    by_tick["gradient_arrives"] = _arrivals(table, gradient_arrives, slots["gradient"])
    # The forward of the last virtual stage writes its gradient, so its row names the slot too,
    # though FORWARD does not read this buffer.
    at_last = np.nonzero((table.action == FORWARD) & (_virtual_stage(table) == last))
    by_tick["gradient"][at_last] = slots["gradient"][table.micro_batch[at_last], last]
    return Slots(**by_tick, peak=peak)


def _colour(start, stop, stages):
    """Returns a slot per [micro_batch, virtual stage], in use from start to stop (-1: never)."""
    slots = np.full(start.shape, -1, np.int32)
    for stage in range(stages):
        intervals = [(start[i, v], stop[i, v], i, v)
                     for i in range(len(start)) for v in range(stage, start.shape[1], stages)
                     if start[i, v] >= 0]  # fmt: skip
        free_after: list[int] = []
        # Intervals in order of their start, each in the lowest free slot, need no more slots than
        # the most intervals that overlap. A slot is free strictly after its last read: a transfer
        # arrives before the action of its tick, which may still read the slot.
        for first, end, i, v in sorted(intervals):
            slot = next((s for s, busy in enumerate(free_after) if busy < first), len(free_after))
            free_after[slot : slot + 1] = [end]
            slots[i, v] = slot
    return slots


def _virtual_stage(table):
    return table.chunk * table.stages + np.arange(table.stages)[:, None]


def _at(table, slots, readers):
    """Returns int32 [stages, ticks]: the slot that each tick's action reads; -1 for none."""
    used = np.isin(table.action, readers)
    return np.where(used, slots[table.micro_batch, _virtual_stage(table)], -1).astype(np.int32)


def _arrivals(table, ticks, slots):
    arrivals = np.full(table.action.shape, -1, np.int32)
    micro_batch, v = np.nonzero(ticks >= 0)
    arrivals[v % table.stages, ticks[micro_batch, v]] = slots[micro_batch, v]
    return arrivals
