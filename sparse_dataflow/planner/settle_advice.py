"""What a run needs to fit where `settle` finds no plan: settings, a machine, a density, a scale."""

import dataclasses
import itertools
import math

import numpy as np

from sparse_dataflow.core.config import remat as kinds_of_remat
from sparse_dataflow.core.executors.mesh_axes import AUTO_MESH as AUTO
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.planner import search, settle
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.scales import in_gib
from sparse_dataflow.planner.search import ROOMY, Request
from sparse_dataflow.planner.settle import ModelsOf
from sparse_dataflow.runs.run_config import SIZES, rescaled

_MORE_CHIPS = 2**12
"""Most chips of a machine that is advised."""


def advised(
    nothing: settle.NothingFits, models_of: ModelsOf, machine: Machine, check: settle.Check
) -> UserError:
    """Returns the error of a machine on which nothing fits, with what would.

    Args:
      check: names what a given mesh does not divide.
    """
    if nothing.priced is None:
        return UserError(f"{nothing}; {_for_relay(nothing.config, models_of, machine)}.")
    return UserError(_refusal(nothing.config, models_of, machine, nothing.priced, check))


def _refusal(config, models_of, machine, priced, check):
    """Returns why no plan of `settle.settle` is legal, and what would be."""
    scale = config.run.scale
    many = f"{machine.count:,} {machine.chip.name}"
    where = f"each of {many}" if machine.count > 1 else f"one {machine.chip.name}"
    where = "this CPU" if machine.host and machine.count == 1 else where
    others = priced.violated_except("memory")
    others = others | ~settle.allowed(config, priced)
    if others.all():
        return _illegal(config, priced, many, check)
    need = float(np.where(others, np.inf, priced.memory).min())
    head = (
        f"Training --scale={scale} needs {in_gib(need, math.ceil)} GiB on {where} with "
        f"these settings, and {in_gib(settle.usable(machine), math.floor)} of its "
        f"{in_gib(machine.chip.capacity, math.floor)} GiB are usable"
    )
    return f"{head}; {_advice(config, models_of, machine)}."


def _illegal(config, priced, where, check):
    batch, count = config.training.batch, config.training.micro_batches
    in_parts = f" in {count} micro-batches" if count else ""
    ignoring = priced.violated_except("batch") & priced.violated_except("memory")
    both = ~np.any(
        [v for name, v in priced.violated.items() if name not in ("batch", "memory")], axis=0
    )
    if both.any() and ignoring.any():
        near = search.nearest_batch(priced, both, count or 1)
        if near != batch:
            head = f"No plan on {where} divides a batch of {batch} sequences{in_parts}"
            return f"{head}; legal: another number of chips, or a new run with --batch={near}."
    if config.parallel.mesh != AUTO:
        try:
            check(config.without_auto())
        except UserError as error:
            return str(error)
    worst = max(search.CONSTRAINTS, key=lambda name: int(priced.violated[name].sum()))
    return (
        f"No plan on {where} is legal with --mesh={config.parallel.mesh}{in_parts}: the constraint "
        f"on {worst} is violated; legal: --mesh=auto and --set training.micro_batches=auto."
    )


def _advice(config, models_of, machine) -> str:
    """Returns the settings, the machine or the density with which a run would fit."""
    open_config = config.change(training__micro_batches=0, model__remat=kinds_of_remat.AUTO)
    # The mesh of a chosen executor belongs to that choice, and stays.
    if config.parallel.executor == "auto":
        open_config = open_config.change(parallel__mesh=AUTO)
    auto = [
        f"--set {path}=auto" if path != "parallel.mesh" else "--mesh=auto"
        for path, before, after in (
            ("training.micro_batches", config.training.micro_batches, 0),
            ("model.remat", config.model.remat, kinds_of_remat.AUTO),
            ("parallel.mesh", config.parallel.mesh, open_config.parallel.mesh),
        )
        if before != after
    ]
    # From what changes least: settings that the planner may choose, then the precision of the
    # state, then the twin.
    for words, other in (
        ([], open_config),
        (["--set training.state_dtype=bfloat16"], _changed(open_config, state_dtype="bfloat16")),
        (["--twin=no"], open_config.change(run__twin="no")),
    ):
        if other is not None and (auto or words) and _fits(other, models_of, machine):
            return f"it fits with {' '.join([*auto, *words])}"
    options = []
    if not machine.host:
        options += [f"on {name}" for name in _larger(open_config, models_of, machine)]
        options += _relay_words(config, models_of, machine)
    elif scale := _smaller(open_config, models_of, machine):
        return f"the largest scale that fits is --scale={scale}"
    options += _sparser(open_config, models_of, machine)
    if options:
        return f"it fits {' or '.join(options)}"
    if scale := _smaller(open_config, models_of, machine):
        return f"the largest scale that fits is --scale={scale}"
    return "no smaller scale fits with these settings"


def _changed(config, **training):
    """Returns the config with other training settings; None where it has them."""
    names = {f"training__{name}": value for name, value in training.items()}
    other = config.change(**names)
    return None if other == config else other


def _fits(config, models_of, machine) -> bool:
    try:
        priced, possible = settle.priced_plans(config, models_of, machine)
    except UserError:
        return False
    # With room, as an estimate may be too low.
    return bool(priced.ranked(1, ROOMY, possible))


def _larger(config, models_of, machine):
    """Returns the name of the smallest machine of the same chips that fits, if one does."""
    count = machine.count
    while (count := 2 * count) <= _MORE_CHIPS:
        other = dataclasses.replace(machine, count=count)
        if _fits(config, models_of, other):
            return [other.name]
    return []


def _relay_words(config, models_of, machine):
    """Returns the flags of the relay, where it fits one chip and its host is not known."""
    if machine.count > 1 or machine.chip.host_bandwidth is None:
        return []
    try:
        relay = config.change(
            parallel__executor="relay",
            parallel__mesh=AUTO,
            training__micro_batches=0,
            model__remat=kinds_of_remat.AUTO,
        )
        result = settle.relayed(relay, models_of, machine)
    except UserError:
        return []
    if result.tight or result.relay is None:
        return []
    host = math.ceil(result.relay.host_total / GIB)
    return [f"with --executor=relay, slowly, in {host:,} GiB of host memory"]


def _sparser(config, models_of, machine):
    """Returns the largest smaller density that fits, if one does."""
    if not config.sparsity.projections:
        return []
    density = config.sparsity.density
    for halvings in itertools.count(1):
        lower = density / 2**halvings
        if lower < 1 / 64:
            return []
        try:
            if _fits(config.change(sparsity__density=lower), models_of, machine):
                return [f"with --density={lower:g}"]
        except UserError:  # The blocks do not divide into such a density.
            continue
    return []


def _smaller(config, models_of, machine):
    names = list(SIZES)
    smaller = names[: names.index(config.run.scale)] if config.run.scale in names else []
    for scale in reversed(smaller):
        try:
            if _fits(rescaled(config, scale), models_of, machine):
                return scale
        except UserError:  # These settings describe no model of that scale.
            continue
    return ""


def _for_relay(config, models_of, machine):
    """Returns the largest smaller batch that fits, with the stash where it must be."""
    batch = config.training.batch
    # Each device needs a sequence.
    while batch >= machine.count:
        for stash in dict.fromkeys((config.parallel.stash, "host")):
            other = config.change(
                training__batch=batch, training__micro_batches=0, parallel__stash=stash
            )
            found = settle.relay_that_fits(other, models_of, machine)
            if found and found[1].device_total <= ROOMY * settle.usable(machine):
                words = {
                    f"--batch={batch}": batch != config.training.batch,
                    "--set parallel.stash=host": stash != config.parallel.stash,
                    "--set training.micro_batches=auto": config.training.micro_batches,
                }
                return f"it fits with {' '.join(word for word, used in words.items() if used)}"
        batch //= 2
    return "no batch fits; legal: a smaller --scale or --density"


CHANGES = (("remat",), ("micro_batch", "accumulation"), ("zero", "experts"), ("schedule", "chunks"))
"""Fields of a plan that count as one change each; the axes of MESH count as one more."""

CANDIDATES = 20_000
"""Number of the fastest plans to consider."""

MESH = ("data", "stage", "fsdp", "context", "feature", "tensor")


def changes(plan: ParallelPlan, other: ParallelPlan) -> int:
    """Counts the differences in mesh, micro-batch, ZeRO stage, schedule and remat."""
    # One stage has no schedule.
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
