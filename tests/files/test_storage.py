"""Transient storage errors are retried; permanent ones are raised at once."""

import errno
import os
from concurrent import futures

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage_faults import failing as failing_operations

from sparse_dataflow.files import storage


def failing(*numbers):
    """Returns an operation that fails with each error number in turn, then returns "done"."""
    left = list(numbers)

    def operation():
        if left:
            number = left.pop(0)
            raise OSError(number, os.strerror(number))
        return "done"

    return operation, left


@pytest.mark.parametrize("name", ["EIO", "ESTALE", "ETIMEDOUT", "EAGAIN", "ECONNRESET"])
def test_transient_errors_are_retried_after_doubling_waits(name, caplog):
    slept = []
    operation, left = failing(*[getattr(errno, name)] * 3)
    assert storage.retry("reading x", operation, sleep=slept.append) == "done"
    assert not left and len(slept) == 3
    for wait, seconds in zip(storage.WAITS, slept):
        assert wait <= seconds <= 1.5 * wait
    assert f"reading x failed ({os.strerror(getattr(errno, name))}); attempt 2 of 6" in caplog.text


@pytest.mark.parametrize("name", ["ENOSPC", "ENOENT", "EACCES", "EDQUOT", "EFBIG", "EROFS"])
def test_permanent_errors_are_raised_at_once(name):
    operation, left = failing(getattr(errno, name), errno.EIO)
    with pytest.raises(OSError) as caught:
        storage.retry("reading x", operation, sleep=pytest.fail)
    assert caught.value.errno == getattr(errno, name) and len(left) == 1


def test_the_last_attempt_raises_its_error():
    operation, left = failing(*[errno.EIO] * 20)
    with pytest.raises(OSError, match="Input/output"):
        storage.retry("reading x", operation, sleep=lambda seconds: None)
    assert len(left) == 20 - 1 - len(storage.WAITS)


def test_the_error_number_is_read_from_causes_and_tensorstore_texts():
    try:
        try:
            raise OSError(errno.ESTALE, "stale")
        except OSError as error:
            raise RuntimeError("could not write") from error
    except RuntimeError as error:
        assert storage.error_number(error) == errno.ESTALE and storage.is_transient(error)
    assert storage.is_transient(ValueError("DATA_LOSS: ... [os_error_code='5' path='x']"))
    assert storage.is_transient(TimeoutError("timed out"))
    assert storage.is_transient(RuntimeError("pread() failed: Input/output error; reading x"))
    assert not storage.is_transient(RuntimeError("write() failed: No space left on device"))
    assert (
        not storage.is_transient(ValueError("bad value"))
        and storage.error_number(ValueError("x")) is None
    )


@given(st.integers(1, 4), st.sampled_from(sorted(storage.TRANSIENT)))
def test_nested_retries_do_not_multiply_attempts(depth, number):
    """At any depth, and whatever exception wraps the error on the way."""
    calls = []

    def operation():
        calls.append(number)
        raise OSError(number, os.strerror(number))

    for _ in range(depth):

        def operation(inner=operation):
            try:
                storage.retry("reading x", inner, sleep=lambda seconds: None)
            except OSError as error:
                raise RuntimeError("cannot be read") from error

    with pytest.raises(RuntimeError):
        storage.retry("reading x", operation, sleep=lambda seconds: None)
    assert len(calls) == 1 + len(storage.WAITS)


@given(
    first=st.integers(0, 2),
    times=st.integers(0, 8),
    number=st.sampled_from([*sorted(storage.TRANSIENT), errno.ENOSPC, errno.EACCES]),
)
def test_a_file_is_replaced_completely_or_not_at_all(tmp_path_factory, first, times, number):
    path = tmp_path_factory.mktemp("replaced") / "x.json"
    path.write_bytes(b"before")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "WAITS", (0.0,) * 5)
        with failing_operations(path.parent, first, times, number) as failed:
            try:
                storage.replace(path, b"after")
            except OSError as error:
                assert error.errno == number
                assert len(failed) == (6 if number in storage.TRANSIENT else 1)
                # Where the new name could not be flushed, the new file is there all the same.
                flushing = [str(path.parent)] in failed
                content = b"after" if flushing else b"before"
            else:
                assert len(failed) < 6
                content = b"after"
    assert path.read_bytes() == content and [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_several_writers_of_one_file_leave_one_of_their_files(tmp_path):
    path, contents = tmp_path / "x.json", [bytes([letter]) * 200_000 for letter in b"abc"]
    path.write_bytes(contents[0])

    def write(content):
        for _ in range(20):
            storage.replace(path, content)

    with futures.ThreadPoolExecutor() as pool:
        writers = [pool.submit(write, content) for content in contents]
        while not all(writer.done() for writer in writers):
            assert path.read_bytes() in contents
        for writer in writers:
            writer.result()
    assert path.read_bytes() in contents and os.listdir(tmp_path) == ["x.json"]
