"""The figures of docs/guide/recipes.md are what its commands print now; its plans have room."""

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

PAGE = ROOT / "docs/guide/recipes.md"
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


@pytest.fixture(scope="module")
def plans():
    """(name of the machine, plan) of each command with --chips."""
    lines = (line for line in fenced_commands(PAGE) if "--chips=" in line)
    return [(machine.name, result) for line in lines for _, machine, result in described(line)]


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
    [size] = re.findall(rf"^  all +{NUMBER}$", text, re.M)
    [sizes] = re.findall(rf"by the compiler {NUMBER} to {NUMBER} GiB of {NUMBER} GiB", text)
    cells = (
        f"{head[1]}, {head[2]} {head[3]}",
        tokens,
        f"{middle} {unit} ({low} to {high})",
        twin,
        "{} ({} to {}) of {}".format(size, *sizes),
    )
    return f"| {' | '.join(cells)} |"


def test_the_rows_are_what_their_commands_print_now(plans):
    rows = re.findall(r"^\| [\w.]+, [\d,]+ [\w-]+ \|.*$", TEXT, re.M)
    assert sorted(rows) == sorted(row(result) for _, result in plans) and len(rows) > 8


def test_every_recipe_has_its_row(plans):
    """The training command and the one with --chips name the same run."""
    planned = {(name, result.settled.config.training.steps) for name, result in plans}
    for line in RECIPES:
        [command] = commands(line)
        assert command.name in MAIN
        steps = request_of(command).changes["training.steps"]
        assert command.machines and {(m.name, steps) for m in command.machines} <= planned, line


def test_recommended_plans_keep_room_for_the_planners_error(plans):
    """Of what is usable, and of the 92% of a GPU's memory that jax takes."""
    assert USABLE <= detect.POOL_SHARE
    for name, result in plans:
        chip = result.settled.machine.chip
        largest = result.settled.chip_bytes * (1 + plan_memory.ERROR[1])
        assert largest <= USABLE * chip.memory_bytes, f"{name}: {largest / GIB:.1f} GiB"


def test_the_page_says_before_any_recipe_what_is_out_of_reach(plans):
    [result] = [r for name, r in plans if name == "h100:1" and r.tokens == 300e9]
    before, *sections = TEXT.split("\n## ")
    [section] = [text for text in sections if text.startswith("Out of reach")]
    assert "[out of reach](#out-of-reach)" in before
    assert f"{result.days:.0f} days" in section and row(result) in section
