"""Errors of storage that pass are waited for; those that do not are told at once."""

import errno
import os

import pytest

from sparse_dataflow import storage


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
    assert not storage.passes(ValueError("bad value")) and storage.code(ValueError("x")) is None
