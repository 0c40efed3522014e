"""The table of what goes with what: each row refuses, and all else that it accepts can train."""

import pathlib

import pytest
from compatible_runs import BASE, accepted, merged
from eight_devices import on_eight_devices

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.compatibility import PARALLELISMS, ResolvedRun, violations
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs import compatibility
from sparse_dataflow.runs.compatibility import TABLE

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "devices.md"
CASES = [
    pytest.param(row, other, id=f"{row.option.words} {other.words}")
    for row in TABLE
    for other in row.others
]


@pytest.mark.parametrize(("row", "other"), CASES)
def test_each_row_refuses_a_run_and_accepts_its_neighbours(row, other):
    both = merged(other.example, row.option.example)
    if row.option.needed:  # What needs a setting has it in its example.
        both = other.example | row.option.example
    with pytest.raises(UserError) as refused:
        accepted(both)
    words = str(refused.value)
    assert row.because.removeprefix("which ") in words
    assert "legal" in words and (row.option.needed or row.legal in words)
    for neighbour in (other, row.option):
        accepted(neighbour.example)


def test_all_violated_rows_are_named_at_once():
    with pytest.raises(UserError) as refused:
        BASE.change(training__teacher="DIR", model__logit_cap=30.0, evolution__method="rigl")
    assert str(refused.value) == (
        "model.logit_cap=30.0 with training.teacher, whose logits are compared as they are; legal "
        "with it: 0. evolution.method=rigl with training.teacher, which rigl's gradients do not "
        "count; legal with it: every other value."
    )


def test_an_executor_without_a_run_refuses_in_the_same_words():
    executor, _ = accepted({"parallel.mesh": "feature:2"})
    model = ModelConfig(2, 32, 2, 64, 64, 16, experts=2)
    with pytest.raises(UserError, match=r"experts=2 with --mesh=feature:2 .*; legal: a mesh"):
        executor.check(model, TrainingConfig(1, 4, 16))


def test_few_options_lack_a_parallelism():
    assert len(compatibility.devices_table().splitlines()) <= 2 + 6


def test_rows_that_read_absent_parts_do_not_apply():
    model = ModelConfig(2, 32, 2, 64, 64, 16, mask_documents=True, experts=4)
    assert not list(violations(ResolvedRun(model, TrainingConfig(1, 4, 16)), TABLE))


def test_the_pages_have_the_tables():
    assert compatibility.devices_table() in PAGE.read_text(encoding="utf-8")
    settings = compatibility.settings_table()
    pairs = [(row, other) for row in TABLE for other in row.others if other not in PARALLELISMS]
    assert len(settings.splitlines()) >= len({row.option.words for row, _ in pairs}) + 2


@pytest.mark.slow
def test_what_the_table_accepts_can_be_traced():
    """Draws runs of several options and parallelisms, for some seconds."""
    traced, refused, failed = on_eight_devices("runs/compatible_runs.py", "0", "1")
    assert not failed, failed[0]
    assert len(traced) >= len(PARALLELISMS) and all("legal" in words for words in refused)
