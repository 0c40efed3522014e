"""The storm draws every setting, prints what it drew, shrinks it, and finds nothing here."""

import json
import random
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from sparse_dataflow.data import cache, hub
from storm import checking, drawing, relations
from storm.case import Case
from storm.places import MODELS
from storm.records import Records, command
from storm.scene import TABLE
from storm.shrinking import shrunk

LIGHT = (
    "settings_survive_file_flags_and_call",
    "warm_cache_is_cold_cache",
    "formats_have_the_same_ids",
    "held_out_text_is_not_trained",
    "texts_are_encoded_alike",
    "batches_do_not_depend_on_their_history",
    "streamed_documents_are_stored_documents",
)
"""Relations that train no model."""


@pytest.fixture
def places(monkeypatch, tmp_path):
    """(folder of what cases share, a folder for a case); caches are there too."""
    monkeypatch.setattr(cache, "FOLDER", cache.FOLDER)
    monkeypatch.setattr(hub, "hub_files", hub.hub_files)
    return tmp_path / "shared", tmp_path / "case"


def test_a_legal_value_of_every_setting_is_drawn(tmp_path):
    """A new text without choices needs its examples in `drawing.TEXTS`."""
    for path, setting in TABLE.items():
        draw = random.Random(path)
        for _ in range(5 * (path not in drawing.NOT_DRAWN)):
            text = drawing.value(draw, setting)
            assert text is not None, path
            setting.parse(text.replace("@", f"{tmp_path}/"))


def test_what_is_not_drawn_is_a_setting():
    assert {*drawing.NOT_DRAWN, *drawing.TEXTS, *drawing.SMALL} <= {*TABLE}


def test_a_draw_follows_from_its_seed_and_number(places):
    cases = [checking.drawn("0", number, *places)[0] for number in range(12)]
    assert cases == [checking.drawn("0", number, *places)[0] for number in range(12)]
    assert len(set(cases)) > 10


def test_a_case_comes_back_from_its_command():
    case = Case.of({"data.column": "größe", "data.corpus": "@jsonl:0.7,@folder_2:0.3"})
    words = command("relation", case)
    assert Case.parsed(words.partition("--only=relation ")[2].removesuffix('"')) == case


def test_shrinking_leaves_what_fails():
    case = Case.of({f"path.{number}": "1" for number in range(9)})
    needed = {"path.2", "path.7"}
    small, tried = shrunk(case, lambda case: needed <= {*case.values})
    assert {*small.values} == needed and tried <= 24


def test_records_go_on_and_say_what_was_never_drawn(tmp_path):
    records = Records(tmp_path)
    row = {"number": 0, "case": "training.batch=8", "results": {"a": "holds"}, "wrong": [],
           "seconds": 1.0}  # fmt: skip
    records.add_draw(row)
    again = Records(tmp_path)
    assert again.next_number == 1
    never = again.summary().partition("never drawn yet: ")[2].splitlines()[0].split(", ")
    assert "training.batch" not in never and "training.steps" in never


@pytest.mark.parametrize("number", range(3))
def test_drawn_cases_have_no_fault(number, places):
    case, _ = checking.drawn("make test", number, *places)
    outcome = checking.checked(case, *places, LIGHT)
    assert not outcome.wrong, (str(case), outcome.words)
    assert set(outcome.results) == {*LIGHT} <= {*relations.load()}


REPAIRED = json.loads(Path(__file__).with_name("repaired.json").read_text(encoding="utf-8"))
"""{"relation", "case"} of faults that the storm found, and that are repaired."""


@pytest.mark.slow
@pytest.mark.parametrize("row", REPAIRED, ids=lambda row: f"{row['relation']} {row['case']}")
def test_repaired_faults_stay_repaired(row, places):
    if set(MODELS) & set(re.findall(r"@(\w+)", row["case"])):
        checking.prepare(places[0], places[1].with_name("prepare"))
    outcome = checking.checked(Case.parsed(row["case"]), *places, [row["relation"]])
    assert not outcome.wrong, outcome.words
