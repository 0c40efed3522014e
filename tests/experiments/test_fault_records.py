"""The table of faults in docs/evidence/surviving.md has every fault, as last measured."""

import json

import drawn_inputs
import fault_records
import pytest
from fault_records import FAULTS, Record


def test_the_table_is_the_measured_one():
    rows = json.loads(fault_records.FILE.read_text())
    drawn = json.loads(drawn_inputs.FILE.read_text())
    assert set(rows) <= set(FAULTS) and set(drawn) <= set(drawn_inputs.KINDS)
    page = fault_records.PAGE.read_text(encoding="utf-8")
    assert fault_records.replaced(page, rows, drawn) == page, f"run python {fault_records.__file__}"


def test_every_fault_has_a_row_and_every_row_ended_at_the_same_bits():
    rows = json.loads(fault_records.FILE.read_text())
    table = fault_records.text(rows)
    assert all(table.count(f"\n| {fault} |") == 1 for fault in FAULTS)
    assert all(row[4] for row in rows.values())


def test_a_test_that_fails_loses_its_own_row_alone(tmp_path, monkeypatch):
    path = tmp_path / "faults.json"
    monkeypatch.setenv("FAULTS", str(path))
    Record(FAULTS[1]).note("2", 1.04, 3, None, True)
    Record(FAULTS[0]).note("75", None, 0, 2.0, True)
    before = json.loads(path.read_text())
    assert list(before) == [FAULTS[0], FAULTS[1]] and before[FAULTS[1]][:5] == ["2", 1, 3, None, 1]
    Record(FAULTS[0])
    assert json.loads(path.read_text()) == {FAULTS[1]: before[FAULTS[1]]}
    page = fault_records.PAGE.read_text(encoding="utf-8")
    drawn = json.loads(drawn_inputs.FILE.read_text())
    changed = fault_records.replaced(page, json.loads(path.read_text()), drawn)
    assert f"| {FAULTS[0]} | not measured yet |" in changed
    assert f"| {FAULTS[1]} | 2 | 1.0 | 3 | - | yes |" in changed
    rows = json.loads(fault_records.FILE.read_text())
    assert fault_records.replaced(changed, rows, drawn) == page


def test_nothing_is_kept_where_nobody_asks(tmp_path, monkeypatch):
    monkeypatch.delenv("FAULTS", raising=False)
    monkeypatch.chdir(tmp_path)
    Record(FAULTS[0]).note("75", None, 0, 2.0, True)
    assert not list(tmp_path.iterdir())
    with pytest.raises(AssertionError):
        Record("a fault of no name")
