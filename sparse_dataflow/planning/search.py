"""Exhaustive search for the fastest parallel plan of a model on given chips.

A `Space` is the product of the levels of every choice.  Every plan of the space is priced.  Plans
that cannot run stay in the tables, with the constraints that they violate, so that an impossible
request is answered with the nearest possible one.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB, Chip
from sparse_dataflow.planning.efficiency import EFFICIENCIES, PRIOR, Efficiency
from sparse_dataflow.planning.memory import USABLE
from sparse_dataflow.planning.parallel_plan import BUBBLES, ParallelPlan
from sparse_dataflow.planning.plan_memory import plan_bytes
from sparse_dataflow.planning.step_time import StepTime, step_time

COUNTS = ("tensor", "stage", "data", "micro_batch", "chunks")
NAMES = ("schedule", "zero", "remat")
CHOICES = COUNTS + NAMES

# Constraints of a legal plan.
CONSTRAINTS = ("heads", "chips", "layers", "batch", "schedule", "memory")
_LARGEST = {"tensor": 16, "stage": 128, "micro_batch": 32, "data": 64}


@dataclasses.dataclass(frozen=True)
class Request:
    """A model, a batch and the chips to train it on.

    Attributes:
      config: the model; its remat is ignored, because remat is a choice of the search.
      sequence: tokens per sequence.
      batch: sequences per optimizer step.
      chip: kind of chip.
      chips: number of chips; a legal plan uses all of them.
      state_dtype: see `parallel_plan.ParallelPlan`, also for `optimizer`.
    """

    config: ModelConfig
    sequence: int
    batch: int
    chip: Chip
    chips: int
    state_dtype: str = "float32"
    optimizer: str = "adamw"

    @property
    def efficiency(self) -> Efficiency:
        """Constants of the chip family, or the prior for an unknown family."""
        return EFFICIENCIES.get(self.chip.family, PRIOR)

    def plan(self, choice: Mapping) -> ParallelPlan:
        """Returns the plan of a choice; fsdp and accumulation follow from chips and batch.

        Counts may be arrays.  Where a count does not divide, fsdp and accumulation are rounded
        down.
        """
        tensor, stage, data, micro_batch, chunks = (np.asarray(choice[name]) for name in COUNTS)
        fsdp = np.maximum(self.chips // (tensor * stage * data), 1)
        rows = data * fsdp * micro_batch
        return ParallelPlan(
            tensor=tensor,
            stage=stage,
            data=data,
            micro_batch=micro_batch,
            chunks=chunks,
            fsdp=fsdp,
            accumulation=np.maximum(self.batch // rows, 1),
            **{name: choice[name] for name in NAMES},
            sequence_parallel=True,  # as in parallel/sharded.py
            executor="pipeline" if np.any(stage > 1) else "whole",
            state_dtype=self.state_dtype,
            optimizer=self.optimizer,
        )


@dataclasses.dataclass(frozen=True)
class Space:
    """Levels of every choice.

    Attributes:
      levels: name in CHOICES -> values, in the order of CHOICES.
    """

    levels: Mapping[str, tuple]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of levels of each choice."""
        return tuple(len(values) for values in self.levels.values())

    @property
    def size(self) -> int:
        """Number of plans."""
        return math.prod(self.shape)


def space(request: Request) -> Space:
    """Returns the useful levels for a request: divisors, and powers of two."""
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
    """Step time, memory and violated constraints of every plan of a space.

    Attributes:
      request: the request.
      space: the space.
      seconds: float [space.shape], seconds of an optimizer step.
      memory: float [space.shape], bytes on the fullest chip.
      violated: name in CONSTRAINTS -> bool [space.shape].
    """

    request: Request
    space: Space
    seconds: np.ndarray
    memory: np.ndarray
    violated: Mapping[str, np.ndarray]

    @property
    def legal(self) -> np.ndarray:
        """bool [space.shape], True where no constraint is violated."""
        return ~self.violated_except("")

    def violated_except(self, constraint: str) -> np.ndarray:
        """Returns bool [space.shape], True where any other constraint is violated."""
        return np.any([v for name, v in self.violated.items() if name != constraint], axis=0)

    @property
    def throughput(self) -> np.ndarray:
        """float [space.shape], tokens per second and chip; 0 for plans that are not legal."""
        r = self.request
        tokens = r.batch * r.sequence / r.chips
        return np.where(self.legal, tokens / self.seconds, 0.0)

    @property
    def unbounded_speed(self) -> float:
        """Tokens per second and chip of the fastest plan without the memory limit; 0 for none."""
        others = self.violated_except("memory")
        r = self.request
        return float(np.where(others, 0.0, r.batch * r.sequence / r.chips / self.seconds).max())

    def ranked(self, count: int) -> list[tuple[int, dict]]:
        """Returns (flat index, choice) of the fastest legal plans, fastest first."""
        speed = self.throughput.reshape(-1)
        order = np.argsort(-speed, kind="stable")[:count]
        return [(int(index), self.choice(index)) for index in order if speed[index] > 0]

    def choice(self, index: int) -> dict:
        """Returns the choice at a flat index, as name -> value."""
        where = np.unravel_index(index, self.space.shape)
        return {n: v[i] for (n, v), i in zip(self.space.levels.items(), where)}


def price(request: Request, choices: Space) -> Priced:
    """Prices every plan of a space."""
    counts = np.meshgrid(*(choices.levels[name] for name in COUNTS), indexing="ij", sparse=True)
    inner = choices.shape[: len(COUNTS)]
    seconds, sizes = np.empty(choices.shape), np.empty(choices.shape)
    violated = {name: np.zeros(choices.shape, bool) for name in CONSTRAINTS}
    indices = [range(len(choices.levels[name])) for name in NAMES]
    for at in itertools.product(*indices):
        names = {name: choices.levels[name][i] for name, i in zip(NAMES, at)}
        choice = {**dict(zip(COUNTS, counts)), **names}
        plan = request.plan(choice)
        where = (slice(None),) * len(inner) + at
        time = step_time(request.config, request.sequence, plan, request.chip, request.efficiency)
        size = chip_bytes(request, plan)
        seconds[where] = np.broadcast_to(time.total, inner)
        sizes[where] = np.broadcast_to(size, inner)
        for name, mask in violations(request, plan, size).items():
            violated[name][where] = np.broadcast_to(mask, inner)
    return Priced(request, choices, seconds, sizes, violated)


def explain(request: Request, choice: Mapping) -> StepTime:
    """Returns the step time of one choice, by term."""
    return step_time(
        request.config,
        request.sequence,
        scalar_plan(request.plan(choice)),
        request.chip,
        request.efficiency,
    )


def chip_bytes(request: Request, plan: ParallelPlan) -> np.ndarray:
    """Returns the bytes on the fullest chip."""
    return np.asarray(plan_bytes(request.config, request.sequence, plan).total)


def scalar_plan(plan: ParallelPlan) -> ParallelPlan:
    """Returns the plan with its counts as Python integers."""
    names = (*COUNTS, "fsdp", "accumulation")
    counts: dict[str, Any] = {name: int(getattr(plan, name)) for name in names}
    return dataclasses.replace(plan, **counts)


def violations(request: Request, plan: ParallelPlan, memory) -> dict[str, np.ndarray]:
    """Returns name in CONSTRAINTS -> bool, whether the plan violates it.

    Args:
      request: the request.
      plan: one plan, or several as arrays.
      memory: bytes on the fullest chip.
    """
    config = request.config
    stage, tensor, chunks = (np.asarray(n) for n in (plan.stage, plan.tensor, plan.chunks))
    interleaved = plan.schedule == "interleaved"
    # One stage has no schedule.  Only the first schedule is legal there, so no plan counts twice.
    duplicate = plan.schedule != next(iter(BUBBLES))
    schedule = np.where(stage == 1, duplicate | (chunks > 1), (chunks > 1) != interleaved)
    if interleaved:
        schedule = schedule | (plan.accumulation % stage != 0)
    return {
        "heads": (config.num_heads % tensor != 0)
        | (request.sequence % tensor != 0)
        | _uneven_blocks(config, tensor),
        "chips": np.asarray(plan.chips) != request.chips,
        "layers": config.num_layers % (stage * chunks) != 0,
        "batch": np.asarray(plan.batch) != request.batch,
        "schedule": schedule,
        "memory": np.asarray(memory) > USABLE * request.chip.capacity,
    }


def check_legal(priced: Priced) -> None:
    """Raises an error if no plan of a request is legal.

    Raises:
      UserError: names the violated constraint and the closest legal request.
    """
    if priced.legal.any():
        return
    r = priced.request
    others = priced.violated_except("batch")
    if not others.all():
        near = _nearest_batch(priced, ~others)
        raise UserError(
            f"No parallel plan on {r.chips} {r.chip.name} divides a batch of {r.batch} sequences; "
            f"the closest legal batch is --batch={near}."
        )
    others = priced.violated_except("memory")
    if not others.all():
        need = np.where(others, np.inf, priced.memory).min()
        raise UserError(
            f"No parallel plan fits: the smallest needs {math.ceil(need / GIB)} GiB on each of "
            f"{r.chips} {r.chip.name}, which have {math.floor(USABLE * r.chip.capacity / GIB)} GiB "
            f"usable; {_more_chips(r)}."
        )
    worst = max(CONSTRAINTS, key=lambda name: int(priced.violated[name].sum()))
    raise UserError(
        f"No parallel plan on {r.chips} {r.chip.name} is legal; the constraint on {worst} is "
        f"violated most often; {_more_chips(r)}."
    )


def relay(request: Request) -> tuple[ParallelPlan, float] | None:
    """Returns (plan, seconds per step) of the fastest relay on one chip, or None.

    The relay keeps weights, gradients and moments in host memory, whose size is not checked here.
    """
    if request.chips != 1 or request.chip.host_bandwidth is None:
        return None
    candidates = []
    for micro_batch in _divisors(request.batch):
        plan = ParallelPlan(
            micro_batch=micro_batch,
            accumulation=request.batch // micro_batch,
            remat="full",
            executor="relay",
        )
        if float(chip_bytes(request, plan)) <= USABLE * request.chip.capacity:
            time = step_time(
                request.config, request.sequence, plan, request.chip, request.efficiency
            )
            candidates.append((plan, float(time.total)))
    return min(candidates, key=lambda pair: pair[1], default=None)


def _more_chips(request: Request) -> str:
    fastest_relay = relay(request)
    if fastest_relay:
        accumulation = fastest_relay[0].accumulation
        return f"the relay fits: --executor=relay --set training.micro_batches={accumulation}"
    for factor in (2, 4, 8, 16, 32, 64):
        more = dataclasses.replace(request, chips=factor * request.chips)
        for batch in dict.fromkeys((request.batch, max(request.batch, more.chips))):
            larger = dataclasses.replace(more, batch=batch)
            if price(larger, space(larger)).legal.any():
                return f"the closest legal request is --chips={more.chips} --batch={batch}"
    return "no plan is legal on up to 64 times as many chips either"


def _nearest_batch(priced: Priced, possible: np.ndarray) -> int:
    r = priced.request
    grid = np.meshgrid(*(priced.space.levels[name] for name in COUNTS), indexing="ij", sparse=True)
    names = {name: priced.space.levels[name][0] for name in NAMES}
    plan = r.plan({**dict(zip(COUNTS, grid)), **names})
    rows = np.broadcast_to(plan.replicas * plan.micro_batch, possible.shape[: len(COUNTS)])
    rows = rows[possible.any(axis=tuple(range(len(COUNTS), possible.ndim)))]
    near = np.maximum(np.round(r.batch / rows), 1) * rows
    return int(near[np.argmin(np.abs(near - r.batch))])


def _uneven_blocks(config, tensor):
    """Returns whether tensor parallelism would split a block of a block-sparse weight."""
    uneven = np.zeros(np.shape(tensor), bool)
    for name in config.sparse_projections:
        fan_in, fan_out = config.projection_shape(name)
        sharded = fan_out if name in ("qkv", "mlp_in") else fan_in
        uneven |= sharded % (config.linear(name).block * tensor) != 0
    return uneven


def _divisors(number: int) -> Sequence[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _copies(chips: int) -> list[int]:
    """Returns powers of two, and their multiples by the odd factor of the number of chips."""
    odd = chips // (chips & -chips)
    counts = {n * factor for n in _powers(_LARGEST["data"]) for factor in (1, odd)}
    return sorted(n for n in counts if n <= _LARGEST["data"])


def _powers(largest: int) -> tuple[int, ...]:
    return tuple(2**n for n in range(largest.bit_length()) if 2**n <= largest)
