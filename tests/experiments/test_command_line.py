import pytest
from absl import flags as absl_flags
from hypothesis import given
from hypothesis import strategies as st

from experiments import command_line
from experiments.command_line import Flag, Group
from sparse_dataflow.files.errors import UserError

NAMES = ("butterfly", "cyclic", "Banded")
GROUPS = (
    Group(
        "Toy",
        "flags of every kind",
        (
            Flag("count", "integer", 3, "A count.", legal=(">= 1", lambda n: n >= 1)),
            Flag("share", "number", 0.5, "A share."),
            Flag("shape", "choice", "cyclic", "A shape.", lambda: NAMES),
            Flag("shapes", "list", "all", "Shapes.", lambda: NAMES),
            Flag("both", "switch", "auto", "Both.", lambda: ("auto", "yes", "no")),
            Flag("where", "text", "", "A place."),
        ),
    ),
)


def define():
    values = absl_flags.FlagValues()
    command_line.define(GROUPS, values, "toy")
    return values


def parse(*arguments):
    values = define()
    command_line.parse(["toy", *arguments], GROUPS, values)
    command_line.check_ranges(GROUPS, values)
    return values


def run(main, *arguments, prepare=lambda values: None):
    with pytest.raises(SystemExit) as left:
        command_line.run(main, "A toy.", GROUPS, prepare, define(), ["toy", *arguments])
    return left.value.code


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("--count=7", "count", 7),
        ("-count=7", "count", 7),
        ("--share=1e-3", "share", 1e-3),
        ("--shape=butterfly", "shape", "butterfly"),
        ("--shape=BANDED", "shape", "Banded"),
        ("--shapes=banded,butterfly", "shapes", ("butterfly", "Banded")),
        ("--shapes=all", "shapes", NAMES),
        ("--shapes=none", "shapes", ()),
        ("--shapes=", "shapes", ()),
        ("--both", "both", "yes"),
        ("--noboth", "both", "no"),
        ("--both=no", "both", "no"),
        ("--both=false", "both", "no"),
        ("--both=auto", "both", "auto"),
        ("--where=a=b", "where", "a=b"),
    ],
)
def test_values(argument, name, value):
    assert parse(argument)[name].value == value


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--cuont=7"], "unknown flag --cuont; did you mean --count?"),
        (["--nocount"], "unknown flag --nocount; did you mean --count?"),
        (["--zzz"], "unknown flag --zzz; --help lists the flags."),
        (["--share", "0.5", "x"], "unexpected argument 'x'; flags are written --name=value."),
        (
            ["cuont=5"],
            "unexpected argument 'cuont=5'; flags are written --name=value, did you mean --count?",
        ),
        (["--count=x"], "--count=x is not a whole number."),
        (["--count=1.0"], "--count=1.0 is not a whole number."),
        (["--count=0"], "--count=0 is not legal: it must be >= 1."),
        (["--share=half"], "--share=half is not a number."),
        (["--share=nan"], "--share=nan is not a finite number."),
        (
            ["--shape=buterfly"],
            "--shape=buterfly is unknown; did you mean butterfly? "
            "Legal: butterfly, cyclic, Banded.",
        ),
        (["--shape=zzz"], "--shape=zzz is unknown. Legal: butterfly, cyclic, Banded."),
        (
            ["--shapes=cyclic,bnaded"],
            "--shapes=cyclic,bnaded is unknown; did you mean Banded? "
            "Legal: butterfly, cyclic, Banded, all, none.",
        ),
        (
            ["--shapes=all,cyclic"],
            "--shapes=all,cyclic mixes all or none with names; give one or the other.",
        ),
        (["--count"], "missing value for flag --count; write --name=value."),
        (["--noboth=1"], "--noboth=1 does not take an argument; write --name=value."),
    ],
)
def test_mistakes_name_what_is_legal(arguments, text):
    with pytest.raises(UserError) as refused:
        parse(*arguments)
    assert str(refused.value) == text


@given(st.sampled_from(["count", "share", "shapes", "where"]), st.data())
def test_a_dropped_or_doubled_letter_finds_its_flag(name, data):
    at = data.draw(st.integers(0, len(name) - 1))
    wrong = data.draw(
        st.sampled_from([name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:]])
    )
    if wrong in ("shape", "shapes"):
        return
    assert command_line.did_you_mean(wrong, ["count", "share", "shapes", "where"]) == (
        f"did you mean {name}?"
    )


def test_choices_are_looked_up_late():
    def explode():
        raise AssertionError("asked for the choices before they were needed")

    values = absl_flags.FlagValues()
    groups = (Group("Toy", "", (Flag("shape", "choice", "cyclic", "A shape.", explode),)),)
    command_line.define(groups, values, "toy")
    command_line.parse(["toy"], groups, values)
    assert values.shape == "cyclic"


def test_help_shows_our_flags_alone(capsys):
    assert run(lambda values: pytest.fail("main ran"), "--count=2", "--help") == 0
    page = capsys.readouterr().out
    assert "--count=3" in page and "--both=auto" in page and "A toy." in page
    assert "absl" not in page and "flagfile" not in page


def test_helpfull_shows_the_libraries_flags_too(capsys):
    values = define()
    absl_flags.DEFINE_string("library_flag", "", "Of a library.", values, module_name="library")
    with pytest.raises(SystemExit) as left:
        command_line.run(None, "A toy.", GROUPS, None, values, ["toy", "--helpfull"])
    page = capsys.readouterr().out
    assert left.value.code == 0 and "--count=3" in page and "library_flag" in page
    assert page.count("--count") == 1


def test_a_user_error_is_told_without_a_trace(capsys):
    def main(values):
        raise UserError("density 7 is not in (0, 1].")

    assert run(main) == 2
    assert capsys.readouterr() == ("", "error: density 7 is not in (0, 1].\n")


def test_preparation_may_refuse_and_fill_in():
    def fill(values):
        values.count = 9

    def refuse(values):
        raise UserError("no.")

    seen = []
    assert run(lambda values: seen.append(values.count), prepare=fill) == 0
    assert run(lambda values: seen.append(values.count), prepare=refuse) == 2
    assert seen == [9]


def test_ctrl_c_ends_quietly(capsys):
    def main(values):
        raise KeyboardInterrupt

    assert run(main) == 130
    assert capsys.readouterr() == ("", "")


def test_a_defect_keeps_its_trace():
    def main(values):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command_line.run(main, "A toy.", GROUPS, lambda values: None, define(), ["toy"])


def test_mains_result_is_the_exit_status():
    assert run(lambda values: 3) == 3
    assert run(lambda values: None) == 0
