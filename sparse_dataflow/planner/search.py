"""Exhaustive search for the fastest parallel plan of a model on given chips.

The space is the product of the levels of every choice.  Every plan of the space is priced.  Plans
that cannot run stay in the tables, with the constraints that they violate, so that an impossible
request is answered with the nearest possible one.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparse_dataflow.core.config.model import REMATS, ModelConfig
from sparse_dataflow.core.config.projections import KEY_VALUE, MLP, ROW_PARALLEL
from sparse_dataflow.core.config.remat import Terms
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh_axes
from sparse_dataflow.core.executors.mesh_axes import key_value_copies
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB, Chip
from sparse_dataflow.planner import relay_step, remat
from sparse_dataflow.planner.efficiency import Efficiency, for_family, own_key
from sparse_dataflow.planner.memory import USABLE, MemoryEstimate
from sparse_dataflow.planner.parallel_plan import BUBBLES, ParallelPlan
from sparse_dataflow.planner.plan_memory import alternating_bytes, run_bytes
from sparse_dataflow.planner.step_time import StepTime, step_time
from sparse_dataflow.runs.parallel import EXPERTS

COUNTS = ("tensor", "feature", "context", "stage", "data", "micro_batch", "chunks")
NAMES = ("schedule", "zero", "remat", "experts")

# Constraints of a legal plan.
CONSTRAINTS = (
    "heads",
    "feature",
    "context",
    "experts",
    "chips",
    "layers",
    "batch",
    "schedule",
    "memory",
)
ROOMY = 0.95
"""Share of the usable memory above which a plan is marked: the estimate may be 5% too low."""
CONTEXT_TOKENS = 8192
"""Fewest tokens of a sequence on a chip for which the search shards sequences."""

_LARGEST = {"tensor": 16, "stage": 128, "micro_batch": 32, "data": 64}


class PhaseShare(NamedTuple):
    """A model that a run trains in a share of its steps.

    Attributes:
      share: of the steps, in (0, 1].
    """

    model: ModelConfig
    share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Request:
    """A model, a batch and the chips to train it on.

    Attributes:
      config: the model; its remat is ignored, because remat is a choice of the search.
      sequence: tokens per sequence.
      batch: sequences per optimizer step.
      chips: number of chips; a legal plan uses all of them.
      state_dtype: see `parallel_plan.ParallelPlan`, also for `optimizer`.
      largest_feature: largest size of the axis "feature" in the space.
      fused_attention: see `parallel_plan.ParallelPlan`.
      trained: phases of each model of a run whose steps alternate; none for `config` alone.
      adapters: whether everything but low-rank terms is frozen.
      blocks: patterns of the blocks' kinds of remat; none for the kind of a plan.
    """

    config: ModelConfig
    sequence: int
    batch: int
    chip: Chip
    chips: int
    state_dtype: str = "float32"
    optimizer: str = "adamw"
    largest_feature: int = 1
    fused_attention: bool = True
    trained: tuple[tuple[PhaseShare, ...], ...] = ()
    adapters: bool = False
    blocks: Terms = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of remat of each block; none for that of a plan."""
        return tuple(kind for pattern, repeats in self.blocks for kind in pattern * repeats)

    @property
    def models(self) -> tuple[tuple[PhaseShare, ...], ...]:
        """Phases of each model that is trained."""
        return self.trained or ((PhaseShare(self.config),),)

    @property
    def first(self) -> tuple[ModelConfig, ...]:
        """The first model in each of its phases."""
        return tuple(phase.model for phase in self.models[0])

    @property
    def efficiency(self) -> Efficiency:
        """Constants of XLA on the chip family, or the prior for an unknown family."""
        return for_family(self.chip.family)

    @property
    def constants(self) -> str:
        """Key of `efficiency`, or a family without constants."""
        return own_key(self.chip.family)

    def plan(self, choice: Mapping) -> ParallelPlan:
        """Returns the plan of a choice; fsdp and accumulation follow from chips and batch.

        Counts may be arrays.  Where a count does not divide, fsdp and accumulation are rounded
        down.
        """
        counts = (np.asarray(choice[name]) for name in COUNTS)
        tensor, feature, context, stage, data, micro_batch, chunks = counts
        fsdp = np.maximum(self.chips // (tensor * feature * context * stage * data), 1)
        rows = data * fsdp * micro_batch
        return ParallelPlan(
            tensor=tensor,
            feature=feature,
            context=context,
            stage=stage,
            data=data,
            micro_batch=micro_batch,
            chunks=chunks,
            fsdp=fsdp,
            accumulation=np.maximum(self.batch // rows, 1),
            **{name: choice[name] for name in NAMES},
            sequence_parallel=True,  # as in core/executors/sharded.py
            fused_attention=self.fused_attention,
            tpu=self.chip.is_tpu,
            state_dtype=self.state_dtype,
            optimizer=self.optimizer,
        )

    def time(self, plan: ParallelPlan) -> StepTime:
        """Returns the step time of a plan, by term; that of `config` alone."""
        return step_time(self.config, self.sequence, plan, self.chip, self.efficiency)

    def seconds(self, plan: ParallelPlan) -> np.ndarray:
        """Returns the seconds of a step of every model, each the mean of its phases."""
        return np.asarray(sum(self.model_seconds(plan, phases) for phases in self.models))

    def model_seconds(self, plan: ParallelPlan, phases: Sequence[PhaseShare]) -> np.ndarray:
        """Returns the seconds of a step of one model, the mean over its steps."""
        return np.asarray(sum(share * self._phase_seconds(plan, model) for model, share in phases))

    def _phase_seconds(self, plan, model):
        """Returns the seconds of a step of a model; its copies to host memory are among them."""
        added = 0.0
        if self.blocks:
            plan = dataclasses.replace(plan, remat="none")
            costs = remat.block_costs(model, self.sequence, plan, self.chip, self.adapters)
            added = remat.added_seconds(costs, self.blocks)
        return added + step_time(model, self.sequence, plan, self.chip, self.efficiency).total

    def chip_bytes(self, plan: ParallelPlan) -> np.ndarray:
        """Returns the bytes of a plan on the fullest chip, of all models."""
        return alternating_bytes(
            [[self.memory(plan, model) for model, _ in phases] for phases in self.models]
        )

    def memory(self, plan: ParallelPlan, model: ModelConfig | None = None) -> MemoryEstimate:
        """Returns the bytes of a plan by category, of one model; of `config` where it is None."""
        return run_bytes(model or self.config, self.sequence, plan, self.adapters, self.kinds)


Levels = Mapping[str, tuple]
"""Choice -> its values; first COUNTS, then NAMES."""


def space(request: Request) -> Levels:
    """Returns the useful levels for a request: divisors, and powers of two."""
    layers, chips = request.config.num_layers, request.chips
    # Stages have equally many layers.
    stages = [n for n in _divisors(layers) if chips % n == 0 and n <= _LARGEST["stage"]]
    stages = stages or [1]
    chunks = sorted({c for s in stages if s > 1 for c in _divisors(layers // s)}) or [1]
    return {
        "tensor": _powers(min(chips, _LARGEST["tensor"])),
        "feature": _powers(min(chips, request.largest_feature)),
        "context": _powers(max(1, min(chips, request.sequence // CONTEXT_TOKENS))),
        "stage": tuple(stages),
        "data": tuple(n for n in _copies(chips) if chips % n == 0),
        "micro_batch": _powers(_LARGEST["micro_batch"]),
        "chunks": tuple(chunks),
        "schedule": tuple(BUBBLES),
        "zero": (1, 2, 3),
        "remat": REMATS,
        "experts": EXPERTS if request.config.experts else EXPERTS[:1],
    }


@dataclasses.dataclass(frozen=True)
class Priced:
    """Step time, memory and violated constraints of every plan of a space.

    Attributes:
      levels: the levels of each choice, one axis of the arrays each.
      seconds: float [levels, ...], seconds of an optimizer step.
      memory: float [levels, ...], bytes on the fullest chip.
      violated: name in CONSTRAINTS -> bool [levels, ...].
    """

    request: Request
    levels: Levels
    seconds: np.ndarray
    memory: np.ndarray
    violated: Mapping[str, np.ndarray]

    @property
    def legal(self) -> np.ndarray:
        """bool [levels, ...], True where no constraint is violated."""
        return ~self.violated_except("")

    def violated_except(self, constraint: str) -> np.ndarray:
        """Returns bool [levels, ...], True where any other constraint is violated."""
        return np.any([v for name, v in self.violated.items() if name != constraint], axis=0)

    @property
    def throughput(self) -> np.ndarray:
        """float [levels, ...], tokens per second and chip; 0 for plans that are not legal."""
        return self._speeds(self.legal)

    @property
    def unbounded_speed(self) -> float:
        """Tokens per second and chip of the fastest plan without the memory limit; 0 for none."""
        return float(self._speeds(~self.violated_except("memory")).max())

    def _speeds(self, possible):
        r = self.request
        return np.where(possible, r.batch * r.sequence / r.chips / self.seconds, 0.0)

    def ranked(
        self, count: int, share: float = 1.0, allowed: np.ndarray | bool = True
    ) -> list[tuple[ParallelPlan, float]]:
        """Returns (plan, tokens per second and chip) of the fastest legal plans, fastest first.

        Args:
          count: most plans.
          share: of the usable memory, which the plans need at most.
          allowed: bool [levels, ...], the plans that may be used.
        """
        roomy = self.memory <= share * USABLE * self.request.chip.capacity
        speed = np.where(roomy & allowed, self.throughput, 0.0).reshape(-1)
        # Stable: of equally fast plans the first of the space comes first, which has the smallest
        # axis "tensor".
        order = np.argsort(-speed, kind="stable")[:count]
        return [(self.plan(index), float(speed[index])) for index in order if speed[index] > 0]

    def recommended(self, ranked: Sequence[tuple[ParallelPlan, float]]) -> int:
        """Returns the index in `ranked` of the fastest plan with room, or 0 if none has any.

        A plan has room if it needs at most ROOMY of the usable memory.
        """
        limit = ROOMY * USABLE * self.request.chip.capacity
        for index, (plan, _) in enumerate(ranked):
            if float(self.request.chip_bytes(plan)) <= limit:
                return index
        return 0

    def plan(self, index: int) -> ParallelPlan:
        """Returns the plan at a flat index, with integers as its counts."""
        where = np.unravel_index(index, self.seconds.shape)
        choice = {name: values[i] for (name, values), i in zip(self.levels.items(), where)}
        plan = self.request.plan(choice)
        names = (*COUNTS, "fsdp", "accumulation")
        counts: dict[str, Any] = {name: int(getattr(plan, name)) for name in names}
        return dataclasses.replace(plan, **counts)


def price(
    request: Request,
    levels: Levels | None = None,
    seconds_of: Callable[[ParallelPlan], np.ndarray] | None = None,
) -> Priced:
    """Prices every plan of a space.

    Args:
      levels: the space; `space(request)` where it is None.
      seconds_of: seconds of a plan; `request.seconds` where it is None.
    """
    seconds_of = seconds_of or request.seconds
    levels = levels or space(request)
    shape = tuple(len(values) for values in levels.values())
    inner = shape[: len(COUNTS)]
    seconds, sizes = np.empty(shape), np.empty(shape)
    violated = {name: np.zeros(shape, bool) for name in CONSTRAINTS}
    # Names cannot broadcast, so each combination of them is priced by itself.
    for at in itertools.product(*(range(len(levels[name])) for name in NAMES)):
        names = {name: levels[name][i] for name, i in zip(NAMES, at)}
        plan = request.plan(grid(levels) | names)
        where = (slice(None),) * len(inner) + at
        size = request.chip_bytes(plan)
        seconds[where] = np.broadcast_to(seconds_of(plan), inner)
        sizes[where] = np.broadcast_to(size, inner)
        for name, mask in violations(request, plan, size).items():
            violated[name][where] = np.broadcast_to(mask, inner)
    return Priced(request, levels, seconds, sizes, violated)


def grid(levels: Levels) -> dict[str, np.ndarray]:
    """Returns name in COUNTS -> its levels, as arrays that broadcast."""
    # Sparse: each level keeps an axis of its own, and prices broadcast over all plans at once.
    grid = np.meshgrid(*(levels[name] for name in COUNTS), indexing="ij", sparse=True)
    return dict(zip(COUNTS, grid))


def violations(request: Request, plan: ParallelPlan, memory) -> dict[str, np.ndarray]:
    """Returns name in CONSTRAINTS -> bool, whether the plan violates it.

    Args:
      plan: one plan, or several as arrays.
      memory: bytes on the fullest chip.
    """
    config = request.config
    row = config.row(request.sequence)
    stage, tensor, chunks = (np.asarray(n) for n in (plan.stage, plan.tensor, plan.chunks))
    interleaved = plan.schedule == "interleaved"
    # One stage has no schedule.  Only the first schedule is legal there, so no plan counts twice.
    duplicate = plan.schedule != next(iter(BUBBLES))
    schedule = np.where(stage == 1, duplicate | (chunks > 1), (chunks > 1) != interleaved)
    if interleaved:
        # Interleaved stages take micro-batches in groups, one for each stage (arXiv 2104.04473,
        # section 2.2).
        schedule = schedule | (plan.accumulation % stage != 0)
    return {
        # Of all models in all phases, because one mesh trains them.
        "heads": functools.reduce(
            np.logical_or,
            (_uneven(m, request.sequence, tensor) for phases in request.models for m, _ in phases),
        ),
        "feature": (np.asarray(plan.feature) > 1) & _uncut(config, tensor, plan.feature),
        "context": (np.asarray(plan.context) > 1)
        # Twice, because a device has a chunk from either end (`executors.context`).
        & (row % (2 * np.asarray(plan.context) * tensor) != 0),
        "experts": plan.exchanges
        & (
            (plan.zero < 3)
            | (config.experts % np.asarray(plan.fsdp) != 0)
            | (np.asarray(plan.context) > 1)
        ),
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
    # The batch before the memory: another batch costs nothing, more chips do.
    others = priced.violated_except("batch")
    if not others.all():
        near = nearest_batch(priced, ~others)
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


def _more_chips(request: Request) -> str:
    if micro_batches := _relay_micro_batches(request):
        return f"the relay fits: --executor=relay --set training.micro_batches={micro_batches}"
    for factor in (2, 4, 8, 16, 32, 64):
        more = dataclasses.replace(request, chips=factor * request.chips)
        # The second has a sequence for each chip.
        for batch in dict.fromkeys((request.batch, max(request.batch, more.chips))):
            if price(dataclasses.replace(more, batch=batch)).legal.any():
                chips = f"{more.chip.name}:{more.chips}"
                return f"the closest legal request is --chips={chips} --batch={batch}"
    return "no plan is legal on up to 64 times as many chips either"


def _relay_micro_batches(request: Request) -> int | None:
    """Returns the fewest micro-batches at which the relay fits one chip, or None.

    The relay keeps weights, gradients and moments in host memory, whose size is not checked here.
    """
    if request.chips != 1 or request.chip.host_bandwidth is None:
        return None
    for count in _divisors(request.batch):
        training = TrainingConfig(
            batch=request.batch,
            sequence=request.sequence,
            micro_batches=count,
            optimizer=request.optimizer,
            state_dtype=request.state_dtype,
        )
        size = relay_step.estimate(
            request.config, training, fused_attention=request.fused_attention
        )
        if size.device_total <= USABLE * request.chip.capacity:
            return count
    return None


def nearest_batch(priced: Priced, possible: np.ndarray, micro_batches: int = 1) -> int:
    """Returns the batch nearest to the request's that some plan divides.

    Args:
      priced: plans, none of which divides the batch.
      possible: bool [levels, ...], the plans that may be used.
      micro_batches: the batch must have this many in each replica.
    """
    r = priced.request
    names = {name: priced.levels[name][0] for name in NAMES}
    plan = r.plan(grid(priced.levels) | names)
    # Names have no influence on rows, so a plan is possible if any combination of names is.
    rows = np.broadcast_to(plan.replicas * plan.micro_batch, possible.shape[: len(COUNTS)])
    rows = rows[possible.any(axis=tuple(range(len(COUNTS), possible.ndim)))] * micro_batches
    near = np.maximum(np.round(r.batch / rows), 1) * rows
    return int(near[np.argmin(np.abs(near - r.batch))])


def _uneven(config, sequence, tensor):
    """Returns whether tensor parallelism does not divide the heads, the tokens or the blocks, or
    a kind of weight does not offer it."""
    copies = key_value_copies(config, tensor)
    heads = (config.num_heads % tensor != 0) | (config.kv_heads * copies % tensor != 0)
    whole = (tensor > 1) & config.lacks("tensor_axis")
    return heads | whole | (config.row(sequence) % tensor != 0) | _uneven_blocks(config, tensor)


def _uneven_blocks(config, tensor):
    """Returns whether tensor parallelism would split a block of a block-sparse weight."""
    uneven = np.zeros(np.shape(tensor), bool)
    for name in config.sparse_projections:
        fan_in, fan_out = config.projection_shape(name)
        sharded = fan_in if name in ROW_PARALLEL else fan_out
        if name in KEY_VALUE:
            sharded = sharded * key_value_copies(config, tensor)
        if config.experts and name in MLP:  # Their groups; see `Sharded.check`.
            groups = max(1, round(1 / config.linear(name).density))
            uneven |= (groups % tensor != 0) & (tensor % groups != 0)
        uneven |= sharded % (config.linear(name).block * tensor) != 0
    return uneven


@functools.partial(np.vectorize, excluded=(0,), otypes=[bool])
def _uncut(config, tensor, feature):
    """Returns whether the axis "feature" cannot cut the residual stream."""
    return bool(mesh_axes.feature_obstacle(config, int(tensor), int(feature)))


def _divisors(number: int) -> Sequence[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _copies(chips: int) -> list[int]:
    """Returns powers of two, and their multiples by the odd factor of the number of chips."""
    # `chips & -chips` is the largest power of two that divides the chips: 48 = 16 x 3.  Three
    # copies leave a power of two to "fsdp".
    odd = chips // (chips & -chips)
    counts = {n * factor for n in _powers(_LARGEST["data"]) for factor in (1, odd)}
    return sorted(n for n in counts if n <= _LARGEST["data"])


def _powers(largest: int) -> tuple[int, ...]:
    return tuple(2**n for n in range(largest.bit_length()))
