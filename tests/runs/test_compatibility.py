"""The table of what goes with what: each row refuses, and all else that it accepts can train."""

import importlib
import itertools

import pytest
from compatible_runs import BASE, accepted, merged
from eight_devices import on_eight_devices
from places import ROOT

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import compatibility as core
from sparse_dataflow.core.executors.compatibility import PARALLELISMS, ResolvedRun, violations
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs import compatibility, evolution_rows
from sparse_dataflow.runs.compatibility import TABLE

PAGE = ROOT / "docs/guide/devices.md"
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


def devices_table():
    """The table of the page: each option, and what lacks it for which reason."""
    lines = ["| option | does not work with |", "|---|---|"]
    tables = core.TABLE, evolution_rows.ROWS, compatibility.SETTINGS, compatibility.PARALLEL
    by_words = {}
    for row in itertools.chain(*tables):
        if any(other in PARALLELISMS for other in row.others):
            by_words.setdefault(row.option.words, []).append(row)
    for words, rows in by_words.items():
        lacking = [each.words for each in PARALLELISMS if any(each in r.others for r in rows)]
        reasons = dict.fromkeys(row.because for row in rows)
        option = words if "`" in words or " " in words else f"`{words}`"
        lines.append(f"| {option} | {', '.join(lacking)}, {'; '.join(reasons)} |")
    return "\n".join(lines) + "\n"


def test_few_options_lack_a_parallelism():
    assert len(devices_table().splitlines()) <= 2 + 6


def test_rows_that_read_absent_parts_do_not_apply():
    model = ModelConfig(2, 32, 2, 64, 64, 16, mask_documents=True, experts=4)
    assert not list(violations(ResolvedRun(model, TrainingConfig(1, 4, 16)), TABLE))


def test_the_pages_have_the_tables(monkeypatch):
    assert devices_table() in PAGE.read_text(encoding="utf-8")
    monkeypatch.syspath_prepend(PAGE.parents[1])
    settings = importlib.import_module("build_site").settings_table(TABLE)
    pairs = [(row, other) for row in TABLE for other in row.others if other not in PARALLELISMS]
    assert len(settings.splitlines()) >= len({row.option.words for row, _ in pairs}) + 2


@pytest.mark.slow
def test_what_the_table_accepts_can_be_traced():
    """Draws runs of several options and parallelisms, for some seconds."""
    traced, refused, failed = on_eight_devices("runs/compatible_runs.py", "0", "1")
    assert not failed, failed[0]
    assert len(traced) >= len(PARALLELISMS) and all("legal" in words for words in refused)
