"""Where the stages of a schedule keep what they need later: slots of buffers, as data.

A slot is taken when its content is made and free again after its last use, so that a buffer holds
exactly the schedule's peak: about `stages` micro-batches for 1F1B, all of them for GPipe.
"""

import dataclasses

import numpy as np

from sparse_dataflow.parallel.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    WEIGHTS,
    Schedule,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """Slots of a schedule's buffers; int32 [stages, ticks] each, -1 where there is none.

    Attributes:
      saved: of what a forward keeps for the backward, until its weight gradients are made.
      recomputed: of what a recomputation makes, equally long.
      pending: of what an input gradient leaves to the weight gradients.
      activation: of the activations that a forward reads, in the inbox of the stage.
      gradient: of the gradient that a backward reads; the last part's forward leaves it there.
      activation_arrives: where to put, before the tick's action, what the stage before has sent.
      gradient_arrives: the same of the stage after.
      peak: field name of a buffer -> int32 [stages], slots in use at once.
    """

    saved: np.ndarray
    recomputed: np.ndarray
    pending: np.ndarray
    activation: np.ndarray
    gradient: np.ndarray
    activation_arrives: np.ndarray
    gradient_arrives: np.ndarray
    peak: dict[str, np.ndarray]


def allocate(schedule: Schedule) -> Slots:
    """The slots of a schedule, with as few as possible."""
    when, last = schedule.when, schedule.parts - 1
    forward, backward, weights = when[FORWARD], when[BACKWARD], when[WEIGHTS]
    never = np.full_like(forward, -1)
    trains = BACKWARD in schedule.actions
    # What a part sends arrives a tick later; its end parts have their inputs at hand.
    activation_arrives = np.roll(forward, 1, axis=1) + 1
    activation_arrives[:, 0] = -1
    gradient_arrives = np.roll(backward, -1, axis=1) + 1 if trains else never.copy()
    gradient_arrives[:, last] = forward[:, last] if trains else -1
    made = {
        "saved": (forward if trains else never, weights, (FORWARD, RECOMPUTE, BACKWARD, WEIGHTS)),
        "recomputed": (when[RECOMPUTE], weights, (RECOMPUTE, BACKWARD, WEIGHTS)),
        "pending": (backward, weights, (BACKWARD, WEIGHTS)),
        "activation": (activation_arrives, forward, (FORWARD,)),
        "gradient": (gradient_arrives, backward, (BACKWARD,)),
    }
    tables, peak, slots = {}, {}, {}
    for name, (start, stop, readers) in made.items():
        slots[name] = _colour(start, stop, schedule.stages)
        tables[name] = _at(schedule, slots[name], readers)
        by_stage = slots[name].reshape(schedule.micro_batches, -1, schedule.stages)
        peak[name] = by_stage.max(axis=(0, 1)) + 1
    tables["activation_arrives"] = _arrivals(schedule, activation_arrives, slots["activation"])
    gradient_arrives[:, last] = -1
    tables["gradient_arrives"] = _arrivals(schedule, gradient_arrives, slots["gradient"])
    at_last = np.nonzero((schedule.action == FORWARD) & (_part(schedule) == last))
    tables["gradient"][at_last] = slots["gradient"][schedule.micro_batch[at_last], last]
    return Slots(**tables, peak=peak)


def _colour(start, stop, stages):
    """A slot for each [micro_batch, part] in use from start to stop (both included; -1: never)."""
    slots = np.full(start.shape, -1, np.int32)
    for stage in range(stages):
        own = [(start[i, part], stop[i, part], i, part)
               for i in range(len(start)) for part in range(stage, start.shape[1], stages)
               if start[i, part] >= 0]  # fmt: skip
        free_after: list[int] = []
        for first, end, i, part in sorted(own):
            slot = next((s for s, busy in enumerate(free_after) if busy < first), len(free_after))
            free_after[slot : slot + 1] = [end]
            slots[i, part] = slot
    return slots


def _part(schedule):
    return schedule.chunk * schedule.stages + np.arange(schedule.stages)[:, None]


def _at(schedule, slots, readers):
    """Slots in the table: those of the tick's micro-batch and part, where its action uses them."""
    used = np.isin(schedule.action, readers)
    return np.where(used, slots[schedule.micro_batch, _part(schedule)], -1).astype(np.int32)


def _arrivals(schedule, ticks, slots):
    table = np.full(schedule.action.shape, -1, np.int32)
    micro_batch, part = np.nonzero(ticks >= 0)
    table[part % schedule.stages, ticks[micro_batch, part]] = slots[micro_batch, part]
    return table
