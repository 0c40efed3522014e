import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest
from places import ROOT

from sparse_dataflow.commands import command_line, request
from sparse_dataflow.commands.request import NAMED
from sparse_dataflow.core.config import settings
from sparse_dataflow.core.config.settings import setting
from sparse_dataflow.files.errors import UserError, UserErrors
from sparse_dataflow.hardware import detect
from sparse_dataflow.runs.run_config import RunConfig

GOLDEN = pathlib.Path(__file__).with_name("help.txt")
ALL = tuple(NAMED)
DOC = "Trains the sparse GPT and its dense twin.\n\nOn a pod: python -m experiments.toy --scale=13b"
NAMES = ("butterfly", "cyclic", "Banded")


@dataclasses.dataclass(frozen=True)
class Options:
    """Flags of every kind."""

    count: int = setting(3, "A count.", legal=(">= 1", lambda n: n >= 1))
    share: float = setting(0.5, "A share.")
    shape: str = setting("cyclic", "A shape.", choices=NAMES)
    shapes: tuple[str, ...] = setting(NAMES, "Shapes.", choices=NAMES)
    both: bool = setting(False, "Both.")
    where: str = setting("", "A place.")


def options(*arguments):
    [parsed] = command_line.arguments(["toy", *arguments], (), Options)
    return parsed


def run(main, *arguments, shared=(), options=Options):
    with pytest.raises(SystemExit) as left:
        command_line.run_main(
            main, "A toy.", shared=shared, options=options, argv=["toy", *arguments]
        )
    return left.value.code


def page(all=False):
    flags = command_line.flags_of(ALL, None)
    return command_line.help_text(DOC, "python -m toy", flags, sets=True, all=all)


def test_help_is_the_golden_text():
    assert page() == GOLDEN.read_text(), f"on purpose? python {__file__}"


def test_named_flags_stay_few():
    assert len(NAMED) + 1 <= 22  # with --set


def test_help_fits_two_screens_and_is_narrow():
    assert len(page().splitlines()) <= 2 * 32
    assert all(len(line) <= command_line.WIDTH for line in page(all=True).splitlines())


def test_help_all_begins_as_help_and_says_default_help_and_legal_values_of_every_path():
    start, rows = page(all=True).split("Settings, with their defaults:\n\n")
    assert page() == f"{start}--help=all lists them.\n"
    flags = {path: f" (flag: --{name})" for name, (path, _) in NAMED.items() if path}
    words = " ".join(rows.split()) + " "
    for path, s in settings.by_path(RunConfig).items():
        row = f"{path}={request.shown_default(path, s)}{flags.get(path, '')} {s.help} "
        if s.legal and s.type in (float, tuple[float, ...]):
            row += f"Legal: {s.legal[0]}. "
        if s.choices:
            names = ("all", "none", *s.choices) if s.type == tuple[str, ...] else s.choices
            row += f"Legal: {', '.join(names)}"
        assert words.count(row) == 1, path


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("--count=7", "count", 7),
        ("-count=7", "count", 7),
        ("--shape=BANDED", "shape", "Banded"),
        ("--shapes=banded,butterfly", "shapes", ("butterfly", "Banded")),
        ("--both", "both", True),
        ("--noboth", "both", False),
        ("--both=no", "both", False),
        ("--where=a=b", "where", "a=b"),
    ],
)
def test_a_flag_gives_its_field_a_value(argument, name, value):
    assert options(argument) == dataclasses.replace(Options(), **{name: value})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--cuont=7"], "unknown flag --cuont; did you mean --count?"),
        (["--nocount"], "unknown flag --nocount; did you mean --count?"),
        (["--zzz"], "unknown flag --zzz; --help lists the flags."),
        (["--set=a.b=1"], "unknown flag --set; --help lists the flags."),
        (["--share", "0.5", "x"], "unexpected argument 'x'; flags are written --name=value."),
        (
            ["cuont=5"],
            "unexpected argument 'cuont=5'; flags are written --name=value, did you mean --count?",
        ),
        (["--count=x"], "--count=x is not a whole number."),
        (["--count=0"], "--count=0 is not legal: it must be >= 1."),
        (
            ["--shape=buterfly"],
            "--shape=buterfly is unknown; did you mean butterfly? "
            "Legal: butterfly, cyclic, Banded.",
        ),
        (["--count"], "missing value for flag --count; write --name=value."),
        (["--noboth=1"], "--noboth=1 does not take an argument; write --name=value."),
        (["--count=1", "--count=2"], "--count is given twice; give it once."),
    ],
)
def test_mistakes_name_what_is_legal(arguments, text):
    with pytest.raises(UserError) as refused:
        options(*arguments)
    assert str(refused.value) == text


@pytest.mark.parametrize(
    "arguments, mistakes",
    [
        (
            ["--cuont=3", "--share=x", "y"],
            ["--cuont;", "--share=x is not", "unexpected argument 'y'"],
        ),
        (["--cuont", "3", "--zzz", "4"], ["unknown flag --cuont", "unknown flag --zzz"]),
        (["--count=0", "--count"], ["--count=0 is not legal", "missing value for flag --count"]),
        (
            ["a", "--zzz", "--", "--share"],
            ["argument 'a'", "--zzz", "unexpected argument '--share'"],
        ),
    ],
)
def test_all_mistakes_of_a_line_are_named(arguments, mistakes, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.run_main(lambda options: 0, "doc", options=Options, argv=["", *arguments])
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(lines) == len(mistakes)
    for line, words in zip(lines, mistakes, strict=True):
        assert line.startswith("error: ") and words in line


def test_flags_and_settings_are_named_together():
    wrong = [
        "--stepz=3",
        "--batch=0",
        "--set=trainin.warmup=0",
        "--set=x",
        "--evolution=rigl:evry=2",
    ]
    with pytest.raises(UserErrors) as refused:
        command_line.arguments(["", *wrong], tuple(request.NAMED), None)
    said = list(map(str, refused.value.errors))
    expected = ["--stepz", "--batch=0", "trainin.warmup", "--set x has no value", "evolution.evry"]
    assert len(said) == len(expected) and all(e in s for e, s in zip(expected, said, strict=True))


@pytest.mark.parametrize(
    "argument", ["--pdb", "--run_with_pdb", "--only_check_args", "--log_dir=x"]
)
def test_flags_of_absl_itself_are_unknown(argument):
    with pytest.raises(UserError, match="unknown flag"):
        options(argument)


def test_a_long_argument_is_cut_in_the_answer():
    with pytest.raises(UserError) as refused:
        options("--count=" + "9" * 4000 + "x")
    assert len(str(refused.value)) < 200


def test_a_flagfile_is_read(tmp_path):
    path = tmp_path / "flags"
    path.write_text("# a comment\n--count=7\n\n--where=a b\n")
    assert options(f"--flagfile={path}", "--both") == Options(count=7, where="a b", both=True)


@pytest.mark.parametrize("name", ["/dev/zero", "missing", "."])
def test_a_flagfile_that_is_no_small_file_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="flagfile"):
        options(f"--flagfile={name}")


@pytest.mark.parametrize("content", ["--flagfile={}/pipe", "--flagfile=/dev/zero",
                                     "--flagfile={}/none", "--flagfile={}/itself",
                                     "--flagfile={}/twice\n--flagfile={}/twice"])  # fmt: skip
def test_a_flagfile_in_a_flagfile_has_the_same_bounds(content, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("itself", "twice", "first"):
        (tmp_path / name).write_text(content.replace("{}", str(tmp_path)))
    with pytest.raises(UserError, match="cannot be read"):
        options(f"--flagfile={tmp_path / 'first'}")


def test_a_flag_of_any_length_is_unknown():
    with pytest.raises(UserError, match="unknown flag --xxx"):
        options("--" + "x" * 5000)


def test_flagfiles_in_flagfiles_are_read_in_place(tmp_path):
    (tmp_path / "inner").write_text("--where=inner")
    (tmp_path / "outer").write_text(f"--count=1\n--flagfile={tmp_path / 'inner'}\n--both")
    assert options(f"--flagfile={tmp_path / 'outer'}") == Options(1, where="inner", both=True)


def test_an_unknown_flag_of_a_flagfile_is_named(tmp_path):
    path = tmp_path / "flags"
    path.write_text("--nosuch=1\n")
    with pytest.raises(UserError, match=r"^unknown flag --nosuch; "):
        options(f"--flagfile={path}")


def test_an_old_flag_is_answered_with_its_new_spelling():
    old = {"accumulation": "training.micro_batches", "warmup": "training.warmup"}
    for name, path in old.items():
        with pytest.raises(UserError, match=f"write --set {path}=VALUE"):
            command_line.arguments(["toy", f"--{name}=2"], ALL, None)


def test_every_old_spelling_names_a_path():
    assert set(request.OLD_FLAGS.values()) <= set(settings.by_path(RunConfig))


def test_an_experiment_may_have_shared_flags_and_its_own():
    seen = []
    main = lambda *arguments: seen.extend(arguments)  # noqa: E731
    assert run(main, "--steps=3", "--count=7", "--set=training.warmup=0", shared=("steps",)) == 0
    asked, own = seen
    assert asked.changes == {"training.steps": 3, "training.warmup": 0.0}
    assert own == Options(count=7)


def test_an_experiment_may_have_defaults_of_its_own():
    defaults = {"scale": "pico", "block": 8}
    [asked] = command_line.arguments(["toy"], ALL, None, defaults)
    assert asked.config().sparsity.block == 8 and asked.config().run.scale == "pico"
    [asked] = command_line.arguments(["toy", "--block=16"], ALL, None, defaults)
    assert asked.config().sparsity.block == 16
    page = command_line.flags_of(ALL, None, defaults)
    assert {f.name: f.default for f in page}["block"] == "8"


def test_a_user_error_is_printed_without_a_trace(capsys):
    def main(values):
        raise UserError("density 7 is not in (0, 1].")

    assert run(main) == 2
    assert capsys.readouterr() == ("", "error: density 7 is not in (0, 1].\n")


def test_ctrl_c_exits_quietly(capsys):
    def main(values):
        raise KeyboardInterrupt

    assert run(main) == 130
    assert capsys.readouterr() == ("", "")


def test_a_defect_keeps_its_trace():
    def main(values):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command_line.run_main(main, "A toy.", options=Options, argv=["toy"])


def test_the_result_of_main_is_the_exit_status():
    assert run(lambda values: 3) == 3
    assert run(lambda values: None) == 0


def test_an_experiment_run_as_a_module(tmp_path):
    (tmp_path / "toy.py").write_text(
        '"""A toy."""\n'
        "import sys\n"
        "from sparse_dataflow.commands import command_line\n"
        "def main(request):\n"
        "    print(request.config().training.steps, 'jax' in sys.modules)\n"
        "if __name__ == '__main__':\n"
        "    command_line.run_main(main, __doc__, shared=('steps',))\n"
    )

    def start(*arguments):
        command = [sys.executable, "-m", "toy", *arguments]
        path = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=path)

    done = start("--steps=3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "3 False\n", "")
    wrong = start("--stesp=3")
    assert wrong.returncode == 2 and wrong.stdout == ""
    assert wrong.stderr == "error: unknown flag --stesp; did you mean --steps?\n"
    page = start("--help")
    assert page.returncode == 0 and page.stderr == ""
    assert page.stdout.startswith("usage: python -m toy [--flag=value ...]\n\nA toy.\n")


if __name__ == "__main__":
    GOLDEN.write_text(page())


def test_jax_takes_the_memory_that_plans_count_on(monkeypatch):
    """Of a GPU's memory it takes three quarters by default; a variable of the user's is kept."""
    for before, after in ((None, str(detect.POOL_SHARE)), ("0.5", "0.5")):
        monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
        if before:
            monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", before)
        seen = []
        with pytest.raises(SystemExit):
            command_line.run_main(
                lambda request, seen=seen: seen.append(
                    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]
                ),
                "doc",
                shared=("scale",),
                argv=["x"],
            )
        assert seen == [after]
