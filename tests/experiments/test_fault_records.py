"""The table of faults in BUILD.md is what the fault tests last measured, of every fault."""

import json
import pathlib

import fault_records

BUILD = pathlib.Path(__file__).parents[2] / "BUILD.md"


def test_the_table_is_the_measured_one():
    rows = json.loads(fault_records.FILE.read_text())
    assert set(rows) <= set(fault_records.FAULTS)
    assert fault_records.table(rows) in BUILD.read_text(encoding="utf-8"), (
        f"python {fault_records.__file__} {fault_records.FILE} prints the table"
    )


def test_every_fault_has_a_row_and_every_row_ended_at_the_same_bits():
    rows = json.loads(fault_records.FILE.read_text())
    table = fault_records.table(rows)
    assert all(table.count(f"\n| {fault} |") == 1 for fault in fault_records.FAULTS)
    assert all(same for *_, same in rows.values())
