"""A second place for checkpoints: what is lost or damaged in the first comes back from it."""

import os
import shutil

import pytest
from checkpoint_states import (
    CONFIG,
    abstract,
    restored_step,
    saved,
    small_state,
)
from marks import some
from storage_faults import failing

from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.files import manifest, storage
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.mirror import FolderCopies, copied_to


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.0,) * 5)


@pytest.fixture
def places(tmp_path):
    return tmp_path / "first" / "checkpoints", tmp_path / "second" / "checkpoints"


def test_the_newest_and_the_best_are_mirrored_bit_by_bit(places):
    first, second = places
    checkpoints = Checkpoints(first, 2, config=CONFIG, mirror=copied_to(second))
    for step, metric in ((1, 5.0), (2, 0.5), (3, 4.0), (4, 3.0), (5, 2.0)):
        checkpoints.save(step, small_state(step), {"position": step}, metric)
        checkpoints.wait()
    assert sorted(os.listdir(second)) == sorted(os.listdir(first)) == ["2", "4", "5"]
    for name in os.listdir(second):
        assert manifest.verify(second / name) == manifest.verify(first / name)
    assert restored_step(second) == 5


def test_training_does_not_wait_for_a_slow_mirror(places, monkeypatch):
    first, second = places
    copying, may_end = [], []
    whole = FolderCopies.put

    def slow(copies, step, source):
        copying.append(step)
        while not may_end:
            pass
        whole(copies, step, source)

    monkeypatch.setattr(FolderCopies, "put", slow)
    checkpoints = Checkpoints(first, config=CONFIG, mirror=copied_to(second))
    for step in (1, 2, 3):
        assert checkpoints.save(step, small_state(step), {"position": step})
        assert checkpoints.finish_save() is None
    assert sorted(os.listdir(first)) == ["1", "2", "3"] and not os.listdir(second)
    may_end.append(True)
    checkpoints.wait()
    assert copying == [1, 3] and sorted(os.listdir(second)) == ["1", "3"]


def test_a_missing_or_damaged_checkpoint_is_restored_from_the_mirror(places, caplog):
    first, second = places
    saved(first, [1, 2], mirror=copied_to(second))
    (first.parent / "metrics.jsonl").write_text("rows")
    saved(first, [3], mirror=copied_to(second))
    (first / "3" / "extra.json").write_text("{}")
    assert restored_step(first, mirror=copied_to(second)) == 3
    assert (first / "3.damaged").exists() and "Restoring the checkpoint of step 3" in caplog.text
    shutil.rmtree(first.parent)
    assert restored_step(first, mirror=copied_to(second)) == 3
    assert (first.parent / "metrics.jsonl").read_text() == "rows"
    assert restored_step(first) == 3


@pytest.mark.parametrize(
    ("mirrored", "local", "restored"), [(9, 2, 9), (9, 12, 12), (9, 9, 9), (3, None, 3)]
)
def test_the_metrics_that_reach_further_are_kept(places, mirrored, local, restored):
    first, second = places
    rows = lambda last: "".join(f'{{"kind": "train", "step": {n}}}\n' for n in range(last + 1))  # noqa: E731
    saved(first, [1], mirror=copied_to(second))
    first.parent.joinpath("metrics.jsonl").write_text(rows(mirrored))
    saved(first, [3], mirror=copied_to(second))
    shutil.rmtree(first.parent)
    first.parent.mkdir()
    if local is not None:
        first.parent.joinpath("metrics.jsonl").write_text(rows(local) + '{"kind": "tr')
    assert restored_step(first, mirror=copied_to(second)) == 3
    text = first.parent.joinpath("metrics.jsonl").read_text().removesuffix('{"kind": "tr')
    assert text == rows(restored)


def test_a_damaged_copy_is_set_aside_and_the_one_before_is_used(places):
    first, second = places
    for step in (1, 2):
        saved(first, [step], mirror=copied_to(second))
    for place in places:
        (place / "2" / "extra.json").write_text("{}")
    assert restored_step(first, mirror=copied_to(second)) == 1
    assert (second / "2.damaged").exists()


def test_a_mirror_that_fails_ends_nothing_and_catches_up(places, caplog):
    first, second = places
    checkpoints = saved(first, [1], mirror=copied_to(second))
    with failing(second, 0, 10**9, 5):
        checkpoints.save(2, small_state(2), {"position": 2})
        checkpoints.wait()
    assert "step 2 could not be copied" in caplog.text and restored_step(first) == 2
    checkpoints.save(3, small_state(3), {"position": 3})
    checkpoints.wait()
    assert sorted(os.listdir(second)) == ["1", "3"]


def test_a_mirror_that_cannot_be_written_is_refused_at_once(places):
    first, second = places
    second.parent.write_text("a file")
    with pytest.raises(UserError, match=r"cannot be written to .*second"):
        Checkpoints(first, config=CONFIG, mirror=copied_to(second))


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("bad", "value"), some([({3}, NAN), ({2, 3}, INFINITY), ({1, 2, 3}, NAN)], {2, 3}, {1, 2, 3})
)
def test_a_checkpoint_that_is_not_finite_is_passed_over_by_every_reader(
    tmp_path, bad, value, read_only, caplog
):
    """Its bytes are whole; the one before is restored, by a writer also from the mirror."""
    first, second = tmp_path / "first", tmp_path / "second"
    checkpoints = Checkpoints(first, config=CONFIG, mirror=copied_to(second))
    for step in (1, 2, 3):
        state = small_state(step)
        name = ("half", "w")[step % 2]
        state[name] = state[name].at[5].set(value if step in bad else 1.0)
        checkpoints.save(step, state, {})
        checkpoints.wait()
    if read_only:
        checkpoints = Checkpoints(first, config=CONFIG, read_only=True)
    else:
        shutil.rmtree(first / "2")
        checkpoints = Checkpoints(first, config=CONFIG, mirror=copied_to(second))
    names = sorted(os.listdir(first))
    good = max({1, 2, 3} - bad, default=None)
    if good is None:
        with pytest.raises(UserError, match=r"All checkpoints in .* are damaged"):
            checkpoints.restore(abstract(state))
    else:
        restored, _ = checkpoints.restore(abstract(state))
        assert int(restored["step"]) == good
    assert f"{max(bad)} cannot be used: it is not finite" in caplog.text
    with pytest.raises(UserError, match=r"damaged|has no checkpoint"):
        checkpoints.restore(abstract(state), max(bad))
    if read_only:
        assert sorted(os.listdir(first)) == names
        return
    for folder in (first, second):
        assert not {str(step) for step in bad} & {path.name for path in folder.iterdir()}
        assert (folder / f"{max(bad)}.damaged").exists()
