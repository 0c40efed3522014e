"""The compile plans that are shipped, and the flags of one read back."""

import json
import shlex
from pathlib import Path

from absl import flags as absl_flags

from experiments import command_line, compile_plan, compile_report, planner_flags

RESULTS = Path(__file__).parents[1] / "experiments/results/compile_plan"
SHIPPED = sorted(path.stem for path in RESULTS.glob("*.json"))


def result(name: str) -> dict:
    """What was kept of a shipped plan."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def plan_of(text: str) -> compile_report.Plan:
    """The plan of flags in one line, as `Plan.flags` writes them."""
    values = absl_flags.FlagValues()
    command_line.define(compile_plan.GROUPS, values, __name__)
    command_line.parse(["compile_plan", *shlex.split(text)], compile_plan.GROUPS, values)
    names = [flag.name for flag in compile_plan.PLAN.flags]
    return compile_report.asked_plan(planner_flags.settings(values, names))
