"""Asks the chips' own compiler whether the plans of a search fit."""

import dataclasses
import time

from sparse_dataflow.commands.planning import compile_report
from sparse_dataflow.commands.planning.compile_report import FITS, CompilePlan
from sparse_dataflow.compile import topologies
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.planner import search
from sparse_dataflow.planner.parallel_plan import ParallelPlan


def verdicts(
    scale: str, request: search.Request, plans: list[ParallelPlan], minutes: float
) -> list[str]:
    """Returns a few words for each plan: whether it fits, or why it was not compiled.

    Args:
      request: that the plans answer.
      plans: in the order in which they are compiled.
      minutes: time after which no further compilation starts.
    """
    reason, topology = _refusal(request, minutes)
    if reason:
        return [f"not compiled: {reason}"] * len(plans)
    print(f"compiling the best {len(plans)} for {topology.name}, up to {minutes:g} minutes")
    words, end = [], time.monotonic() + 60 * minutes
    for plan in plans:
        if time.monotonic() > end:
            words.append(f"not compiled: --verify={minutes:g} minutes are over")
            continue
        config = dataclasses.replace(request.config, remat=plan.remat)
        try:
            verdict = compile_report.verdict(
                CompilePlan(scale, config, request.sequence, topology, plan)
            )
        except UserError as error:
            words.append(f"refused: {error}")
            continue
        size = verdict["needed_bytes"]
        room = "" if size is None else f", {size / GIB:.1f} GiB"
        words.append(("fits" if verdict["verdict"] == FITS else "does not fit") + room)
    return words


def _refusal(request, minutes):
    """(why nothing is compiled, the topology)."""
    if not minutes:
        return "--verify=0 asks for none", None
    topology = topologies.compact_topology(request.chip, request.chips)
    if topology is None:
        return f"no compiler here knows {request.chips} {request.chip.name}", None
    return topologies.missing_compiler(topology), topology
