"""Plans a documented command on the machines that its page names.

The comment after a command names the machines as `--chips` does, as in `# needs SLURM, h100:16`.
Without one it is a command for a laptop.  Nothing here reads a corpus or a network.
"""

import dataclasses
import importlib
import itertools
import math
import re
import shlex
from unittest import mock

from documented_commands import split_commands

from experiments.planning import search_report
from sparse_dataflow.commands import command_line, run_list
from sparse_dataflow.commands.planning import compile_report, launching, search_table
from sparse_dataflow.commands.preflight import settling
from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.console import EVERYDAY
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import chips, machines
from sparse_dataflow.hardware.chips import GIB, Chip
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.planner import memory, plan_memory, search, settle
from sparse_dataflow.runs.run_config import LAPTOP_SCALES, SIZES, RunConfig

LAPTOP = Machine(Chip("laptop", memory_bytes=16 * GIB), 1, host=True)
MACHINE = re.compile(r"(?<![\w.-])(?:[a-z][\w-]*:\d+|v\d\w+-\d+)(?![\w-])")
MAIN = ("experiments.gpt13b_sparse", "experiments.gpt13b_dense")
STUDIES = (
    *("coordinate_check", "dense_end", "density_search", "iso_flop", "omit_features"),
    *("sparse_quality", "sparse_scaling_law", "step_bench", "task_table"),
)
"""Experiments that train the dense model of their request, too."""
GPUS_A_NODE = 8


@dataclasses.dataclass(frozen=True)
class Command:
    """An experiment that a line starts.

    Attributes:
      name: its module.
      flags: its flags.
      machines: each is one that it needs.
      devices: number of devices by the line's own options, e.g. of SLURM; 0 where it says none.
    """

    name: str
    flags: tuple[str, ...]
    machines: tuple[Machine, ...]
    devices: int = 0


def commands(line):
    """Returns the experiments that a line of commands starts."""
    lines, comment = split_commands(line)
    needed = tuple(map(machines.parse, MACHINE.findall(comment.partition("needs")[2])))
    result = []
    for each in lines:
        words = shlex.split(each)
        environment = {}
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, environment[name] = words.pop(0).partition("=")
        started = _started(words, environment)
        if started:
            name, flags, devices = started
            flags = tuple(f for f in flags if f != "..." and not f.startswith("--resume="))
            there = needed or (_laptop(devices or 1),)
            result.append(Command(name, flags, there, devices if needed else 0))
    return result


def spelled_out(words):
    """Returns the words of a command, of the console script as `python -m experiments.NAME`."""
    for start in (["sparse-dataflow"], ["python", "-m", "sparse_dataflow"]):
        if words[: len(start)] == start and len(words) > len(start):
            name, *rest = words[len(start) :]
            module = EVERYDAY.get(name, name.replace("-", "_"))
            return ["python", "-m", f"experiments.{module}", *rest]
    return words


def _started(words, environment):
    """Returns (module, flags, devices) of what a command starts, None where it is no experiment."""
    words = spelled_out(words)
    joined = " ".join(words[:3])
    options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    if "launch/slurm.sbatch" in words:
        name = environment.get("EXPERIMENT", "gpt13b_sparse")
        nodes = int(options.get("nodes", 2))
        flags = words[words.index("launch/slurm.sbatch") + 1 :]
        return f"experiments.{name}", flags, nodes * GPUS_A_NODE
    if joined == "sh launch/tpu_vm.sh start":
        return f"experiments.{words[6]}", words[7:], 0
    if joined.startswith("docker run"):
        at = next(i for i, word in enumerate(words) if word.startswith("sparse_dataflow:"))
        return f"experiments.{words[at + 2]}", words[at + 3 :], 0
    if words[:2] == ["python", "launch/gke/render.py"]:
        at = next(i for i, word in enumerate(words) if i > 1 and word[:2] != "--")
        if "topology" in options:
            count = math.prod(map(int, options["topology"].split("x")))
            count *= int(options.get("slices", 1))
        else:
            count = int(options.get("nodes", 1)) * int(options.get("gpus", GPUS_A_NODE))
        return f"experiments.{words[at]}", words[at + 1 :], count
    modules = [after for word, after in itertools.pairwise(words) if word == "-m"]
    if words[:1] != ["python"] or not modules or not modules[0].startswith("experiments."):
        return None
    count = 0
    if words[1] == "launch/local.py":
        count = int(options["processes"]) * int(options.get("gpus", 1))
    return modules[0], words[words.index("-m") + 2 :], count


def _laptop(count):
    chip = dataclasses.replace(LAPTOP.chip, memory_bytes=LAPTOP.chip.memory_bytes // count)
    return Machine(chip, count, host=True)


def problem(command):
    """Returns why a command does not run on a machine that its page names; "" where it does."""
    wrong = [m.name for m in command.machines if command.devices not in (0, m.count)]
    if wrong:
        return f"the page says {', '.join(wrong)}, its options have {command.devices} devices"
    module = importlib.import_module(command.name)
    name = command.name.removeprefix("experiments.")
    shared, options = getattr(module, "SHARED", ()), getattr(module, "Options", None)
    if any(flag.startswith("--help") or flag == "--resume" for flag in command.flags):
        return ""  # The newest run, or its settings, are the reader's.
    try:
        # The newest run is the reader's.
        with mock.patch.object(run_list, "newest", lambda flag: "RUN"):
            arguments = command_line.arguments(
                [name, *command.flags], shared, options, getattr(module, "DEFAULTS", {})
            )
        for argument in arguments:
            if isinstance(argument, Request):
                _plan_request(command, name, argument)
            elif f"_{name}" in globals():
                globals()[f"_{name}"](argument)
    except UserError as error:
        return str(error)
    return ""


def settled(command, machine, request):
    """Returns the settled plan of a training on a machine.

    Raises:
      UserError: it does not fit there.
    """
    return settling.settle(config_of(command, machine, request), machine)


def config_of(command, machine, request) -> RunConfig:
    """Returns the config of a command on a machine."""
    tpu = machine.chip.name.startswith("tpu")
    backend = "cpu" if machine.host else "tpu" if tpu else "gpu"
    sparse = command.name != MAIN[1]
    return request.config(backend, machine.chip.memory_bytes, sparse)


def _plan_request(command, name, request):
    if request.changes.get("run.init_from"):
        return  # The shape is in a folder of the reader's.
    if request.describe and not request.chips:
        return  # It prints arrays and why there is no plan, and trains nothing.
    for machine in machines.parse_all(request.chips) if request.chips else command.machines:
        config = config_of(command, machine, request)
        if command.name in MAIN:
            if not request.chips and not request.describe:
                _check_length(config, request)
            _check_room(settling.settle(config, machine))
        elif name in STUDIES:
            settle.settle(config.dense(), settling.models_of, dataclasses.replace(machine, count=1))
        elif name.startswith("relay_"):
            relay = config.change(
                parallel__executor="relay", parallel__mesh="auto", parallel__stash="host"
            )
            settling.settle(relay.change(run__twin="no"), machine)
        else:
            _check_weights(config, machine)


def _check_length(config, request):
    """Raises UserError where a large model would train for two minutes or on a library's code."""
    large = config.run.scale not in LAPTOP_SCALES
    if large and not {"data.corpus", "training.steps"} <= request.changes.keys():
        raise UserError(f"--scale={config.run.scale} without --corpus and --steps.")


def _check_room(result):
    if result.tight:
        raise UserError(f"its plan takes {result.share:.0%} of the usable memory.")


def _check_weights(config, machine):
    weights = 4 * cost.parameter_count(config.dense().model)
    if weights > settle.usable(machine):
        raise UserError(f"its weights need {weights / GIB:,.0f} GiB.")


def _layout_search(options):
    request = search_report.request_of(options)
    priced = search.price(request)
    search.check_legal(priced)
    ranked = priced.ranked(search_table.SHOWN)
    plan = ranked[priced.recommended(ranked)][0]
    needs = f"   # needs {request.chip.name}:{request.chips}"
    lines = [launching.command(options, plan, options.tokens)]
    lines += [launching.launcher(options, plan, options.tokens, request.chip)]
    for line in filter(None, lines):
        for command in commands(line + needs):
            if text := problem(command):
                raise UserError(f"{line}: {text}")


def _compile_plan(options):
    plan = compile_report.plan_of(options)
    size = plan_memory.plan_bytes(plan.config, plan.sequence, plan.parallel).total
    room = memory.USABLE * plan.topology.chip.memory_bytes
    if size > room:
        raise UserError(f"it needs {size / GIB:,.1f} GiB of {room / GIB:,.1f}.")


def _interplay(options):
    if options.hardware != "this":
        chips.lookup(options.hardware)
    assert options.scale in SIZES


def _scaling_study(options):
    for name in options.hardware.split(","):
        chips.lookup(name)
