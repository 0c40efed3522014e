"""A run has an id, drawn once: a resumed or moved run keeps it, a copied or new one has another."""

import contextlib
import shutil

import pytest

from sparse_dataflow.commands import run_folder
from sparse_dataflow.data.tokenizer import byte_tokenizer
from sparse_dataflow.evaluation import run_files
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import preset

CONFIG = preset("pico")


def new_run(folder, **changes):
    """Begins a run in a folder; returns its record."""
    texts = dict.fromkeys(("experiment", "date", "machine", "corpus", "corpus_hash"), "x")
    steps = dict.fromkeys(CONFIG.variants, 9)
    fields = {"tokenizer": "x", "vocab_size": 300, "steps": steps, "versions": {}, **texts}
    record = RunRecord(command=("python",), **{**fields, "id": run_files.new_id(), **changes})
    folder.mkdir()
    run_folder.start(folder, CONFIG, record, byte_tokenizer(300))
    return record


def resumed(folder):
    """Returns the identity that a resumed run has."""
    saved = run_files.read_record(folder, run_files.read_config(folder))
    own = run_folder.own_record(folder, saved)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    run_folder.write_own(folder, own)
    assert (own == saved) or before[folder / run_files.RECORD] != run_files.to_bytes(own.to_json())
    return own.identity


def test_a_run_that_is_resumed_or_moved_keeps_its_id(tmp_path):
    record = new_run(tmp_path / "run")
    assert resumed(tmp_path / "run") == record.identity
    (tmp_path / "run").rename(tmp_path / "moved")
    assert resumed(tmp_path / "moved") == resumed(tmp_path / "moved") == record.identity


@pytest.mark.parametrize("changes", [{}, {"id": ""}])
def test_a_copy_has_an_id_of_its_own(tmp_path, changes):
    record = new_run(tmp_path / "run", **changes)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    new_id = resumed(tmp_path / "copy")
    assert new_id != record.identity and resumed(tmp_path / "copy") == new_id
    assert resumed(tmp_path / "run") == record.identity


def test_a_copy_writes_nothing_into_the_mirror_of_its_original(tmp_path):
    new_run(tmp_path / "run")
    mirror = str(tmp_path / "mirror")
    (tmp_path / "mirror").mkdir()
    run_folder.mirrored(tmp_path / "run", mirror)
    with run_folder.opened("x", str(tmp_path / "run"), True, mirror):
        pass
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(UserError, match=r"mirror holds a run already; .* another run\.mirror"):
        with run_folder.opened("x", str(tmp_path / "copy"), True, mirror):
            pass


def test_a_new_run_in_the_place_of_another_has_another_id(tmp_path):
    first = new_run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert new_run(tmp_path / "run").identity != first.identity


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    real = run_folder.datetime.datetime.now()

    class Standing:
        class datetime:
            now = staticmethod(lambda: real)

    monkeypatch.setattr(run_folder, "datetime", Standing)
    with contextlib.ExitStack() as stack:
        paths = [
            stack.enter_context(run_folder.opened("gpt13b_sparse", "", False))[0] for _ in range(3)
        ]
        assert len(set(paths)) == 3 and all(path.is_dir() for path in paths)
    assert not list(tmp_path.iterdir())  # Nothing was trained.
