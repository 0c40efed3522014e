"""Storage that fails for a moment while checkpoints are made and read: waited for, or made anew."""

import errno
import os
import threading
from pathlib import Path

import pytest
from checkpoint_states import CONFIG, restored_step, saved, small_state

from sparse_dataflow.checkpoint import named_arrays
from sparse_dataflow.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.files import manifest, storage
from sparse_dataflow.files.errors import UserError


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.0,) * 5)


def failing(monkeypatch, holder, name, times, number=errno.EIO):
    """Has a function fail so many times with an error of storage; gives how often it was called."""
    whole, calls = getattr(holder, name), []

    def sometimes(*arguments, **options):
        calls.append(name)
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return whole(*arguments, **options)

    monkeypatch.setattr(holder, name, sometimes)
    return calls


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (manifest, "write"),
        (Path, "rename"),
        (manifest, "flush_folder"),
        (named_arrays, "start_writing"),
    ],
)
def test_a_save_outlasts_errors_that_pass(tmp_path, monkeypatch, caplog, holder, name):
    with monkeypatch.context() as patch:
        failing(patch, holder, name, 3)
        saved(tmp_path, [1])
    assert restored_step(tmp_path) == 1 and sorted(os.listdir(tmp_path)) == ["1"]
    assert "failed (Input/output error); attempt 2 of 6" in caplog.text


def test_reading_outlasts_errors_that_pass(tmp_path, monkeypatch):
    saved(tmp_path, [1, 2])
    calls = failing(monkeypatch, manifest, "verify", 2, errno.ESTALE)
    assert restored_step(tmp_path) == 2 and len(calls) >= 3
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def broken_arrays(monkeypatch, checkpoints, times):
    """Has the writing of arrays fail in the background, which holds them no longer."""
    whole, left = checkpoints._orbax.wait_until_finished, [times]

    def sometimes():
        whole()
        if threading.current_thread().name == "finish-checkpoint" and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoints._orbax, "wait_until_finished", sometimes)


def test_arrays_that_were_not_written_give_way_to_the_next_save(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, [1])
    broken_arrays(monkeypatch, checkpoints, 1)
    assert checkpoints.save(2, small_state(2), {"position": 2})
    checkpoints._worker.join()
    assert checkpoints.again
    assert checkpoints.save(3, small_state(3), {"position": 3})  # Told to nobody: it is made good.
    checkpoints.wait()
    assert not checkpoints.again and restored_step(tmp_path) == 3
    assert sorted(os.listdir(tmp_path)) == ["1", "3"]


def test_the_last_save_tells_what_kept_it_from_being_written(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, [1])
    broken_arrays(monkeypatch, checkpoints, 99)
    for step in range(2, 2 + len(storage.WAITS)):
        assert checkpoints.save(step, small_state(step), {})
        checkpoints._worker.join()
    with pytest.raises(UserError, match=r"step 6 .*\(Input/output error\); the last .* is step 1"):
        checkpoints.wait()
    assert checkpoints.save(8, small_state(8), {})
    with pytest.raises(UserError, match=r"step 8 "):
        checkpoints.wait()
    assert os.listdir(tmp_path) == ["1"]
    assert Checkpoints(tmp_path, config=CONFIG).steps() == [1]
