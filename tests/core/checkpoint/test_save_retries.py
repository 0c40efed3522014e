"""Transient storage errors while checkpoints are written and read are retried."""

import errno
import os
import threading
from pathlib import Path

import pytest
from checkpoint_states import CONFIG, restored_step, saved, small_state

from sparse_dataflow.core.checkpoint import named_arrays
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.files import manifest, storage
from sparse_dataflow.files.errors import UserError


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.0,) * 5)


def failing(monkeypatch, holder, name, times, number=errno.EIO):
    """Makes a function fail `times` times with a storage error; returns the list of its calls."""
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
        (storage, "flush_folder"),
        (named_arrays, "start_writing"),
    ],
)
def test_a_save_survives_transient_errors(tmp_path, monkeypatch, caplog, holder, name):
    with monkeypatch.context() as patch:
        failing(patch, holder, name, 3)
        saved(tmp_path, [1])
    assert restored_step(tmp_path) == 1 and sorted(os.listdir(tmp_path)) == ["1"]
    assert "failed (Input/output error); attempt 2 of 6" in caplog.text


def test_reading_survives_transient_errors(tmp_path, monkeypatch):
    saved(tmp_path, [1, 2])
    calls = failing(monkeypatch, manifest, "verify", 2, errno.ESTALE)
    assert restored_step(tmp_path) == 2 and len(calls) >= 3
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def broken_arrays(monkeypatch, checkpoints, times):
    """Makes the background write of the arrays fail `times` times."""
    wait, remaining = checkpoints._orbax.wait_until_finished, [times]

    def sometimes():
        wait()
        if threading.current_thread().name == "finish-checkpoint" and remaining[0]:
            remaining[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoints._orbax, "wait_until_finished", sometimes)


def test_a_save_whose_arrays_failed_is_replaced_by_the_next(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, [1])
    broken_arrays(monkeypatch, checkpoints, 1)
    assert checkpoints.save(2, small_state(2), {"position": 2})
    checkpoints._worker.join()
    assert checkpoints.retry_due
    assert checkpoints.save(3, small_state(3), {"position": 3})  # Raises nothing.
    checkpoints.wait()
    assert not checkpoints.retry_due and restored_step(tmp_path) == 3
    assert sorted(os.listdir(tmp_path)) == ["1", "3"]


def test_the_last_retry_raises_the_error(tmp_path, monkeypatch):
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
