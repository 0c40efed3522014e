"""What the real compiler says of the layouts that a search found."""

import dataclasses
import time

from experiments import compile_report
from experiments.compile_report import FITS, Plan
from sparse_dataflow.aot import topologies
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.planning import search
from sparse_dataflow.planning.run_layout import RunLayout


def verified(
    scale: str, request: search.Request, layouts: list[RunLayout], minutes: float
) -> list[str]:
    """A few words for each layout: whether it fits by the compiler, or why none was asked.

    Args:
      scale: the model's name.
      request: what was searched.
      layouts: in the order in which they are compiled.
      minutes: after which no other compilation begins.
    """
    reason, topology = _refusal(request, minutes)
    if reason:
        return [f"not compiled: {reason}"] * len(layouts)
    print(f"compiling the best {len(layouts)} for {topology.name}, up to {minutes:g} minutes")
    found, ends = [], time.monotonic() + 60 * minutes
    for layout in layouts:
        if time.monotonic() > ends:
            found.append(f"not compiled: --verify={minutes:g} minutes are over")
            continue
        config = dataclasses.replace(request.config, remat=layout.remat)
        plan = Plan(scale, config, request.sequence, topology, layout)
        try:
            said = compile_report.verdict(plan)
        except UserError as error:
            found.append(f"refused: {error}")
            continue
        size = said["needed_bytes"]
        room = "" if size is None else f", {size / GIB:.1f} GiB"
        found.append(("fits" if said["verdict"] == FITS else "does not fit") + room)
    return found


def _refusal(request, minutes):
    """(why nothing is compiled, the topology)."""
    if not minutes:
        return "--verify=0 asks for none", None
    topology = topologies.of_chips(request.chip, request.chips)
    if topology is None:
        return f"no compiler here knows {request.chips} {request.chip.name}", None
    return topologies.refusal(topology), topology
