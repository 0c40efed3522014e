"""Each row about settings of a command line refuses both, and accepts each alone."""

import pytest

from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.flag_conflicts import ROWS
from sparse_dataflow.commands.request import NAMED
from sparse_dataflow.files.errors import UserError


def parse(settings):
    flags = [f"--set={path}={value}" for path, value in settings.items()]
    return command_line.arguments(["toy", *flags], tuple(NAMED), None)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.option.words)
def test_each_row_refuses_both_and_accepts_each(row):
    [other] = row.others
    with pytest.raises(UserError) as refused:
        parse(row.option.example | other.example)
    words = str(refused.value)
    assert row.because in words and row.legal in words
    for path in row.option.example.keys() - other.example.keys():
        assert path.partition(".")[2] in words
    parse(row.option.example)
    parse(other.example)


def test_the_flags_of_all_violated_rows_are_named_at_once():
    settings = {"parallel.stash": "host", "evolution.every": 5, "training.steps": 9}
    with pytest.raises(UserError) as refused:
        parse({**settings, "run.minutes": 1, "evolution.first": "qkv", "parallel.server_dir": "d"})
    assert str(refused.value) == (
        "--set run.minutes with --set training.steps, which sets the length too; legal: one of "
        "them. --set parallel.stash, --set parallel.server_dir with parallel.executor=auto, which "
        "has no such setting; legal: parallel.executor=relay. --set evolution.every with "
        "evolution.method=static, which exchanges no blocks; legal: evolution.method=set or rigl. "
        "--set evolution.first with evolution.method=static, which turns nothing dense; legal: "
        "evolution.method=sparse_to_dense."
    )
