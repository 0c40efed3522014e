"""A reader of standard error or output that stops blocks nobody."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from marks import some

from sparse_dataflow.files import errors, output, storage


def run(code, *, stopped="stderr", answer=True):
    """Starts a program under `command_line.run_main` with one stream that nobody reads; returns it
    once it has said on the other stream that it goes on."""
    read, write = os.pipe()
    streams = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, stopped: write}
    program = f"""
import os, sys, time
from sparse_dataflow.commands import command_line
def main():
    {code}
command_line.run_main(main, "doc", argv=["program"], options=None)
"""
    process = subprocess.Popen([sys.executable, "-c", program], **streams, text=True)
    os.close(write)
    if answer:
        assert process.stdout.readline() == "goes on\n"
    return process, read


LINES = "[print('a line of some length', i, file=sys.stderr, flush=True) for i in range(20_000)]"


@pytest.mark.parametrize(
    "code",
    some(
        [LINES, "print('x' * 10**6, file=sys.stderr, flush=True)", "sys.stderr.write('x' * 9**6)"],
        LINES,
    ),
)
def test_a_full_standard_error_stops_nothing(code):
    process, read = run(f"{code}; print('goes on', flush=True)")
    assert process.wait(60) == 0
    os.close(read)


@pytest.mark.parametrize("stopped", some(["stderr", "stdout"], "stderr"))
def test_sigterm_ends_a_process_whose_output_nobody_reads(stopped):
    wait = "print('goes on', flush=True); time.sleep(600)"
    code = f"print('x' * 10**6, file=sys.{stopped}, flush=True); {wait}"
    process, read = run(code, stopped=stopped, answer=stopped == "stderr")
    if stopped == "stdout":
        assert os.read(read, 100) == b"x" * 100  # It has begun, and will fill the pipe.
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    os.close(read)


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [None, signal.SIGTERM])
def test_a_run_trains_and_ends_though_nobody_reads_its_standard_error(signal_number, tmp_path):
    read, write = os.pipe()
    os.set_blocking(write, False)
    for size in (10_000, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write, b"x" * size)
    os.set_blocking(write, True)
    steps = 10**6 if signal_number else 2
    command = [sys.executable, "-m", "experiments.gpt13b_sparse", "--scale=pico", "--block=8"]
    out = tmp_path / "run"
    process = subprocess.Popen([*command, f"--steps={steps}", f"--out={out}"], stderr=write)
    if signal_number:
        metrics = out / "sparse" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.1)
        process.send_signal(signal_number)
    assert process.wait(300) == (75 if signal_number else 0)
    assert (out / ("sparse/checkpoints" if signal_number else "report.html")).exists()
    os.close(read)
    os.close(write)


def test_text_arrives_in_order_and_whole_while_somebody_reads():
    read, write = os.pipe()
    with os.fdopen(read) as reader, os.fdopen(write, "w") as stream:
        got = []
        thread = threading.Thread(target=lambda: got.extend(reader))
        thread.start()
        errors = output.BestEffort(stream)
        for number in range(500):
            print(f"line {number}", file=errors)
        errors.flush()
        stream.close()
        thread.join()
    assert got == [f"line {number}\n" for number in range(500)]


def test_what_a_stopped_reader_would_read_is_bounded():
    read, write = os.pipe()
    with os.fdopen(read, "rb"), os.fdopen(write, "w") as stream:
        errors = output.BestEffort(stream)
        for _ in range(5 * output._MOST_PENDING):
            errors.write("x" * 1000)
        assert errors._writer._queue.qsize() <= output._MOST_PENDING


def test_a_forked_process_writes_too():
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        errors = output.BestEffort(stream)
        print("parent", file=errors, flush=True)
        if not (child := os.fork()):
            print("child", file=errors, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    with os.fdopen(read) as reader:
        # The writer of an earlier test may still write its x's to a descriptor of this number.
        lines = [line.strip("x") for line in reader.read().splitlines()]
        assert [line for line in lines if line] == ["parent", "child"]


def test_without_threads_text_is_written_all_the_same(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        print("no more threads", file=output.BestEffort(stream), flush=True)
        with storage.told("waiting"):
            pass
    with os.fdopen(read) as reader:
        assert reader.read().strip("x\n") == "no more threads"


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "\x1b]0;x\x07", "tab\tand\x9bline\n", "\u202ex"])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_no_control_characters_of_a_model(monkeypatch, capsys, text, terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    output.print_text(text, end="")
    assert capsys.readouterr().out == (errors.printable(text) if terminal else text)


def test_what_python_and_libraries_write_to_the_errors_has_no_secrets(monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_PAT", "a-made-up-secret")
    with (tmp_path / "log").open("w") as file:
        stream = output.BestEffort(file)
        print("ValueError: https://me:p@ss@host/x a-made-up-secret", file=stream)
        stream.flush()
    assert (tmp_path / "log").read_text() == "ValueError: https://***@host/x ***\n"
