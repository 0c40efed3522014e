"""Errors of storage that pass are waited for; those that do not are told at once."""

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage_faults import failing as failing_operations

from sparse_dataflow.files import storage


def failing(*numbers):
    """An operation that fails with these error numbers, one after the other, then gives "done"."""
    left = list(numbers)

    def operation():
        if left:
            number = left.pop(0)
            raise OSError(number, os.strerror(number))
        return "done"

    return operation, left


@pytest.mark.parametrize("name", ["EIO", "ESTALE", "ETIMEDOUT", "EAGAIN", "ECONNRESET"])
def test_what_passes_is_tried_again_after_waits_that_double(name, caplog):
    slept = []
    operation, left = failing(*[getattr(errno, name)] * 3)
    assert storage.retried("reading x", operation, sleep=slept.append) == "done"
    assert not left and len(slept) == 3
    for wait, seconds in zip(storage.WAITS, slept):
        assert wait <= seconds <= 1.5 * wait
    assert f"reading x failed ({os.strerror(getattr(errno, name))}); attempt 2 of 6" in caplog.text


@pytest.mark.parametrize("name", ["ENOSPC", "ENOENT", "EACCES", "EDQUOT", "EFBIG", "EROFS"])
def test_what_does_not_pass_is_told_at_once(name):
    operation, left = failing(getattr(errno, name), errno.EIO)
    with pytest.raises(OSError) as told:
        storage.retried("reading x", operation, sleep=pytest.fail)
    assert told.value.errno == getattr(errno, name) and len(left) == 1


def test_after_the_last_attempt_the_error_is_told():
    operation, left = failing(*[errno.EIO] * 20)
    with pytest.raises(OSError, match="Input/output"):
        storage.retried("reading x", operation, sleep=lambda seconds: None)
    assert len(left) == 20 - 1 - len(storage.WAITS)


def test_the_number_is_found_in_causes_and_in_tensorstores_text():
    try:
        try:
            raise OSError(errno.ESTALE, "stale")
        except OSError as error:
            raise RuntimeError("could not write") from error
    except RuntimeError as error:
        assert storage.code(error) == errno.ESTALE and storage.passes(error)
    assert storage.passes(ValueError("DATA_LOSS: ... [os_error_code='5' path='x']"))
    assert storage.passes(TimeoutError("timed out"))
    assert storage.passes(RuntimeError("pread() failed: Input/output error; reading x"))
    assert not storage.passes(RuntimeError("write() failed: No space left on device"))
    assert not storage.passes(ValueError("bad value")) and storage.code(ValueError("x")) is None


@given(st.integers(1, 4), st.sampled_from(sorted(storage.PASSING)))
def test_an_operation_in_an_operation_is_attempted_as_often_as_one(depth, number):
    """However deep, and whatever its error is raised as on the way."""
    calls = []

    def operation():
        calls.append(number)
        raise OSError(number, os.strerror(number))

    for _ in range(depth):

        def operation(inner=operation):
            try:
                storage.retried("reading x", inner, sleep=lambda seconds: None)
            except OSError as error:
                raise RuntimeError("cannot be read") from error

    with pytest.raises(RuntimeError):
        storage.retried("reading x", operation, sleep=lambda seconds: None)
    assert len(calls) == 1 + len(storage.WAITS)


@given(
    first=st.integers(0, 2),
    times=st.integers(0, 8),
    number=st.sampled_from([*sorted(storage.PASSING), errno.ENOSPC, errno.EACCES]),
)
def test_a_file_is_replaced_whole_or_stays(tmp_path_factory, first, times, number):
    path = tmp_path_factory.mktemp("replaced") / "x.json"
    path.write_bytes(b"before")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "WAITS", (0.0,) * 5)
        with failing_operations(path.parent, first, times, number) as failed:
            try:
                storage.replace(path, b"after")
            except OSError as error:
                assert error.errno == number
                assert len(failed) == (6 if number in storage.PASSING else 1)
                kept = b"before"
            else:
                assert len(failed) < 6
                kept = b"after"
    assert path.read_bytes() == kept and [p.name for p in path.parent.iterdir()] == ["x.json"]
