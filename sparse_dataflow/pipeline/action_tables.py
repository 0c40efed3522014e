"""Tables of pipelines: the action of every stage at every tick, as data.

In a tick, a stage does one action on one micro-batch and one chunk of layers. All stages tick
together, so actions should take equally long: a backward pass is two actions, input gradient and
weight gradients. Chunk c of stage s is virtual stage c * stages + s of the model.

Bubbles and memory follow from the table. Closed forms of the bubble (arXiv 2104.04473, section
2.2): (p - 1) / (m + p - 1) for `gpipe` and `1f1b`, (p - 1) / (m v + p - 1) for `interleaved`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sparse_dataflow.files.errors import UserError

IDLE, FORWARD, RECOMPUTE, BACKWARD, WEIGHTS = range(5)
"""Actions; BACKWARD computes the gradient of the input, WEIGHTS that of the weights."""

LETTERS = ".FRBW"

Action = tuple[int, int, int]
"""(action, micro-batch, chunk)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """The validated table of a pipeline's actions.

    Attributes:
      name: name of its rule.
      micro_batches: micro-batches per optimizer step.
      chunks: virtual stages per stage.
      actions: actions that each virtual stage does once per micro-batch, in this order.
      action: int32 [stages, ticks], one of the actions above.
      micro_batch: int32 [stages, ticks], 0 if idle.
      chunk: int32 [stages, ticks], 0 if idle.
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
        """Number of pipeline stages."""
        return self.action.shape[0]

    @property
    def ticks(self) -> int:
        """Ticks per optimizer step."""
        return self.action.shape[1]

    @property
    def virtual_stages(self) -> int:
        """Number of virtual stages: stages times chunks."""
        return self.stages * self.chunks

    def duration(self, seconds: Sequence[float] = (0, 1, 1, 1, 1)) -> float:
        """Returns the duration of a step; each tick takes as long as its longest action.

        Args:
          seconds: duration of each action on one chunk, from IDLE to WEIGHTS.
        """
        # Stages wait for each other in every tick, as neighbours exchange arrays between ticks.
        return float(np.asarray(seconds, np.float64)[self.action].max(axis=0).sum())

    def bubble(self, seconds: Sequence[float] = (0, 1, 1, 1, 1)) -> float:
        """Returns the idle fraction of the stages' time, in [0, 1); seconds as in `duration`."""
        busy = np.asarray(seconds, np.float64)[self.action].sum()
        return float(1 - busy / (self.stages * self.duration(seconds)))

    @functools.cached_property
    def when(self) -> dict[int, np.ndarray]:
        """Action -> int32 [micro_batches, virtual_stages], its tick; -1 if it never happens."""
        # One grid per action, because every later question (bubbles, slots, checks) asks when
        # something happens to a micro-batch, not what a stage does in a tick.
        ticks = {}
        for action in range(1, len(LETTERS)):
            ticks[action] = np.full((self.micro_batches, self.virtual_stages), -1, np.int32)
            stage, tick = np.nonzero(self.action == action)
            virtual_stage = self.chunk[stage, tick] * self.stages + stage
            ticks[action][self.micro_batch[stage, tick], virtual_stage] = tick
        return ticks


def make(
    name: str, stages: int, micro_batches: int, chunks: int = 1, recompute: bool = False
) -> Table:
    """Creates the table of a rule in RULES.

    Args:
      stages: number of pipeline stages, p.
      micro_batches: micro-batches per optimizer step, m.
      chunks: virtual stages per stage, v; above 1 for `interleaved` and `gpipe` only.
      recompute: whether activations are recomputed before their gradient.

    Raises:
      UserError: the rule has no table for these counts; names the legal ones.
    """
    if min(stages, micro_batches, chunks) < 1:
        raise UserError(
            f"{stages} stages, {micro_batches} micro-batches and {chunks} chunks; legal: each at "
            "least 1."
        )
    parse(format_rule(name, chunks))
    if name == "interleaved" and micro_batches % stages:
        nearest = max(1, round(micro_batches / stages)) * stages
        raise UserError(
            f"--set parallel.schedule=interleaved over {stages} stages cannot run "
            f"{micro_batches} micro-batches (training.micro_batches); legal: multiples of "
            f"{stages}, such as {nearest}."
        )
    rule = RULES[name]
    orders = [rule.order(stages, micro_batches, chunks, stage) for stage in range(stages)]
    actions: tuple[int, ...] = (FORWARD, BACKWARD, WEIGHTS)
    if recompute:
        # Recomputation does not read the gradient: as an action of its own it fills a tick in which
        # the stage would wait for it.
        actions = (FORWARD, RECOMPUTE, BACKWARD, WEIGHTS)
        orders = [_with_recompute(order) for order in orders]
    # Rules give orders only.  Ticks follow from them and from what each action waits for.
    columns = _table(orders, WEIGHTS if rule.whole_backward else BACKWARD)
    return Table(name, micro_batches, chunks, actions, *columns)


def forward_only(stages: int, micro_batches: int, chunks: int = 1) -> Table:
    """Returns the forward actions of `gpipe`, for evaluation; arguments as in `make`."""
    orders = [
        [act for act in gpipe(stages, micro_batches, chunks, stage) if act[0] == FORWARD]
        for stage in range(stages)
    ]
    return Table("forward_only", micro_batches, chunks, (FORWARD,), *_table(orders, FORWARD))


class StageOrder(NamedTuple):
    """A rule: the order of the actions of a stage in its table.

    Attributes:
      order: (stages, micro-batches, chunks, stage) -> the stage's actions in order.
      whole_backward: whether the previous stage gets its gradient only after the weight gradients,
        as the closed forms of the bubble assume, or right after the input gradient.
    """

    order: Callable[[int, int, int, int], list[Action]]
    whole_backward: bool = True


def gpipe(stages: int, micro_batches: int, chunks: int, stage: int) -> list[Action]:
    """All forwards, then all backwards (arXiv 1811.06965): stores every micro-batch."""
    # Chunk by chunk: while a micro-batch passes the other stages, this one does the next.
    forward = [(i, c) for c in range(chunks) for i in range(micro_batches)]
    backward = [(i, c) for c in reversed(range(chunks)) for i in range(micro_batches)]
    return _by_turns(forward, backward, ahead=len(forward))


def one_f_one_b(stages: int, micro_batches: int, chunks: int, stage: int) -> list[Action]:
    """A backward as early as possible (arXiv 1806.03377): stores at most stages - stage."""
    work = [(micro_batch, 0) for micro_batch in range(micro_batches)]
    # The first gradient comes back after a micro-batch has passed all later stages and returned:
    # until then a stage does one forward for itself and for each of them.
    return _by_turns(work, work, ahead=stages - stage)


def interleaved(stages: int, micro_batches: int, chunks: int, stage: int) -> list[Action]:
    """1F1B over chunks: `stages` micro-batches per chunk in turn (arXiv 2104.04473)."""
    # A group has as many micro-batches as there are stages: when the last one has left a stage's
    # chunk, the first one has come around the ring for the next chunk.
    groups = [range(first, first + stages) for first in range(0, micro_batches, stages)]
    forward = [(i, c) for group in groups for c in range(chunks) for i in group]
    backward = [(i, c) for group in groups for c in reversed(range(chunks)) for i in group]
    # The last stage first does all chunks but its last for `stages` micro-batches, then one forward
    # of its last chunk. Each stage before it does two more: a micro-batch takes the way down to the
    # last stage, and its gradient the way back.
    ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1
    return _by_turns(forward, backward, ahead)


def zero_bubble(stages: int, micro_batches: int, chunks: int, stage: int) -> list[Action]:
    """1F1B whose weight gradients fill the bubbles (ZB-H1, arXiv 2401.10241).

    Stores at most as many micro-batches as the first stage of 1F1B; takes 3 m + p - 1 ticks.
    """
    work = [(micro_batch, 0) for micro_batch in range(micro_batches)]
    # Stage s has p - s micro-batches in flight, so s more may wait for their weight gradients:
    # every stage stores p. A late W leaves its ticks to the B for which the previous stage waits.
    return _by_turns(work, work, ahead=stages - stage, behind=stage)


RULES: dict[str, StageOrder] = {
    "gpipe": StageOrder(gpipe),
    "1f1b": StageOrder(one_f_one_b),
    "interleaved": StageOrder(interleaved),
    "zero_bubble": StageOrder(zero_bubble, whole_backward=False),
}

CHUNKED = ("interleaved", "gpipe")
"""Rules that allow several chunks per stage."""


def parse(text: str) -> tuple[str, int]:
    """Parses a rule such as "1f1b" or "interleaved:2" to (name, chunks per stage).

    Raises:
      UserError: an unknown rule or an illegal number of chunks.
    """
    name, colon, chunks = text.partition(":")
    if name not in RULES or (colon and not (chunks.isdecimal() and int(chunks))):
        raise UserError(
            f"--set parallel.schedule={text} is unknown; legal: {', '.join(RULES)}, or "
            "interleaved:2 for two chunks per stage."
        )
    if colon and int(chunks) > 1 and name not in CHUNKED:
        raise UserError(
            f"--set parallel.schedule={text}: stages of {name} hold one chunk; legal: {name}, or "
            f"{' or '.join(f'{other}:{chunks}' for other in CHUNKED)}."
        )
    return name, int(chunks) if colon else 1


def format_rule(name: str, chunks: int) -> str:
    """Inverts `parse`."""
    return f"{name}:{chunks}" if chunks > 1 else name


def _by_turns(forward, backward, ahead, behind=0):
    """Orders `ahead` forwards, then alternates; W follows its B after `behind` more backwards."""
    forward = [(FORWARD, *work) for work in forward]
    weights = [(WEIGHTS, *work) for work in backward]
    order = forward[:ahead]
    for number, work in enumerate(backward):
        # The backward goes before the next forward: its W frees the slot that this forward takes.
        # So a stage stores at most `ahead` + `behind` micro-batches.
        order.append((BACKWARD, *work))
        order += weights[number - behind : number - behind + 1] if number >= behind else []
        order += forward[ahead + number : ahead + number + 1]
    # Weight gradients for which no backward was left to hide behind.
    return order + weights[max(len(weights) - behind, 0) :]


def _with_recompute(order):
    """Inserts a recomputation before each backward."""
    return [
        act
        for action, *work in order
        for act in ([(RECOMPUTE, *work)] if action == BACKWARD else []) + [(action, *work)]
    ]


def _table(orders, releases):
    """Returns the arrays (action, micro_batch, chunk); each action runs once its inputs exist.

    `releases` is the action after which the previous stage may run its backward.
    """
    stages = len(orders)
    last = stages * (1 + max(chunk for order in orders for _, _, chunk in order)) - 1
    ended: set[Action] = set()
    table: list[list[Action]] = [[] for _ in orders]
    # Reversed, so that the next action is popped from the end.
    waiting = [list(reversed(order)) for order in orders]
    while any(waiting):
        ending = []
        for stage, order in enumerate(waiting):
            action, micro_batch, chunk = order[-1] if order else (IDLE, 0, 0)
            # Only what comes from another stage is waited for; the stage's own order has the rest.
            number = chunk * stages + stage
            needs = None
            if action == FORWARD and number:
                needs = FORWARD, micro_batch, number - 1
            elif action == BACKWARD and number < last:
                needs = releases, micro_batch, number + 1
            if order and (needs is None or needs in ended):
                table[stage].append(order.pop())
                ending.append((action, micro_batch, number))
            else:
                table[stage].append((IDLE, 0, 0))
        if not ending:
            raise ValueError("The stages wait for each other.")
        # Only after all stages: what ends in a tick reaches a neighbour in the next one, because
        # all transfers of the loop are between ticks.
        ended.update(ending)
    return np.moveaxis(np.array(table, np.int32), 2, 0)


def _check(table):
    """Raises ValueError if an action is missing, repeated or before its inputs."""
    when, needed = table.when, table.actions
    for action in range(1, len(LETTERS)):
        times = np.sum(table.action == action)
        expected = table.micro_batches * table.virtual_stages if action in needed else 0
        if times != expected or (expected and when[action].min() < 0):
            raise ValueError(
                f"{LETTERS[action]} does not happen once per micro-batch and virtual stage."
            )
    # No transfer connects the actions of one virtual stage: only this order says that each finds
    # the values that it reads.
    for earlier, later in itertools.pairwise(needed):
        if np.any(when[earlier] >= when[later]):
            raise ValueError(f"{LETTERS[later]} comes before its {LETTERS[earlier]}.")
    if np.any(np.diff(when[FORWARD], axis=1) <= 0):
        raise ValueError("F comes before the previous virtual stage has sent its activations.")
    if BACKWARD in needed and np.any(np.diff(when[BACKWARD], axis=1) >= 0):
        raise ValueError("B comes before the next virtual stage has sent its gradient.")
