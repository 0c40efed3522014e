"""Arrays in files read back as written, despite transient storage errors."""

import errno
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.data.cache import StoredArray
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError

PASSING = st.sampled_from(sorted(storage.TRANSIENT))


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.0,) * 5)


@pytest.fixture(scope="module")
def array():
    return np.random.default_rng(0).integers(0, 2**16, 1000).astype("<u2")


@pytest.fixture(scope="module")
def path(array, tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "array.npy"
    np.save(path, array)
    return path


def failing_reads(monkeypatch, number, at):
    """Makes the os.pread calls of the indices `at` fail, and all others return half."""
    read, calls = os.pread, []

    def pread(descriptor, size, position):
        calls.append(position)
        if len(calls) - 1 in at:
            raise OSError(number, os.strerror(number))
        return read(descriptor, max(1, size // 2), position)

    monkeypatch.setattr(os, "pread", pread)
    return calls


@given(first=st.integers(-1100, 1100), last=st.integers(-1100, 1100))
def test_slices_match_numpy(path, array, first, last):
    stored = StoredArray.open(path)
    assert (len(stored), stored.dtype, stored.nbytes) == (1000, array.dtype, array.nbytes)
    np.testing.assert_array_equal(stored[first:last], array[first:last])
    assert not stored[first:last].flags.writeable


@given(number=PASSING, at=st.sets(st.integers(0, 12), max_size=5), size=st.integers(1, 900))
def test_transient_errors_are_retried(path, array, number, at, size):
    stored = StoredArray.open(path)
    with pytest.MonkeyPatch.context() as patch:
        failing_reads(patch, number, at)
        np.testing.assert_array_equal(stored[50 : 50 + size], array[50 : 50 + size])
        np.testing.assert_array_equal(np.asarray(stored), array)


def test_a_stale_handle_is_reopened(path, array, monkeypatch):
    stored = StoredArray.open(path)
    assert stored[:3].tolist() == array[:3].tolist()
    opened, real_open = [], os.open
    monkeypatch.setattr(os, "open", lambda *args: opened.append(args) or real_open(*args))
    failing_reads(monkeypatch, errno.ESTALE, {0})
    assert stored[:3].tolist() == array[:3].tolist() and len(opened) == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_permanent_errors_raise_user_error(path, monkeypatch, number):
    stored = StoredArray.open(path)
    calls = failing_reads(monkeypatch, number, range(99))
    with pytest.raises(UserError, match="cannot be read"):
        stored[:3]
    assert len(calls) == (6 if number == errno.EIO else 1)


def test_a_truncated_file_raises(array, tmp_path):
    np.save(tmp_path / "x.npy", array)
    stored = StoredArray.open(tmp_path / "x.npy")
    os.truncate(tmp_path / "x.npy", 300)
    with pytest.raises(UserError, match="was truncated"):
        stored[:]
    with pytest.raises(ValueError, match="is truncated"):
        StoredArray.open(tmp_path / "x.npy")


@pytest.mark.parametrize("array", [np.zeros((2, 3)), np.float32(1), np.array([None, {}])])
def test_unsupported_arrays_raise(array, tmp_path):
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    with pytest.raises(ValueError):
        StoredArray.open(tmp_path / "x.npy")
