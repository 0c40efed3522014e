"""The compile plans that are shipped, and the plan that a line of flags describes."""

import json
import shlex

from places import ROOT

from experiments.compile_plan import Options
from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.planning import compile_report

RESULTS = ROOT / "experiments/results/compile_plan"
SHIPPED = sorted(path.stem for path in RESULTS.glob("*.json"))


def result(name: str) -> dict:
    """The result file of a shipped plan."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def plan_of(flags: str) -> compile_report.CompilePlan:
    """The plan that one line of flags describes, as `CompilePlan.flags` writes them."""
    [options] = command_line.arguments(["compile_plan", *shlex.split(flags)], (), Options)
    return compile_report.plan_of(options)
