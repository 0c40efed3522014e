"""What a run would take on machines that need not be here: time, memory, gain over dense, price."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from sparse_dataflow.commands.planning import plan_rows
from sparse_dataflow.commands.planning.options import TOKENS
from sparse_dataflow.commands.preflight.settling import (
    chooses_each_block,
    memory_table,
    settled_within_limit,
)
from sparse_dataflow.core.config import remat as kinds_of_remat
from sparse_dataflow.core.executors import mesh_axes
from sparse_dataflow.files import output
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.planner import bands
from sparse_dataflow.planner.settle import Settled
from sparse_dataflow.runs.run_config import RunConfig

_DAY, _HOUR = 86400, 3600
_LEAST_DAYS = 2
"""Shorter trainings are given in hours."""


@dataclasses.dataclass(frozen=True)
class MachinePlan:
    """The plan of a run on a machine.

    Attributes:
      settled: the plan and its estimates.
      tokens: training tokens.
      seconds: of a step of the run's first model; None where the chip has no known rates.
      dense: the best plan of the dense twin; None for a dense run, or where none fits.
    """

    settled: Settled
    tokens: float
    seconds: float | None
    dense: Settled | None

    @property
    def speed(self) -> float | None:
        """Tokens per second."""
        training = self.settled.config.training
        return training.batch * training.sequence / self.seconds if self.seconds else None

    @property
    def days(self) -> float | None:
        """Days for all tokens."""
        return self.tokens / self.speed / _DAY if self.speed else None

    @property
    def over_dense(self) -> float | None:
        """Seconds of a step of the dense twin, relative to the model's."""
        dense = self.dense.seconds if self.dense else None
        return dense / self.seconds if dense and self.seconds else None

    @property
    def dollars(self) -> float | None:
        """Dollars for a billion tokens; None where the price of a chip hour is not given."""
        machine = self.settled.machine
        if machine.price is None or not self.speed:
            return None
        return 1e9 / self.speed / _HOUR * machine.count * machine.price

    @property
    def error(self) -> float:
        """Relative error of the seconds, in log."""
        return _error(self.settled)

    @property
    def ratio_error(self) -> float:
        """Relative error of `over_dense`, in log: plans of the same software share its errors."""
        request = self.settled.request
        assert request
        return bands.tie_width(request.first, request.sequence, request.chip)


def plan(config: RunConfig, machine: Machine) -> MachinePlan:
    """Returns the plan of a run on a machine, beside the best plan of its dense twin.

    Raises:
      UserError: no plan fits.
    """
    settled = settled_within_limit(config, machine)
    training = settled.config.training
    tokens = training.steps * training.batch * training.sequence or TOKENS
    twin = _dense(config, machine)
    return MachinePlan(settled, tokens, settled.seconds, twin)


def _dense(config, machine):
    """Returns the best plan of the dense twin, whatever the run's own settings of plans are."""
    if not config.sparsity.projections or config.parallel.executor == "relay":
        return None
    twin = config.dense().change(
        training__micro_batches=0,
        model__remat=kinds_of_remat.AUTO,
        parallel__mesh=mesh_axes.AUTO_MESH,
    )
    try:
        return settled_within_limit(twin, machine)
    except UserError:
        return None


def _error(settled):
    """Returns the relative error of the seconds of a plan, in log."""
    request = settled.request
    if request is None:
        return bands.OTHER_SOFTWARE
    return bands.log_error(request.first, request.sequence, request.chip)


def text(result: MachinePlan) -> str:
    """Returns the plan of one machine as text; every number of it is an estimate."""
    settled, config = result.settled, result.settled.config
    machine, training = settled.machine, config.training
    kind = "sparse" if config.sparsity.projections else "dense"
    lines = [
        f"{config.run.scale} {kind} on {machine.count:,} {machine.chip.name}, "
        f"{training.batch:,} x {training.sequence:,} tokens a step; all figures are estimates",
        _choices(settled),
    ]
    if result.seconds is None:
        lines.append(f"  no time is known: {machine.chip.name} has no known rates or links")
    else:
        lines += _times(result)
    lines += ["", memory_table(settled)]
    if limit := config.parallel.memory_limit:
        each = chooses_each_block(config.parallel, settled.machine.count)
        chosen = "; the run chooses the remat of each layer" if each else ""
        lines.append(f"  within parallel.memory_limit={limit}{chosen}")
    return "\n".join(lines)


def _choices(settled):
    """Returns a line with the settings of the plan; those that the planner chose first."""
    config = settled.config
    values = {
        "parallel.mesh": config.parallel.mesh,
        "training.micro_batches": config.training.micro_batches,
        "model.remat": config.model.remat,
    }
    if settled.machine.count == 1:
        del values["parallel.mesh"]
    kept = {path: value for path, value in values.items() if path not in settled.chosen}
    lines = [("chosen", settled.chosen), ("given", kept)]
    return "\n".join(
        f"  {word}: " + " ".join(f"{path}={value}" for path, value in each.items())
        for word, each in lines
        if each
    )


def _times(result):
    error, settled = result.error, result.settled
    rows = [
        ("", "estimate", "from", "to"),
        ("seconds a step", *_range(result.seconds, error)),
        ("tokens a second", *_range(result.speed, error)),
        _time_for_all(result.tokens, result.days, error),
    ]
    if result.over_dense:
        rows.append(("times the dense twin", *_range(result.over_dense, result.ratio_error)))
    if result.dollars:
        rows.append(("dollars for a billion tokens", *_range(result.dollars, error)))
    lines = [f"  {line}" for line in output.aligned(rows).splitlines()]
    request = settled.request
    if request is not None:
        words = bands.words(request.first, request.sequence, request.chip)
        lines.append(f"  times are {words}")
        if slow := plan_rows.slow_products(request.config, request.chip):
            lines.append(f"  {slow}")
    if result.dense and result.over_dense:
        choices = " ".join(f"{path}={value}" for path, value in result.dense.chosen.items())
        lines.append(f"  the dense twin's best plan: {choices}")
        twin = [_time_for_all(result.tokens, result.days * result.over_dense, _error(result.dense))]
        lines += [f"    {line}" for line in output.aligned(twin).splitlines()]
    elif settled.config.sparsity.projections and not settled.relay:
        limit = settled.config.parallel.memory_limit
        fits = f"within parallel.memory_limit={limit}" if limit else "that fits here"
        lines.append(f"  the dense twin has no plan {fits}")
    return lines


def _time_for_all(tokens, days, error):
    """Returns the row of the time for all tokens, in hours where it is below two days."""
    unit, time = ("hours", 24 * days) if days < _LEAST_DAYS else ("days", days)
    return (f"{unit} for {tokens / 1e9:,.3g} billion tokens", *_range(time, error))


def _range(value, error):
    low, high = value * math.exp(-error), value * math.exp(error)
    return tuple(_figure(number) for number in (value, low, high))


def _figure(value):
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def comparison(config_of: Callable[[Machine], RunConfig], machines: Sequence[Machine]) -> str:
    """Returns a table of one job on several machines, with the fastest and the cheapest.

    Args:
      config_of: machine -> config of the run on it.
    """
    plans: dict[int, MachinePlan] = {}
    refusals: dict[int, str] = {}
    for number, machine in enumerate(machines):
        try:
            plans[number] = plan(config_of(machine), machine)
        except UserError as error:
            refusals[number] = str(error)
    timed = {n: p for n, p in plans.items() if p.speed}
    fastest = max(timed, key=lambda n: timed[n].speed or 0, default=None)
    priced = {n: p for n, p in timed.items() if p.dollars}
    cheapest = min(priced, key=lambda n: priced[n].dollars or 0, default=None)
    head = ("machine", "s a step", "tokens/s", "days", "+-", "x dense", "GiB", "of")
    plan_head = ("", "micro-batches", "remat", "mesh")
    rows = [(*head, *(("$/1e9 tokens",) if priced else ()), *plan_head)]
    for number, machine in enumerate(machines):
        if number not in plans:
            continue
        each = plans[number]
        settled = each.settled
        marks = [
            *(["fastest"] if number == fastest else []),
            *(["cheapest"] if number == cheapest else []),
        ]
        # Two estimates share the error of the software, so only the error of their ratio decides
        # about a tie.
        if number != fastest and fastest is not None and _tied(each, plans[fastest]):
            marks.append("tie")
        figures = (each.seconds, each.speed, each.days)
        capacity = machine.chip.memory_bytes
        rows.append(
            (
                machine.name,
                *(_figure(value) if value else "?" for value in figures),
                f"x{math.exp(each.error):.2f}",
                f"{each.over_dense:.2f}" if each.over_dense else "-",
                f"{settled.chip_bytes / GIB:.1f}",
                f"{capacity / GIB:.0f}" if capacity else "?",
                *((_figure(each.dollars) if each.dollars else "?",) if priced else ()),
                ", ".join(marks),
                str(settled.config.training.micro_batches),
                settled.config.model.remat,
                settled.config.parallel.mesh if machine.count > 1 else "",
            )
        )
    lines = []
    if plans:
        first = next(iter(plans.values()))
        lines = [
            f"{first.settled.config.run.scale}, {first.tokens / 1e9:,.3g} billion tokens; all "
            "figures are estimates, and +- is the factor that nine of ten should stay within",
            output.aligned(rows),
            "tie: no slower than the fastest, within the error of the same software",
        ]
    lines += [f"{machines[number].name}: {words}" for number, words in refusals.items()]
    return "\n".join(lines)


def _tied(one: MachinePlan, other: MachinePlan) -> bool:
    if not one.speed or not other.speed or not one.settled.request or not other.settled.request:
        return False
    return abs(math.log(one.speed / other.speed)) <= max(one.ratio_error, other.ratio_error)
