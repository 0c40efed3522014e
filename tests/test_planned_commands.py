"""Every documented command is parsed, resolved and planned on the machine that its page names."""

import os
import re
import subprocess
import sys

import planned_commands
import pytest
from documented_commands import LINES, ROOT
from marks import some
from planned_commands import MAIN, commands, problem

FILES = sorted({path for path, _ in LINES})


PLANNED_DAILY = {"docs/guide/recipes.md", "experiments/layout_search.py", "launch/slurm.md"}
"""Files with many searches; others plan such commands, and `test_recipes.py` runs the recipes."""


@pytest.mark.parametrize("path", some(FILES, *sorted({*FILES} - PLANNED_DAILY)))
def test_every_command_is_planned_where_its_page_says(path):
    lines = [line for name, line in LINES if name == path]
    problems = {line: list(map(problem, commands(line))) for line in lines}
    wrong = {line: texts for line, texts in problems.items() if any(texts)}
    assert wrong == {}


def test_commands_of_every_kind_are_found():
    pairs = [(name, each) for name, line in LINES for each in commands(line)]
    assert len(pairs) > 150
    assert {"experiments/gpt13b_sparse.py", "Makefile", "README.md"} <= {name for name, _ in pairs}
    launched = [name for name, each in pairs if each.machines and each.name in MAIN]
    assert {f"launch/{page}.md" for page in ("docker", "gke", "local", "slurm", "tpu_vm")} <= {
        *launched
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--scale=13b --corpus=F --steps=9", "needs"),  # On a laptop.
        ("--scale=13b --corpus=F --steps=9   # needs rtx-4090:1", "needs"),
        ("--scale=13b   # needs h100:8", "without --corpus and --steps"),
        ("--scale=13b --corpus=F --steps=9 --mesh=fsdp:4   # needs h100:8", "--mesh=fsdp:8"),
        (
            "--scale=3m --steps=9 --mesh=fsdp:8 --batch=9   # needs h100:8",
            "--batch=",
        ),
        ("--scale=175b --chips=rtx-4090:8", "needs"),
        ("--scale=13b --corpus=F --steps=9 --set training.micro_batches=1   # needs h100:8", "fit"),
    ],
)
def test_a_command_that_does_not_train_is_found(line, words):
    [command] = commands(f"python -m experiments.gpt13b_sparse {line}")
    assert words in problem(command)


def test_a_launchers_options_are_compared_with_the_machine():
    flags = "--scale=13b --corpus=F --steps=9"
    for line in (
        f"sbatch --nodes=4 launch/slurm.sbatch {flags}   # needs SLURM, h100:16",
        f"python launch/gke/render.py --topology=4x4x4 --name=a gpt13b_sparse {flags}"
        " | kubectl apply -f -   # needs v5p-64",
        f"python launch/local.py --processes=4 --gpus=2 -m experiments.gpt13b_sparse {flags}"
        "   # needs h100:4",
    ):
        [command] = commands(line)
        assert "its options have" in problem(command), line


def test_the_machines_of_a_comment_are_found():
    line = "python -m experiments.gpt13b_sparse --scale=13b   # needs Docker, h100:1 or v5p-64"
    [command] = commands(line)
    assert [machine.name for machine in command.machines] == ["h100:1", "tpu-v5p:32"]
    [command] = commands("python -m experiments.gpt13b_sparse   # needs a TPU VM")
    assert command.machines == (planned_commands.LAPTOP,)


ADVICE = re.compile(r"(--\w+=[^\s;,]*[^\s;,.]|--set [\w.]+=[^\s;,]*[^\s;,.])")


@pytest.mark.parametrize(
    "line",
    [
        "--scale=13b   # needs rtx-4090:1",
        pytest.param("--scale=13b --density=1   # needs h100:1", marks=pytest.mark.slow),
        "--scale=13b --set training.micro_batches=1   # needs h100:8",
        "--scale=175b   # needs h100:1",
        "--scale=1.3b --set model.remat=none --set training.micro_batches=1   # needs v5e-4",
        "--scale=3m --mesh=fsdp:8 --batch=9   # needs h100:8",
    ],
)
def test_what_an_error_advises_is_planned(line):
    start = "python -m experiments.gpt13b_sparse --corpus=F --steps=9 "
    [command] = commands(start + line)
    text = problem(command)
    assert "it fits" in text or "legal:" in text, text
    advice = re.split(r"it fits|legal:", text)[1]
    tried = 0
    for option in advice.split(" or "):
        flags, machine = ADVICE.findall(option), planned_commands.MACHINE.search(option)
        if not flags and not machine:
            continue
        tried += 1
        command, _, needs = line.partition("   #")
        for name in [flag.partition("=")[0] for flag in flags]:
            command = re.sub(rf"{re.escape(name)}=\S+", "", command)
        needs = f"# needs {machine[0]}" if machine else f"#{needs}"
        [better] = commands(f"{start}{command} {' '.join(flags)}   {needs}")
        assert problem(better) == "", (option, better)
    assert tried


def small_trainings():
    """Returns (flags, module) of commands that train a laptop's model from scratch on a laptop."""
    result = set()
    for _, line in LINES:
        for command in commands(line):
            paths = {flag.partition("=")[0] for flag in command.flags}
            elsewhere = {"--init_from", "--resume", "--describe", "--chips"} & paths
            texts = " ".join(command.flags)
            scale = re.search(r"--scale=(\w+)", texts)
            small = not scale or scale[1] in ("pico", "3m", "nano")
            here = not elsewhere and "training.teacher=" not in texts and "processes=" not in texts
            laptop = command.machines == (planned_commands.LAPTOP,) and "--help" not in texts
            if command.name in MAIN and small and here and laptop and "--resume=" not in line:
                result.add((tuple(f for f in command.flags if not LENGTH.match(f)), command.name))
    return sorted(result)


LENGTH = re.compile(r"--(steps|minutes|out|corpus)=")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "name"),
    small_trainings(),
    ids=lambda text: " ".join(text) if isinstance(text, tuple) else text,
)
def test_a_small_command_really_trains_a_step(flags, name, tmp_path):
    """As printed, but one step, and a folder of text instead of the page's corpus."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        lines = [f"def f{number}_{i}(x): return x * {i} + {number}\n" for i in range(400)]
        (texts / f"{number}.txt").write_text("".join(lines))
    command = (sys.executable, "-m", name, *flags)
    ends = ("--steps=1", f"--corpus={texts}", f"--out={tmp_path}/run")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": f"{tmp_path}/cache"}
    done = subprocess.run(
        [*command, *ends], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run" / "report.html").exists()
