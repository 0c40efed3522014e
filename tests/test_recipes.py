"""The figures of docs/recipes.md are those that its commands print now, and its plans have room."""

import re

import pytest
from documented_commands import ROOT, fenced_commands
from planned_commands import MAIN, commands, config_of

from experiments import gpt13b_sparse
from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.planning import machine_report
from sparse_dataflow.hardware import detect, machines
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.planner import plan_memory
from sparse_dataflow.planner.memory import USABLE

PAGE = ROOT / "docs" / "recipes.md"
TEXT = PAGE.read_text(encoding="utf-8")
NUMBER = r"([\d.,]+)"


def request_of(command):
    [request] = command_line.arguments(["x", *command.flags], gpt13b_sparse.SHARED, None)
    return request


def described(line):
    """Returns (request, machine, plan) of each machine of a line with --chips."""
    [command] = commands(line)
    request = request_of(command)
    for machine in machines.parse_all(request.chips):
        yield request, machine, machine_report.plan(config_of(command, machine, request), machine)


PLANS = [
    (machine.name, result)
    for line in fenced_commands(PAGE)
    if "--chips=" in line
    for _, machine, result in described(line)
]
RECIPES = [line for line in fenced_commands(PAGE) if "# needs" in line]


def row(result):
    """Returns the row of the page, from the text that `--chips` prints."""
    text = machine_report.text(result)
    three = rf" +{NUMBER} +{NUMBER} +{NUMBER}"
    head = re.match(r"(\S+) sparse on ([\d,]+) (\S+),", text)
    all_times = re.findall(rf"(hours|days) for {NUMBER} billion tokens{three}", text)
    unit, tokens, middle, low, high = all_times[0]
    twin = "does not fit"
    if len(all_times) > 1:
        twin_unit, _, twin_time, *_ = all_times[1]
        twin = f"{twin_time} {twin_unit}"
    losses = re.findall(rf"held-out loss, nats a token{three}", text)
    sparse = "{} ({} to {})".format(*losses[0])
    dense = losses[1][0] if len(losses) > 1 else "-"
    [size] = re.findall(rf"^  all +{NUMBER}$", text, re.M)
    [sizes] = re.findall(rf"by the compiler {NUMBER} to {NUMBER} GiB of {NUMBER} GiB", text)
    cells = (
        f"{head[1]}, {head[2]} {head[3]}",
        tokens,
        f"{middle} {unit} ({low} to {high})",
        twin,
        "{} ({} to {}) of {}".format(size, *sizes),
        sparse,
        dense,
    )
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize(("name", "result"), PLANS, ids=[name for name, _ in PLANS])
def test_a_row_is_what_its_command_prints_now(name, result):
    assert row(result) in TEXT.splitlines()


def test_no_row_is_without_its_command():
    rows = re.findall(r"^\| [\w.]+, [\d,]+ [\w-]+ \|.*$", TEXT, re.M)
    assert sorted(rows) == sorted(row(result) for _, result in PLANS) and len(rows) > 8


def test_every_recipe_has_its_row():
    """The training command and the one with --chips name the same run."""
    planned = {(name, result.settled.config.training.steps) for name, result in PLANS}
    for line in RECIPES:
        [command] = commands(line)
        assert command.name in MAIN
        steps = request_of(command).changes["training.steps"]
        assert command.machines and {(m.name, steps) for m in command.machines} <= planned, line


@pytest.mark.parametrize(("name", "result"), PLANS, ids=[name for name, _ in PLANS])
def test_a_recommended_plan_keeps_room_for_the_planners_error(name, result):
    """Of what is usable, and of the 92% of a GPU's memory that jax takes."""
    chip = result.settled.machine.chip
    largest = result.settled.chip_bytes * (1 + plan_memory.ERROR[1])
    assert USABLE <= detect.POOL_SHARE
    assert largest <= USABLE * chip.memory_bytes, f"{largest / GIB:.1f} GiB"


def test_the_page_says_first_what_is_out_of_reach():
    [result] = [r for name, r in PLANS if name == "h100:1" and r.tokens == 300e9]
    first = TEXT.split("\n## ")[1]
    assert first.startswith("Out of reach") and f"{result.days:.0f} days" in first
    assert row(result) in first
