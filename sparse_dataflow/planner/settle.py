"""Settles what a run leaves to the planner: micro-batches, remat and mesh, for given chips.

The fastest plan by predicted step time is chosen that leaves room for the error of the memory
estimate; one with stages where it is faster by more than the error of the times.  A value that the
config has is kept.  Chips without known rates, and the host's CPU, get the fewest micro-batches and
the least recomputation that fit.  Pure: the same config and chips give the same plan, and so does
the config that was settled.  Importing this module loads no jax.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sparse_dataflow.core.config import remat as kinds_of_remat
from sparse_dataflow.core.config.depth import DepthSchedule
from sparse_dataflow.core.config.model import REMATS, ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh_axes
from sparse_dataflow.core.executors.mesh_axes import AUTO_MESH as AUTO
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.planner import bands, relay_step, search
from sparse_dataflow.planner.memory import USABLE, runs_fused
from sparse_dataflow.planner.parallel_plan import BUBBLES, ParallelPlan
from sparse_dataflow.planner.search import ROOMY, PhaseShare, Request
from sparse_dataflow.runs.run_config import RunConfig

ModelsOf = Callable[[RunConfig], Mapping[str, Sequence[PhaseShare]]]
"""Returns name -> phases of each model that a run trains."""
Check = Callable[[RunConfig], None]
"""Raises a UserError where no executor trains a settled config."""


class NothingFits(UserError):
    """No plan fits; `settle_advice.advised` says what would.

    Attributes:
      config: of the plans that were tried.
      priced: the plans; None for the relay.
    """

    def __init__(self, message: str, config: RunConfig, priced: search.Priced | None = None):
        super().__init__(message)
        self.config, self.priced = config, priced


TRIED = 200
"""Most plans that are checked against the executor, fastest first."""
_LARGEST_TENSOR = 16


@dataclasses.dataclass(frozen=True)
class Settled:
    """A config without auto values, and what the planner estimates of it.

    Attributes:
      machine: the chips.
      request: prices the plan; None for the relay.
      plan: the parallel plan; None for the relay.
      relay: the largest estimate of the relay; None for other executors.
      relay_seconds: of a step of the first model by the relay, the mean over its steps; None for
        other executors, and where no rates are known.
      chosen: path -> value of each setting that the planner chose.
    """

    config: RunConfig
    machine: Machine
    request: Request | None
    plan: ParallelPlan | None
    relay: relay_step.RelayEstimate | None = None
    relay_seconds: float | None = None
    chosen: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def chip_bytes(self) -> float:
        """Bytes on the fullest chip."""
        if self.relay:
            return float(self.relay.device_total)
        assert self.request and self.plan
        return float(self.request.chip_bytes(self.plan))

    @property
    def seconds(self) -> float | None:
        """Seconds of a step of the first model, the mean over its steps; None without rates."""
        if self.relay:
            return self.relay_seconds
        assert self.request and self.plan
        try:
            return float(self.request.model_seconds(self.plan, self.request.models[0]))
        except UserError:
            return None

    @property
    def first(self) -> tuple[ModelConfig, ...]:
        """The first model in each of its phases; none for the relay."""
        return self.request.first if self.request else ()

    @property
    def share(self) -> float:
        """Share of the chip's usable memory that the plan takes."""
        return self.chip_bytes / usable(self.machine)

    @property
    def tight(self) -> bool:
        """Whether the estimate's error may exceed the room that the plan leaves."""
        return self.share > ROOMY


def usable(machine: Machine) -> float:
    """Returns the bytes of a chip that a plan may take; infinite where its memory is not known."""
    return USABLE * machine.chip.capacity


def with_memory(machine: Machine, memory_bytes: int) -> Machine:
    """Returns the machine with another memory of each chip."""
    return dataclasses.replace(
        machine, chip=dataclasses.replace(machine.chip, memory_bytes=memory_bytes)
    )


def settle(
    config: RunConfig, models_of: ModelsOf, machine: Machine, check: Check | None = None
) -> Settled:
    """Returns the config with a plan for the machine, and its estimates.

    Args:
      config: `training.micro_batches`, `model.remat` and `parallel.mesh` may be auto.
      models_of: see `ModelsOf`.
      machine: chips that train it.
      check: see `Check`; plans that it refuses are passed over.

    Raises:
      UserError: no plan fits, with the smallest machine, the density or the settings that would; or
        the settings contradict each other.
    """
    if config.parallel.executor == "relay":
        return relayed(config, models_of, machine)
    best, refusal = None, None
    try:
        best = _fastest(config, models_of, machine, check)
    except UserError as error:
        refusal = error
    if _may_pipeline(config, machine):
        with contextlib.suppress(UserError):
            pipeline = _fastest(config, models_of, machine, check, staged=True)
            # By more than the error between both kinds of plans: a tie goes to the simpler one.
            if best is None or _clearly_faster(pipeline, best):
                return pipeline
    if best is None:
        assert refusal
        raise refusal
    return best


def _may_pipeline(config, machine):
    """Returns whether the planner may cut the model by layers."""
    open_mesh = config.parallel.mesh == AUTO and config.parallel.executor == "auto"
    if not open_mesh or machine.count == 1 or machine.host or not machine.chip.network:
        return False
    if config.model.mask_documents:
        return False
    try:
        config.change(parallel__executor="pipeline")
    except UserError:  # A setting that pipelines do not have.
        return False
    return True


def _clearly_faster(plan, other):
    """Returns whether a plan is faster than another by more than the error of its kind."""
    seconds = [float(each.request.seconds(each.plan)) for each in (plan, other)]
    request = plan.request
    width = bands.tie_width(request.first, request.sequence, request.chip)
    return math.log(seconds[1] / seconds[0]) > width


def _fastest(config, models_of, machine, check, staged=False) -> Settled:
    """Returns the fastest plan with room; with stages or without."""
    priced, possible = priced_plans(config, models_of, machine, staged)
    refused: UserError | None = None
    # A second time without room: a plan that just fits is better than none.
    for share in (ROOMY, 1.0) if _is_open(config, machine) else (1.0,):
        for plan, _ in priced.ranked(TRIED, share, possible):
            result = _with_plan(config, machine, priced.request, plan)
            try:
                if check:
                    check(result.config)
            except UserError as error:
                refused = refused or error
                continue
            return result
    # The executor's own words name the setting; "no plan fits" would hide it.
    if refused:
        raise refused
    raise NothingFits("No plan of these settings fits the machine.", config, priced)


def _is_open(config, machine):
    """Returns whether anything is left to the planner."""
    free = machine.count > 1 and config.parallel.mesh == AUTO
    return free or not config.training.micro_batches or config.model.remat == kinds_of_remat.AUTO


def request_of(config: RunConfig, models_of: ModelsOf, machine: Machine) -> Request:
    """Returns the search that prices plans of a config on a machine."""
    trained = tuple(tuple(phases) for phases in models_of(config).values())
    first = max((phase.model for phase in trained[0]), key=cost.parameter_count)
    text = config.model.remat
    mixed = text not in (*REMATS, kinds_of_remat.AUTO)
    return Request(
        first,
        config.training.sequence,
        config.training.batch,
        machine.chip,
        machine.count,
        config.training.state_dtype,
        config.training.optimizer,
        fused_attention=runs_fused(first, machine.chip, machine.host),
        trained=trained,
        adapters=config.training.freezes,
        blocks=kinds_of_remat.loops(text, first.num_layers) if mixed else (),
    )


def levels(config: RunConfig, request: Request, staged: bool = False) -> search.Levels:
    """Returns the values of each choice of a plan: those that the config has, or all useful ones.

    Args:
      config: a mesh that is auto has stages where its executor is the pipeline, or with `staged`.
      request: the search.
      staged: whether a mesh that is auto has stages.

    Raises:
      UserError: the mesh is not one of the machine's chips.
    """
    parallel, chips = config.parallel, request.chips
    schedule, _, chunks = parallel.schedule.partition(":")
    schedules: tuple[str, ...] = tuple(dict.fromkeys((next(iter(BUBBLES)), schedule)))
    result = dict(search.space(request))
    if parallel.mesh != AUTO:
        sizes = mesh_axes.parse_mesh(parallel.mesh, chips)
        result |= {
            axis: (sizes[axis],) for axis in ("tensor", "feature", "context", "stage", "data")
        }
    else:
        stages = [n for n in result["stage"] if n > 1]
        several = staged or parallel.executor == "pipeline"
        result["stage"] = tuple(stages) if several and stages else (1,)
        result["feature"] = (1,)
        result["tensor"] = tuple(n for n in result["tensor"] if n <= _LARGEST_TENSOR)
    # One stage is legal without chunks alone, so 1 is always among them.
    result["chunks"] = tuple(sorted({1, int(chunks or 1)}))
    result["schedule"] = schedules
    parts = parallel.sub_batches
    # Sub-batches are equal parts of a micro-batch.
    rows = tuple(n for n in _divisors(request.batch) if n % parts == 0)
    result["micro_batch"] = rows or _divisors(request.batch)
    result["zero"] = (parallel.zero,)
    result["experts"] = (parallel.experts,) if request.config.experts else ("gather",)
    if request.kinds:
        result["remat"] = ("full" if "full" in request.kinds else "keep",)
    elif config.model.remat != kinds_of_remat.AUTO:
        result["remat"] = (config.model.remat,)
    return result


def _seconds_of(request, machine):
    """Returns the function by which plans are ordered; None for their predicted seconds."""
    chip = machine.chip
    dtype = request.config.compute_dtype
    rated = chip.peak(dtype) and chip.bandwidth and (machine.count == 1 or chip.network)
    if rated and request.optimizer == "muon":
        # Muon multiplies matrices in float32.
        rated = chip.peak("float32")
    if rated and not machine.host:
        return None

    def order(plan):
        # Fewest micro-batches, then least recomputation; on many devices "fsdp" over all.
        # A device outside of "fsdp" holds a copy, so plans that shard over all devices come first:
        # 1e9 outweighs any number of micro-batches.
        others = plan.chips / (np.asarray(plan.fsdp) * plan.stage)
        remat = REMATS.index(plan.remat) / len(REMATS)
        return others * 1e9 + np.asarray(plan.accumulation) + remat

    return order


def priced_plans(
    config: RunConfig, models_of: ModelsOf, machine: Machine, staged: bool = False
) -> tuple[search.Priced, np.ndarray]:
    """Returns the prices of all plans, and which of them the config allows.

    Raises:
      UserError: the settings contradict each other or the machine.
    """
    request = request_of(config, models_of, machine)
    space = levels(config, request, staged)
    priced = search.price(request, space, _seconds_of(request, machine))
    return priced, allowed(config, priced)


def allowed(config: RunConfig, priced: search.Priced) -> np.ndarray:
    """Returns bool [levels, ...], the plans with the micro-batches and the schedule of a config."""
    wanted, shape = config.training.micro_batches, priced.seconds.shape
    axes = [*priced.levels]
    schedule, stage = (
        np.expand_dims(values, tuple(n for n in range(len(axes)) if n != axes.index(name)))
        for name, values in (
            ("schedule", np.array(priced.levels["schedule"])),
            ("stage", np.array(priced.levels["stage"])),
        )
    )
    # One stage has no schedule.
    result = (stage == 1) | (schedule == config.parallel.schedule.partition(":")[0])
    if wanted:
        inner = shape[: len(search.COUNTS)]
        names = {name: priced.levels[name][0] for name in search.NAMES}
        plan = priced.request.plan(search.grid(priced.levels) | names)
        counts = np.broadcast_to(np.asarray(plan.accumulation) == wanted, inner)
        result = result & counts.reshape(*inner, *[1] * len(search.NAMES))
    return np.broadcast_to(result, shape)


def _with_plan(config, machine, request, plan) -> Settled:
    chosen: dict[str, object] = {}
    if not config.training.micro_batches:
        chosen["training.micro_batches"] = plan.accumulation
    if config.model.remat == kinds_of_remat.AUTO:
        chosen["model.remat"] = plan.remat
    if config.parallel.mesh == AUTO and machine.count > 1:
        chosen["parallel.mesh"] = mesh_axes.mesh_text(
            {axis: getattr(plan, axis) for axis in mesh_axes.AXES}
        )
    changes = {path.replace(".", "__", 1): value for path, value in chosen.items()}
    return Settled(config.change(**changes), machine, request, plan, chosen=chosen)


def relayed(config: RunConfig, models_of: ModelsOf, machine: Machine) -> Settled:
    """Settles the relay: the fewest micro-batches whose blocks fit the device.

    Raises:
      UserError: the batch does not divide over the devices, or no number of micro-batches fits.
    """
    training = config.training
    largest = relay_that_fits(config, models_of, machine)
    if largest is None:
        near = max(1, round(training.batch / machine.count)) * machine.count
        raise UserError(
            f"A batch of {training.batch} sequences does not divide over {machine.count} devices "
            f"of the relay; legal: --batch={near}."
        )
    count, estimate, seconds = largest
    # On a CPU the device's memory is the host's, which `relay_plan` checks as a whole.
    if not machine.host and estimate.device_total > usable(machine):
        raise NothingFits(
            f"The relay needs {estimate.device_total / GIB:,.1f} GiB on the device with these "
            f"settings, and it has {machine.chip.capacity / GIB:,.1f}",
            config,
        )
    chosen: dict[str, object] = {}
    if not training.micro_batches:
        chosen["training.micro_batches"] = count
    if config.model.remat == kinds_of_remat.AUTO:
        chosen["model.remat"] = "none"  # The relay recomputes every block.
    if config.parallel.mesh == AUTO and machine.count > 1:
        chosen["parallel.mesh"] = f"data:{machine.count}"
    changes = {path.replace(".", "__", 1): value for path, value in chosen.items()}
    return Settled(config.change(**changes), machine, None, None, estimate, seconds, chosen)


def relay_that_fits(
    config: RunConfig, models_of: ModelsOf, machine: Machine
) -> tuple[int, relay_step.RelayEstimate, float | None] | None:
    """Returns the fewest micro-batches that fit, else the most; None for none.

    Returns:
      (micro-batches, the largest estimate, seconds of a step of the first model).
    """
    training, parallel = config.training, config.parallel
    how: dict[str, Any] = {
        "depth": DepthSchedule.parse(parallel.depth_schedule),
        "stash": parallel.stash,
        "clipping": parallel.clipping,
        "files": bool(parallel.server_dir),
    }
    models = list(models_of(config).values())
    counts = [training.micro_batches] if training.micro_batches else _divisors(training.batch)
    result = None
    # From few to many, as few have larger products; the first that fits is taken.
    for count in (n for n in counts if training.batch % (n * machine.count) == 0):
        divided = dataclasses.replace(training, micro_batches=count)
        estimates = [
            [relay_estimate(phase.model, divided, machine, **how) for phase in phases]
            for phases in models
        ]
        times = [each.step_seconds for each in estimates[0]]
        seconds = None
        if all(times):
            seconds = sum(p.share * (t or 0) for p, t in zip(models[0], times, strict=True))
        largest = max((e for each in estimates for e in each), key=lambda each: each.device_total)
        result = count, largest, seconds
        if largest.device_total <= ROOMY * usable(machine):
            break
    return result


def relay_estimate(
    model: ModelConfig,
    training: TrainingConfig,
    machine: Machine,
    *,
    depth: DepthSchedule,
    **how,
) -> relay_step.RelayEstimate:
    """Returns the estimate of a model's steps by the relay on a machine.

    Args:
      depth: blocks that take part in each step.
      how: other arguments of `relay_step.estimate`.
    """
    # The steps of `run.minutes` are not known yet; 1000 show the shape of a schedule.
    steps = training.steps or 1000
    return relay_step.estimate(
        model,
        training,
        pinned=not machine.host,
        chip=machine.chip,
        fused_attention=runs_fused(model, machine.chip, machine.host),
        devices=machine.count,
        depth=depth.mean_share(model.num_layers, 0, steps, steps),
        **{"cores": machine.cores, **how},
    )


def _divisors(number):
    return tuple(n for n in range(1, number + 1) if number % n == 0)
