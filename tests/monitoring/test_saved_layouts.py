"""The layouts of a run are read from its checkpoints while it trains."""

import dataclasses
import shutil

import numpy as np
import pytest
from evolving import EVOLUTIONS, MODELS, TRAINING, train, trainer

from sparse_dataflow.core.layouts.evolution import new_shares
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.monitoring.metrics import read_metrics
from sparse_dataflow.monitoring.saved_layouts import LayoutReader


def reader(folder, method, **changes):
    evolution = dataclasses.replace(EVOLUTIONS[method], **changes)
    return LayoutReader(folder, Variant("sparse", MODELS[method], TRAINING, evolution))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of `set` with checkpoints after steps 4 and 8 of 10, and its layouts at each step."""
    folder = tmp_path_factory.mktemp("set")
    t, layouts = trainer(folder, "set", checkpoint_every=4), {}
    while t.step < 9:
        t.advance()
        layouts[t.step] = stacks.layouts_of(t.model, t.state.rest)
    t.close()
    return folder, layouts


@pytest.mark.slow
def test_layouts_are_those_of_the_newest_checkpoint_and_of_the_start(trained):
    folder, layouts = trained
    saved = reader(folder, "set").read()
    assert (saved.step, saved.first_step) == (8, 0)
    assert saved.layouts == layouts[8] != layouts[4]
    assert saved.first_layouts == layouts[1]


def test_an_update_records_the_share_of_new_blocks(trained):
    folder, layouts = trained
    updates = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "evolution"]
    assert len(updates) == 3
    for row in updates:
        before, after = layouts[row["step"] - 1], layouts[row["step"]]
        for name in before:
            expected = np.mean([(b.mask & ~a.mask).sum() / b.nnz
                                for a, b in zip(before[name], after[name])])  # fmt: skip
            assert row[f"changed/{name}"] == pytest.approx(expected)
        new = {name: [(b.mask & ~a.mask).sum() for a, b in zip(before[name], after[name])]
               for name in before}  # fmt: skip
        stored = sum(layout.nnz for layers in after.values() for layout in layers)
        assert row["exchanged"] == pytest.approx(sum(map(sum, new.values())) / stored)
        assert row["changed/qkv"] > 0
        # In one order, whichever the state has, so that a resumed run writes the same row.
        names = [name for name in row if name.startswith("changed/")]
        assert names == sorted(names)


def test_new_checkpoints_are_read_and_each_once(trained, tmp_path):
    folder, layouts = trained
    follower = reader(tmp_path, "set")
    assert follower.read().step == 0
    for step in (4, 8):
        shutil.copytree(folder / "checkpoints" / str(step), tmp_path / "checkpoints" / str(step))
        assert follower.read().layouts == layouts[step]
    (tmp_path / "checkpoints" / "8" / "extra.json").write_text("{")
    assert follower.read().layouts == layouts[8]


@pytest.mark.parametrize("damaged", ["extra.json", "state"])
def test_a_damaged_checkpoint_is_refused(trained, tmp_path, damaged):
    path = tmp_path / "checkpoints" / "8"
    shutil.copytree(trained[0] / "checkpoints" / "8", path)
    if damaged == "state":
        shutil.rmtree(path / "state")
    else:
        (path / damaged).write_text('{"extra": {"starts": "x"}}')
    with pytest.raises(UserError):
        reader(tmp_path, "set").read()


def test_imported_layouts_are_known_from_the_first_checkpoint(trained, tmp_path):
    folder, layouts = trained
    assert reader(tmp_path, "set", given_layouts=True).read() is None
    saved = reader(folder, "set", given_layouts=True).read()
    assert (saved.first_step, saved.step) == (4, 8)
    assert saved.first_layouts == layouts[4] and saved.layouts == layouts[8]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sparse_to_dense", "gradual"])
def test_the_model_of_the_phase_is_read(tmp_path, method):
    t = train(trainer(tmp_path, method, checkpoint_every=4), until=8)
    saved = reader(tmp_path, method).read()
    assert saved.layouts == stacks.layouts_of(t.model, t.state.rest)
    if method == "sparse_to_dense":
        assert not saved.layouts and set(saved.first_layouts) == set(MODELS[method].projections)
    else:
        assert saved.layouts and not saved.first_layouts
    assert new_shares(saved.first_layouts, saved.layouts) == {}
