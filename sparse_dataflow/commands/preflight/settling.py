"""Settles the plan of a run for this machine or another, and prints it before the first step."""

import jax

from sparse_dataflow.cluster import processes
from sparse_dataflow.commands import devices
from sparse_dataflow.core.config import remat as kinds_of_remat
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.run import RunConfig
from sparse_dataflow.core.training.monitoring.metrics import say
from sparse_dataflow.core.training.variants import variants
from sparse_dataflow.files import tables
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB, Chip
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.planner import plan_memory, settle_advice
from sparse_dataflow.planner import settle as planning
from sparse_dataflow.planner.settle import Settled


def models_of(config: RunConfig) -> dict[str, tuple[ModelConfig, ...]]:
    """Returns name -> phases of each model that a run trains."""
    return {v.name: tuple(p.model for p in v.phase_specs) for v in variants(config)}


def settle(config: RunConfig, machine: Machine) -> Settled:
    """Returns `planner.settle.settle` of a run, with a plan that its executor accepts.

    Raises:
      UserError: no plan fits the machine.
    """

    def check(settled):
        executor = devices.executor(settled, machine.count)
        devices.check(executor, settled, variants(settled))

    try:
        return planning.settle(config, models_of, machine, check)
    except planning.NothingFits as nothing:
        raise settle_advice.advised(nothing, models_of, machine) from None


def this_machine(chip: Chip) -> Machine:
    """Returns the devices of all processes; `chip` is one of them."""
    host, count = jax.default_backend() == "cpu", jax.device_count()
    machine = Machine(chip, count, host)
    if host and chip.memory_bytes:  # Devices of a process share its host's memory.
        return planning.with_memory(machine, chip.memory_bytes // jax.local_device_count())
    return machine


def settled(config: RunConfig, chip: Chip) -> RunConfig:
    """Returns the config with the plan for the devices of this run, which it prints.

    All processes call it and get the plan of process 0.

    Raises:
      UserError: no plan fits these devices.
    """
    machine = this_machine(chip)
    limit = config.parallel.memory_limit_bytes
    open_remat = config.model.remat == kinds_of_remat.AUTO
    if limit is not None:  # `remat_plan` then chooses the kind of each block, and checks.
        capacity = int(limit / planning.USABLE)
        machine = planning.with_memory(machine, capacity)

    def chosen():
        result = settle(config, machine)
        if result.chosen:
            say(words(result))
        return {path.replace(".", "__", 1): value for path, value in result.chosen.items()}

    try:
        changes = processes.on_first(chosen)
    except UserError:
        if limit is None:
            raise
        changes = {}  # `remat_plan` names the nearest feasible limit.
    if limit is not None and open_remat:
        changes.pop("model__remat", None)
    return config.change(**changes)


def words(result: Settled) -> str:
    """Returns a table with the choices of the planner, and one with the memory that they need."""
    rows = [(path, str(value)) for path, value in result.chosen.items()]
    lines = ["planned:", *(f"  {line}" for line in tables.aligned(rows).splitlines())]
    lines.append(memory_table(result))
    if result.tight:
        lines.append("  which leaves less room than the estimate's error")
    return "\n".join(lines)


def memory_table(settled: Settled) -> str:
    """Returns the memory of the fullest device by kind."""
    if settled.relay:
        return f"  {settled.relay.text()}"
    assert settled.request and settled.plan
    request, usable = settled.request, settled.machine.chip.memory_bytes
    sizes = dict.fromkeys(request.memory(settled.plan).categories, 0.0)
    largest = max(
        (request.memory(settled.plan, model) for phases in request.models for model in phases),
        key=lambda each: float(each.total),
    )
    sizes = {name: float(size) for name, size in largest.categories.items()}
    others = settled.chip_bytes - sum(sizes.values())
    if others > 1:
        sizes["states of other models"] = others
    low, high = plan_memory.ERROR
    rows = [("GiB on the fullest device", "")]
    rows += [(name.replace("_", " "), f"{size / GIB:,.2f}") for name, size in sizes.items()]
    rows.append(("all", f"{settled.chip_bytes / GIB:,.2f}"))
    total = settled.chip_bytes / GIB
    lines = [f"  {line}" for line in tables.aligned(rows).splitlines()]
    room = "" if usable is None else f" of {usable / GIB:,.1f}"
    between = f"{total * (1 + low):,.1f} to {total * (1 + high):,.1f}"
    lines.append(f"  by the compiler {between}{room} GiB")
    return "\n".join(lines)
