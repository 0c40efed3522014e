"""Which layout trains a model fastest on given chips: prices all of them.

A `Space` is the product of the choices' levels.  What cannot run is not left out but marked with
what blocks it, so that an impossible request can be answered with the nearest possible one.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparse_dataflow.errors import UserError
from sparse_dataflow.models.sizes import ModelConfig
from sparse_dataflow.planning.chips import GIB, Chip
from sparse_dataflow.planning.efficiency import EFFICIENCIES, PRIOR, Efficiency
from sparse_dataflow.planning.layout_memory import layout_bytes
from sparse_dataflow.planning.memory import USABLE
from sparse_dataflow.planning.run_layout import BUBBLES, RunLayout
from sparse_dataflow.planning.step_time import StepTime, step_time

COUNTS = ("tensor", "stage", "data", "micro_batch", "chunks")
NAMES = ("schedule", "zero", "remat")
CHOICES = COUNTS + NAMES

# What can block a layout, in the order in which it is looked at.
BLOCKS = ("heads", "chips", "layers", "batch", "schedule", "memory")
_LARGEST = {"tensor": 16, "stage": 128, "micro_batch": 32, "data": 64}


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
      config: the model; its remat is a choice of the search, not of the request.
      sequence: tokens a sequence.
      batch: sequences of an optimizer step.
      chip: what it runs on.
      chips: how many, all of which are used.
      state_dtype: see `run_layout.RunLayout`.
    """

    config: ModelConfig
    sequence: int
    batch: int
    chip: Chip
    chips: int
    state_dtype: str = "float32"

    @property
    def efficiency(self) -> Efficiency:
        """The constants of the chip's family, or those that every fit starts from."""
        return EFFICIENCIES.get(self.chip.family, PRIOR)

    def layout(self, choice: Mapping) -> RunLayout:
        """The layout of a choice: "fsdp" and accumulation follow from chips and batch.

        Counts may be arrays; where something does not divide, the layout is nearest below it.
        """
        tensor, stage, data, micro_batch, chunks = (np.asarray(choice[name]) for name in COUNTS)
        fsdp = np.maximum(self.chips // (tensor * stage * data), 1)
        rows = data * fsdp * micro_batch
        return RunLayout(
            tensor=tensor,
            stage=stage,
            data=data,
            micro_batch=micro_batch,
            chunks=chunks,
            fsdp=fsdp,
            accumulation=np.maximum(self.batch // rows, 1),
            **{name: choice[name] for name in NAMES},
            sequence_parallel=True,  # as execution/sharded.py cuts activations
            executor="pipeline" if np.any(stage > 1) else "whole",
            state_dtype=self.state_dtype,
        )


@dataclasses.dataclass(frozen=True)
class Space:
    """The levels of every choice.

    Attributes:
      levels: name in CHOICES -> its values, in the order of CHOICES.
    """

    levels: Mapping[str, tuple]

    @property
    def shape(self) -> tuple[int, ...]:
        """Levels of each choice."""
        return tuple(len(values) for values in self.levels.values())

    @property
    def size(self) -> int:
        """Layouts in all."""
        return math.prod(self.shape)


def space(request: Request) -> Space:
    """The choices that can make sense for a request: divisors, and powers of two."""
    layers, chips = request.config.num_layers, request.chips
    stages = [n for n in _divisors(layers) if chips % n == 0 and n <= _LARGEST["stage"]]
    stages = stages or [1]
    chunks = sorted({c for s in stages if s > 1 for c in _divisors(layers // s)}) or [1]
    dense = not request.config.sparse_projections
    return Space(
        {
            "tensor": _powers(min(chips, _LARGEST["tensor"])),
            "stage": tuple(stages),
            "data": tuple(n for n in _copies(chips) if chips % n == 0),
            "micro_batch": _powers(_LARGEST["micro_batch"]),
            "chunks": tuple(chunks),
            "schedule": tuple(BUBBLES),
            "zero": (1, 2, 3),
            "remat": ("none", "dots", "full") if dense else ("none", "full"),
        }
    )


@dataclasses.dataclass(frozen=True)
class Priced:
    """A whole space with its prices.

    Attributes:
      request: what was asked for.
      space: the choices.
      seconds: float [space.shape], of a step of the request's batch.
      memory: float [space.shape], bytes on the fullest chip.
      blocked: reason in BLOCKS -> bool [space.shape].
    """

    request: Request
    space: Space
    seconds: np.ndarray
    memory: np.ndarray
    blocked: Mapping[str, np.ndarray]

    @property
    def legal(self) -> np.ndarray:
        """bool [space.shape], what nothing blocks."""
        return ~self.blocked_beside("")

    def blocked_beside(self, reason: str) -> np.ndarray:
        """bool [space.shape], what another reason than this one blocks."""
        return np.any([found for name, found in self.blocked.items() if name != reason], axis=0)

    @property
    def throughput(self) -> np.ndarray:
        """float [space.shape], tokens a second and chip; 0 where blocked."""
        r = self.request
        tokens = r.batch * r.sequence / r.chips
        return np.where(self.legal, tokens / self.seconds, 0.0)

    @property
    def unbounded_speed(self) -> float:
        """Tokens a second and chip of the fastest layout if memory had no limit; 0 for none."""
        others = self.blocked_beside("memory")
        r = self.request
        return float(np.where(others, 0.0, r.batch * r.sequence / r.chips / self.seconds).max())

    def ranked(self, count: int) -> list[tuple[int, dict]]:
        """(flat index, choice) of the fastest legal layouts; of equal ones the first in order."""
        speed = self.throughput.reshape(-1)
        order = np.argsort(-speed, kind="stable")[:count]
        return [(int(index), self.choice(index)) for index in order if speed[index] > 0]

    def choice(self, index: int) -> dict:
        """The choice at a flat index: name -> value."""
        where = np.unravel_index(index, self.space.shape)
        return {n: v[i] for (n, v), i in zip(self.space.levels.items(), where)}


def price(request: Request, choices: Space) -> Priced:
    """Every layout of a space with its seconds, memory, and what blocks it."""
    counts = np.meshgrid(*(choices.levels[name] for name in COUNTS), indexing="ij", sparse=True)
    inner = choices.shape[: len(COUNTS)]
    seconds, sizes = np.empty(choices.shape), np.empty(choices.shape)
    blocked = {reason: np.zeros(choices.shape, bool) for reason in BLOCKS}
    indices = [range(len(choices.levels[name])) for name in NAMES]
    for at in itertools.product(*indices):
        names = {name: choices.levels[name][i] for name, i in zip(NAMES, at)}
        choice = {**dict(zip(COUNTS, counts)), **names}
        layout = request.layout(choice)
        where = (slice(None),) * len(inner) + at
        total, held, reasons = _priced(request, layout)
        seconds[where] = np.broadcast_to(total, inner)
        sizes[where] = np.broadcast_to(held, inner)
        for reason, found in reasons.items():
            blocked[reason][where] = np.broadcast_to(found, inner)
    return Priced(request, choices, seconds, sizes, blocked)


def explain(request: Request, choice: Mapping) -> StepTime:
    """The terms of one choice."""
    return step_time(
        request.config,
        request.sequence,
        single(request.layout(choice)),
        request.chip,
        request.efficiency,
    )


def held_bytes(request: Request, layout: RunLayout) -> np.ndarray:
    """Bytes on the fullest chip."""
    return np.asarray(layout_bytes(request.config, request.sequence, layout).total)


def single(layout: RunLayout) -> RunLayout:
    """A layout whose counts are plain integers."""
    names = (*COUNTS, "fsdp", "accumulation")
    counts: dict[str, Any] = {name: int(getattr(layout, name)) for name in names}
    return dataclasses.replace(layout, **counts)


def blocks(request: Request, layout: RunLayout, memory) -> dict[str, np.ndarray]:
    """Reason in BLOCKS -> whether it blocks the layout."""
    config = request.config
    stage, tensor, chunks = (np.asarray(n) for n in (layout.stage, layout.tensor, layout.chunks))
    interleaved = layout.schedule == "interleaved"
    # One stage has no schedule: only the first name stands for it, so that no layout counts twice.
    alone = layout.schedule != next(iter(BUBBLES))
    schedule = np.where(stage == 1, alone | (chunks > 1), (chunks > 1) != interleaved)
    if interleaved:
        schedule = schedule | (layout.accumulation % stage != 0)
    return {
        "heads": (config.num_heads % tensor != 0)
        | (request.sequence % tensor != 0)
        | _uneven_blocks(config, tensor),
        "chips": np.asarray(layout.chips) != request.chips,
        "layers": config.num_layers % (stage * chunks) != 0,
        "batch": np.asarray(layout.batch) != request.batch,
        "schedule": schedule,
        "memory": np.asarray(memory) > USABLE * request.chip.capacity,
    }


def refuse(priced: Priced) -> None:
    """Refuses a request that no layout fits, with the closest that one does.

    Raises:
      UserError: what blocks the request, and what would run.
    """
    if priced.legal.any():
        return
    r = priced.request
    others = priced.blocked_beside("batch")
    if not others.all():
        near = _nearest_batch(priced, ~others)
        raise UserError(
            f"No layout on {r.chips} {r.chip.name} divides a batch of {r.batch} sequences; "
            f"the closest that one does is --batch={near}."
        )
    others = priced.blocked_beside("memory")
    if not others.all():
        need = np.where(others, np.inf, priced.memory).min()
        raise UserError(
            f"No layout fits: the smallest needs {math.ceil(need / GIB)} GiB on each of {r.chips} "
            f"{r.chip.name}, which have {math.floor(USABLE * r.chip.capacity / GIB)} to use; "
            f"{_more_chips(r)}."
        )
    least = min(BLOCKS, key=lambda b: int(priced.blocked[b].sum()))
    most = max(BLOCKS, key=lambda b: int(priced.blocked[b].sum()))
    raise UserError(
        f"No layout of {r.chips} {r.chip.name} is legal: {most} blocks the most, {least} the "
        f"fewest; {_more_chips(r)}."
    )


def relay(request: Request) -> tuple[RunLayout, float] | None:
    """The fastest relay on one chip, which holds one block at a time, with its seconds; or None.

    The weights, gradients and moments live in host memory, which is not looked at here.
    """
    if request.chips != 1 or request.chip.host_bandwidth is None:
        return None
    found = []
    for micro_batch in _divisors(request.batch):
        layout = RunLayout(
            micro_batch=micro_batch,
            accumulation=request.batch // micro_batch,
            remat="full",
            executor="relay",
        )
        if float(held_bytes(request, layout)) <= USABLE * request.chip.capacity:
            time = step_time(
                request.config, request.sequence, layout, request.chip, request.efficiency
            )
            found.append((layout, float(time.total)))
    return min(found, key=lambda pair: pair[1], default=None)


def _more_chips(request: Request) -> str:
    relayed = relay(request)
    if relayed:
        return f"the relay does: --executor=relay --accumulation={relayed[0].accumulation}"
    for factor in (2, 4, 8, 16, 32, 64):
        more = dataclasses.replace(request, chips=factor * request.chips)
        for batch in dict.fromkeys((request.batch, max(request.batch, more.chips))):
            asked = dataclasses.replace(more, batch=batch)
            if price(asked, space(asked)).legal.any():
                return f"the closest that does is --chips={more.chips} --batch={batch}"
    return "up to 64 times as many chips do not either"


def _nearest_batch(priced: Priced, possible: np.ndarray) -> int:
    r = priced.request
    grid = np.meshgrid(*(priced.space.levels[name] for name in COUNTS), indexing="ij", sparse=True)
    names = {name: priced.space.levels[name][0] for name in NAMES}
    layout = r.layout({**dict(zip(COUNTS, grid)), **names})
    rows = np.broadcast_to(layout.replicas * layout.micro_batch, possible.shape[: len(COUNTS)])
    rows = rows[possible.any(axis=tuple(range(len(COUNTS), possible.ndim)))]
    near = np.maximum(np.round(r.batch / rows), 1) * rows
    return int(near[np.argmin(np.abs(near - r.batch))])


def _priced(request, layout):
    time = step_time(
        request.config, request.sequence, layout, request.chip, request.efficiency
    ).total
    held = held_bytes(request, layout)
    return time, held, blocks(request, layout, held)


def _uneven_blocks(config, tensor):
    """Where a shard of a block-sparse weight would cut a block of the side that is cut."""
    uneven = np.zeros(np.shape(tensor), bool)
    for name in config.sparse_projections:
        fan_in, fan_out = config.projection_shape(name)
        cut = fan_out if name in ("qkv", "mlp_in") else fan_in
        uneven |= cut % (config.linear(name).block * tensor) != 0
    return uneven


def _divisors(number: int) -> Sequence[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _copies(chips: int) -> list[int]:
    """Powers of two, and these times the odd part of the chips, which no layer's width divides."""
    odd = chips // (chips & -chips)
    counts = {n * factor for n in _powers(_LARGEST["data"]) for factor in (1, odd)}
    return sorted(n for n in counts if n <= _LARGEST["data"])


def _powers(largest: int) -> tuple[int, ...]:
    return tuple(2**n for n in range(largest.bit_length()) if 2**n <= largest)
