"""Pipeline schedules as data: what every stage does at every tick.

A tick is one action of one stage on one micro-batch and one chunk of layers, and all stages tick
together, so actions are made about equally long: a backward is two of them, the input gradient and
the weight gradients.  Chunk c of stage s holds part c * stages + s of the model's layers.

Bubbles and memory follow from the table; the closed forms of the bubble, (p - 1) / (m + p - 1) for
`gpipe` and `1f1b` and (p - 1) / (m v + p - 1) for `interleaved`, are arXiv 2104.04473, section 2.2.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sparse_dataflow.files.errors import UserError

IDLE, FORWARD, RECOMPUTE, BACKWARD, WEIGHTS = range(5)
"""Actions; BACKWARD is the gradient of a part's input, WEIGHTS that of its weights."""

LETTERS = ".FRBW"

Action = tuple[int, int, int]
"""(action, micro-batch, chunk)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A checked table.

    Attributes:
      name: of the rule that made it.
      micro_batches: of one optimizer step.
      chunks: parts of the model that a stage holds.
      actions: that each part does once a micro-batch, in this order.
      action: int32 [stages, ticks], one of the actions above.
      micro_batch: int32 [stages, ticks], 0 where idle.
      chunk: int32 [stages, ticks], 0 where idle.
    """

    name: str
    micro_batches: int
    chunks: int
    actions: tuple[int, ...]
    action: np.ndarray
    micro_batch: np.ndarray
    chunk: np.ndarray

    def __post_init__(self):
        _check(self)

    @property
    def stages(self) -> int:
        """Devices in a row."""
        return self.action.shape[0]

    @property
    def ticks(self) -> int:
        """Ticks of one optimizer step."""
        return self.action.shape[1]

    @property
    def parts(self) -> int:
        """Parts that the model's layers are divided into."""
        return self.stages * self.chunks

    def duration(self, seconds: Sequence[float] = (0, 1, 1, 1, 1)) -> float:
        """Length of the step where each tick lasts as long as its longest action.

        Args:
          seconds: of each action on one chunk, from IDLE to WEIGHTS.
        """
        return float(np.asarray(seconds, np.float64)[self.action].max(axis=0).sum())

    def bubble(self, seconds: Sequence[float] = (0, 1, 1, 1, 1)) -> float:
        """Fraction of the stages' time in which they do nothing, in [0, 1); seconds as above."""
        busy = np.asarray(seconds, np.float64)[self.action].sum()
        return float(1 - busy / (self.stages * self.duration(seconds)))

    @functools.cached_property
    def when(self) -> dict[int, np.ndarray]:
        """Action -> int32 [micro_batches, parts], the tick of each; -1 where it never happens."""
        ticks = {}
        for action in range(1, len(LETTERS)):
            ticks[action] = np.full((self.micro_batches, self.parts), -1, np.int32)
            stage, tick = np.nonzero(self.action == action)
            part = self.chunk[stage, tick] * self.stages + stage
            ticks[action][self.micro_batch[stage, tick], part] = tick
        return ticks


def make(
    name: str, stages: int, micro_batches: int, chunks: int = 1, recompute: bool = False
) -> Schedule:
    """The schedule of a name in SCHEDULES.

    Args:
      name: of the rule.
      stages: devices in a row, p.
      micro_batches: of one optimizer step, m.
      chunks: parts of the model that a stage holds, v; above 1 for `interleaved` and `gpipe` only.
      recompute: whether activations are computed again before their gradient.

    Raises:
      UserError: if the rule has no schedule for these counts; the legal ones are named.
    """
    if min(stages, micro_batches, chunks) < 1:
        raise UserError(
            f"{stages} stages, {micro_batches} micro-batches and {chunks} chunks; legal: each at "
            "least 1."
        )
    parse(written(name, chunks))
    if name == "interleaved" and micro_batches % stages:
        nearest = max(1, round(micro_batches / stages)) * stages
        raise UserError(
            f"--schedule=interleaved over {stages} stages cannot run {micro_batches} micro-batches "
            f"(--accumulation); legal: multiples of {stages}, such as {nearest}."
        )
    rule = SCHEDULES[name]
    orders = [rule.order(stages, micro_batches, chunks, stage) for stage in range(stages)]
    actions: tuple[int, ...] = (FORWARD, BACKWARD, WEIGHTS)
    if recompute:
        actions = (FORWARD, RECOMPUTE, BACKWARD, WEIGHTS)
        orders = [_with_recompute(order) for order in orders]
    columns = _placed(orders, WEIGHTS if rule.whole else BACKWARD)
    return Schedule(name, micro_batches, chunks, actions, *columns)


def forward_only(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The forwards of `gpipe`, to evaluate a model; arguments as in `make`."""
    orders = [
        [act for act in gpipe(stages, micro_batches, chunks, stage) if act[0] == FORWARD]
        for stage in range(stages)
    ]
    return Schedule("forward_only", micro_batches, chunks, (FORWARD,), *_placed(orders, FORWARD))


class Rule(NamedTuple):
    """What makes a schedule.

    Attributes:
      order: (stages, micro-batches, chunks, stage) -> the stage's actions in order.
      whole: whether the stage before is served only after the weight gradients, as the closed forms
        of the bubble have it, or as soon as its gradient is there.
    """

    order: Callable[[int, int, int, int], list[Action]]
    whole: bool = True


def gpipe(stages: int, micro_batches: int, chunks: int, stage: int) -> list[Action]:
    """All forwards, then all backwards (arXiv 1811.06965): stores every micro-batch."""
    forward = [(i, c) for c in range(chunks) for i in range(micro_batches)]
    backward = [(i, c) for c in reversed(range(chunks)) for i in range(micro_batches)]
    return _by_turns(forward, backward, ahead=len(forward))


def one_f_one_b(stages: int, micro_batches: int, chunks: int, stage: int) -> list[Action]:
    """A backward as soon as there is one (arXiv 1806.03377): stores at most stages - stage."""
    work = [(micro_batch, 0) for micro_batch in range(micro_batches)]
    return _by_turns(work, work, ahead=stages - stage)


def interleaved(stages: int, micro_batches: int, chunks: int, stage: int) -> list[Action]:
    """1F1B over chunks; `stages` micro-batches pass each chunk in turn (arXiv 2104.04473)."""
    groups = [range(first, first + stages) for first in range(0, micro_batches, stages)]
    forward = [(i, c) for group in groups for c in range(chunks) for i in group]
    backward = [(i, c) for group in groups for c in reversed(range(chunks)) for i in group]
    ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1
    return _by_turns(forward, backward, ahead)


def zero_bubble(stages: int, micro_batches: int, chunks: int, stage: int) -> list[Action]:
    """1F1B whose weight gradients fill the gaps (ZB-H1, arXiv 2401.10241).

    Stores at most as many micro-batches as the first stage of 1F1B, and takes 3 m + p - 1 ticks.
    """
    work = [(micro_batch, 0) for micro_batch in range(micro_batches)]
    return _by_turns(work, work, ahead=stages - stage, behind=stage)


SCHEDULES: dict[str, Rule] = {
    "gpipe": Rule(gpipe),
    "1f1b": Rule(one_f_one_b),
    "interleaved": Rule(interleaved),
    "zero_bubble": Rule(zero_bubble, whole=False),
}

CHUNKED = ("interleaved", "gpipe")
"""Schedules whose stages may hold several chunks."""


def parse(text: str) -> tuple[str, int]:
    """(name, chunks of a stage) of a schedule as it is written, "1f1b" or "interleaved:2".

    Raises:
      UserError: no such schedule, or no such number.
    """
    name, colon, chunks = text.partition(":")
    if name not in SCHEDULES or (colon and not (chunks.isdecimal() and int(chunks))):
        raise UserError(
            f"--schedule={text} is unknown; legal: {', '.join(SCHEDULES)}, or interleaved:2 for "
            "two chunks a stage."
        )
    if colon and int(chunks) > 1 and name not in CHUNKED:
        raise UserError(
            f"--schedule={text}: stages of {name} hold one chunk; legal: {name}, or "
            f"{' or '.join(f'{other}:{chunks}' for other in CHUNKED)}."
        )
    return name, int(chunks) if colon else 1


def written(name: str, chunks: int) -> str:
    """The inverse of `parse`."""
    return f"{name}:{chunks}" if chunks > 1 else name


def _by_turns(forward, backward, ahead, behind=0):
    """`ahead` forwards; then backward and forward by turns; W follows `behind` backwards later."""
    forward = [(FORWARD, *work) for work in forward]
    weights = [(WEIGHTS, *work) for work in backward]
    order = forward[:ahead]
    for number, work in enumerate(backward):
        order.append((BACKWARD, *work))
        order += weights[number - behind : number - behind + 1] if number >= behind else []
        order += forward[ahead + number : ahead + number + 1]
    return order + weights[max(len(weights) - behind, 0) :]


def _with_recompute(order):
    """The order with a recomputation before each backward."""
    return [
        act
        for action, *work in order
        for act in ([(RECOMPUTE, *work)] if action == BACKWARD else []) + [(action, *work)]
    ]


def _placed(orders, serves):
    """The table's three columns, in which each stage does its actions in order, each as soon as its
    inputs are there; `serves` is the action after which the stage before may do its backward."""
    stages = len(orders)
    last = stages * (1 + max(chunk for order in orders for _, _, chunk in order)) - 1
    ended: set[Action] = set()
    table: list[list[Action]] = [[] for _ in orders]
    waiting = [list(reversed(order)) for order in orders]
    while any(waiting):
        ending = []
        for stage, order in enumerate(waiting):
            action, micro_batch, chunk = order[-1] if order else (IDLE, 0, 0)
            part = chunk * stages + stage
            needs = None
            if action == FORWARD and part:
                needs = FORWARD, micro_batch, part - 1
            elif action == BACKWARD and part < last:
                needs = serves, micro_batch, part + 1
            if order and (needs is None or needs in ended):
                table[stage].append(order.pop())
                ending.append((action, micro_batch, part))
            else:
                table[stage].append((IDLE, 0, 0))
        if not ending:
            raise ValueError("The stages wait for each other.")
        ended.update(ending)
    return np.moveaxis(np.array(table, np.int32), 2, 0)


def _check(schedule):
    """Raises ValueError where an action is missing, doubled or precedes what it needs."""
    when, needed = schedule.when, schedule.actions
    for action in range(1, len(LETTERS)):
        times = np.sum(schedule.action == action)
        wanted = schedule.micro_batches * schedule.parts if action in needed else 0
        if times != wanted or (wanted and when[action].min() < 0):
            raise ValueError(f"{LETTERS[action]} does not happen once a micro-batch and part.")
    for earlier, later in itertools.pairwise(needed):
        if np.any(when[earlier] >= when[later]):
            raise ValueError(f"{LETTERS[later]} comes before its {LETTERS[earlier]}.")
    if np.any(np.diff(when[FORWARD], axis=1) <= 0):
        raise ValueError("F comes before the part before it has sent its activations.")
    if BACKWARD in needed and np.any(np.diff(when[BACKWARD], axis=1) >= 0):
        raise ValueError("B comes before the part after it has sent its gradient.")
