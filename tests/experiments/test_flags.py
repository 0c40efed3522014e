import json
import pathlib
import subprocess
import sys
import types

import pytest
from absl import flags as absl_flags
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import command_line, flags
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.models import sizes

GOLDEN = pathlib.Path(__file__).with_name("help.txt")
PATTERNS = ("pixelfly", "butterfly", "cyclic", "random", "banded", "dense")
ALL = [flag for group in flags.GROUPS for flag in group.flags]
DOC = "Trains the sparse GPT and its dense twin.\n\nOn a pod: python -m experiments.toy --scale=13b"


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    module = types.SimpleNamespace(PATTERNS=dict.fromkeys(PATTERNS))
    monkeypatch.setitem(sys.modules, "sparse_dataflow.sparsity.patterns", module)


def parse(*arguments, groups=flags.GROUPS):
    values = absl_flags.FlagValues()
    flags.define(groups, values)
    command_line.parse(["toy", *arguments], groups, values)
    return values


def test_help_is_the_golden_text():
    # Change it on purpose only; `--help` of any experiment shows the new one.
    assert command_line.help_text(DOC, "python -m experiments.toy", flags.GROUPS) == (
        GOLDEN.read_text(encoding="utf-8")
    )


def test_help_is_complete_and_narrow():
    page = command_line.help_text(DOC, "python -m experiments.toy", flags.GROUPS)
    assert all(len(line) <= command_line.WIDTH for line in page.splitlines())
    for flag in ALL:
        assert page.count(f"\n  --{flag.name}=") == 1


def test_flags_stay_few():
    assert len(ALL) <= 55
    assert len({flag.name for flag in ALL}) == len(ALL)


def test_defining_twice_changes_nothing():
    values = parse("--density=0.5")
    flags.define(flags.GROUPS, values)
    assert values.density == 0.5


def test_defaults_are_legal_and_parse_to_themselves():
    values = parse()
    flags.check(values)
    for flag in ALL:
        if flag.kind == "list":
            continue
        assert values[flag.name].value == flag.default
        written = parse(f"--{flag.name}={flag.default}")[flag.name].value
        assert written == flag.default and type(written) is type(flag.default), flag.name
    assert values.sparse_projections == sizes.PROJECTIONS


@pytest.mark.parametrize("name", ["norm", "positions", "remat", "parametrization"])
def test_choices_are_the_models_own(name):
    choices = next(flag.names for flag in ALL if flag.name == name)
    for choice in choices:
        sizes.ModelConfig(1, 8, 1, 32, 256, 8, **{name: choice})
    with pytest.raises(UserError) as refused:
        sizes.ModelConfig(1, 8, 1, 32, 256, 8, **{name: "?"})
    assert all(choice in str(refused.value) for choice in choices)


def test_pattern_default_is_in_the_real_registry(monkeypatch):
    monkeypatch.delitem(sys.modules, "sparse_dataflow.sparsity.patterns")
    choices = next(flag.names for flag in ALL if flag.name == "pattern")
    assert parse().pattern in choices


def test_a_users_own_pattern_is_legal(monkeypatch):
    with pytest.raises(UserError, match="pattern=mine"):
        parse("--pattern=mine")
    sys.modules["sparse_dataflow.sparsity.patterns"].PATTERNS["mine"] = None
    assert parse("--pattern=mine").pattern == "mine"


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "density": st.floats(1e-3, 1),
            "block": st.integers(1, 512),
            "pattern": st.sampled_from(PATTERNS[:-1]),
            "scale": st.sampled_from(list(sizes.SIZES)),
            "sparse_projections": st.sets(st.sampled_from(sizes.PROJECTIONS), min_size=1),
            "seed": st.integers(0, 2**31),
            "twin": st.sampled_from(["auto", "yes", "no"]),
        },
    )
)
@settings(max_examples=50)
def test_flags_survive_json_and_the_command_line(chosen):
    def write(value):
        return ",".join(value) if isinstance(value, set | list) else value

    values = parse(*[f"--{name}={write(value)}" for name, value in chosen.items()])
    flags.check(values)
    saved = json.loads(json.dumps(flags.as_dict(values)))
    assert saved.keys() == {flag.name for flag in ALL} - set(flags._NOT_KEPT)
    for name, value in chosen.items():
        assert (set(saved[name]) if isinstance(value, set) else saved[name]) == value
    again = parse(*[f"--{name}={write(value)}" for name, value in saved.items()])
    assert flags.as_dict(again) == saved


def test_an_experiment_leaves_out_what_it_has_no_use_for():
    groups = flags.without(*(flag.name for flag in flags.SPARSITY.flags), "twin")
    assert flags.SPARSITY.title not in [group.title for group in groups]
    flags.check(parse("--steps=3", groups=groups), groups)
    with pytest.raises(UserError, match="unknown flag --density"):
        parse("--density=0.5", groups=groups)


def test_an_experiment_run_as_a_module(tmp_path):
    (tmp_path / "toy.py").write_text(
        '"""A toy."""\n'
        "import sys\n"
        "from experiments import flags\n"
        "def main(values):\n"
        "    print(values.steps, 'jax' in sys.modules)\n"
        "if __name__ == '__main__':\n"
        "    flags.run(main, __doc__)\n"
    )
    root = pathlib.Path(__file__).parents[2]

    def start(*arguments):
        command = [sys.executable, "-m", "toy", *arguments]
        path = {"PYTHONPATH": f"{root}:{tmp_path}", "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=path)

    done = start("--steps=3")
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "3", "")
    wrong = start("--stesp=3")
    assert wrong.returncode == 2 and wrong.stdout == ""
    assert wrong.stderr == "error: unknown flag --stesp; did you mean --steps?\n"
    page = start("--help")
    assert page.returncode == 0 and page.stderr == ""
    assert page.stdout.startswith("usage: python -m toy [--flag=value ...]\n\nA toy.\n")
