"""Arrays in files are those that were written, also where storage fails for a moment."""

import errno
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.data.stored import StoredArray
from sparse_dataflow.files import storage
from sparse_dataflow.files.errors import UserError

PASSING = st.sampled_from(sorted(storage.TRANSIENT))


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.0,) * 5)


@pytest.fixture(scope="module")
def whole():
    return np.random.default_rng(0).integers(0, 2**16, 1000).astype("<u2")


@pytest.fixture(scope="module")
def path(whole, tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "array.npy"
    np.save(path, whole)
    return path


def refusing(monkeypatch, number, at):
    """os.pread that fails with the error at these of its calls, and reads short at all others."""
    read, calls = os.pread, []

    def pread(descriptor, size, place):
        calls.append(place)
        if len(calls) - 1 in at:
            raise OSError(number, os.strerror(number))
        return read(descriptor, max(1, size // 2), place)

    monkeypatch.setattr(os, "pread", pread)
    return calls


@given(first=st.integers(-1100, 1100), last=st.integers(-1100, 1100))
def test_a_slice_is_that_of_the_array(path, whole, first, last):
    stored = StoredArray.open(path)
    assert (len(stored), stored.dtype, stored.nbytes) == (1000, whole.dtype, whole.nbytes)
    np.testing.assert_array_equal(stored[first:last], whole[first:last])
    assert not stored[first:last].flags.writeable


@given(number=PASSING, at=st.sets(st.integers(0, 12), max_size=5), size=st.integers(1, 900))
def test_reading_outlasts_what_passes(path, whole, number, at, size):
    stored = StoredArray.open(path)
    with pytest.MonkeyPatch.context() as patch:
        refusing(patch, number, at)
        np.testing.assert_array_equal(stored[50 : 50 + size], whole[50 : 50 + size])
        np.testing.assert_array_equal(np.asarray(stored), whole)


def test_a_handle_that_went_stale_is_opened_anew(path, whole, monkeypatch):
    stored = StoredArray.open(path)
    assert stored[:3].tolist() == whole[:3].tolist()
    before = stored._held["file"]
    refusing(monkeypatch, errno.ESTALE, {0})
    assert stored[:3].tolist() == whole[:3].tolist() and stored._held["file"] is not before


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_what_stays_is_told_in_words(path, monkeypatch, number):
    stored = StoredArray.open(path)
    calls = refusing(monkeypatch, number, range(99))
    with pytest.raises(UserError, match="cannot be read"):
        stored[:3]
    assert len(calls) == (6 if number == errno.EIO else 1)


def test_a_file_that_became_shorter_is_told(whole, tmp_path):
    np.save(tmp_path / "x.npy", whole)
    stored = StoredArray.open(tmp_path / "x.npy")
    os.truncate(tmp_path / "x.npy", 300)
    with pytest.raises(UserError, match="became shorter"):
        stored[:]
    with pytest.raises(ValueError, match="shorter than it says"):
        StoredArray.open(tmp_path / "x.npy")


@pytest.mark.parametrize("array", [np.zeros((2, 3)), np.float32(1), np.array([None, {}])])
def test_other_arrays_are_refused(array, tmp_path):
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    with pytest.raises(ValueError):
        StoredArray.open(tmp_path / "x.npy")
