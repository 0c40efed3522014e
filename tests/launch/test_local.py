"""`launch/local.py` with small processes: it never hangs and leaves no process behind."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from marks import some
from places import ROOT

SCRIPT = ROOT / "launch" / "local.py"
PRELUDE = """
import os, pathlib, signal, subprocess, sys, time
me, folder = int(os.environ["JAX_PROCESS_ID"]), pathlib.Path(sys.argv[1])
child = subprocess.Popen(["sleep", "600"])
(folder / f"{me}.child").write_text(str(child.pid))
def ready():
    (folder / f"{me}.new").write_text(str(os.getpid()))
    (folder / f"{me}.new").rename(folder / f"{me}.pid")
def until(name):
    while not (folder / name).exists():
        time.sleep(0.02)
"""


class Launched:
    """The launcher with processes that run PRELUDE and then `text`."""

    def __init__(self, folder, text, *options, processes=3):
        self.folder, self.processes = folder, processes
        (folder / "program.py").write_text(PRELUDE + text)
        self.process = subprocess.Popen(
            [
                sys.executable,
                SCRIPT,
                f"--processes={processes}",
                "--kill=0.5",
                *options,
                folder / "program.py",
                folder,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_ready(self):
        """Waits until every process has called ready(); returns their process ids."""
        names = [self.folder / f"{n}.pid" for n in range(self.processes)]
        end = time.monotonic() + 600
        while not all(name.exists() for name in names):
            assert self.process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        return [int(name.read_text()) for name in names]

    def end(self):
        """Waits for the end; returns (status, stdout, stderr). Checks that no process is left."""
        out, err = self.process.communicate(timeout=600)
        self.assert_no_process_left()
        return self.process.returncode, out, err

    def assert_no_process_left(self):
        pids = [int(p.read_text()) for p in self.folder.glob("*.child")]
        pids += [int(p.read_text()) for p in self.folder.glob("*.pid")]
        end = time.monotonic() + 600
        while left := [pid for pid in pids if _runs(pid)]:
            assert time.monotonic() < end, left
            time.sleep(0.05)


def _runs(pid):
    try:
        os.kill(pid, 0)
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return pathlib.Path("/proc").is_dir() is False
    except ProcessLookupError:
        return False
    return state != "Z"


def test_every_line_has_its_process_number(tmp_path):
    text = """
print(f"{me} of {os.environ['JAX_NUM_PROCESSES']}", os.environ["JAX_COORDINATOR_ADDRESS"])
print("half a line", end="", file=sys.stderr)
for n in range(300): print("line", n, "x" * 500)
"""
    status, out, err = Launched(tmp_path, text).end()
    assert status == 0
    lines = out.splitlines()
    for number in range(3):
        output = [line[4:] for line in lines if line.startswith(f"[{number}] ")]
        assert re.fullmatch(rf"{number} of 3 127\.0\.0\.1:\d+", output[0])
        assert output[1:] == [f"line {n} {'x' * 500}" for n in range(300)]
    assert sorted(err.splitlines()) == [f"[{n}] half a line" for n in range(3)]


@pytest.mark.parametrize(
    "how, status, words",
    [
        ("sys.exit(7)", 7, "process 1 ended with status 7; ending the others"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "process 1 ended with SIGKILL; ending"),
    ],
)
def test_the_first_failure_ends_all_and_gives_its_status(tmp_path, how, status, words):
    text = f"""
signal.signal(signal.SIGTERM, lambda *a: None)
ready()
until("1.pid")
if me == 1: {how}
time.sleep(600)
"""
    actual, _, err = Launched(tmp_path, text, "--others=0.5").end()
    assert actual == status and words in err, err
    assert "timeout: terminating process 0, 2" in err


def test_other_processes_may_print_their_errors(tmp_path):
    text = """
ready()
until("0.pid")
if me == 0: sys.exit(3)
time.sleep(0.5)
print("error: process 0 ended")
sys.exit(2)
"""
    status, out, err = Launched(tmp_path, text).end()
    assert status == 3 and "[1] error: process 0 ended" in out and "[2] error:" in out
    assert "timeout" not in err


@pytest.mark.parametrize("sent", some([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_a_signal_is_forwarded_once_and_saving_is_awaited(tmp_path, sent):
    text = """
received = []
def note(number, frame):
    received.append(number)
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, note)
ready()
while not received: time.sleep(0.02)
time.sleep(0.5)
print("saved after", *map(int, received))
"""
    run = Launched(tmp_path, text)
    run.wait_ready()
    run.process.send_signal(sent)
    status, out, err = run.end()
    assert status == 0 and f"forwarding {sent.name}" in err
    assert sorted(out.splitlines()) == [f"[{n}] saved after {int(sent)}" for n in range(3)]


FLOOD = """
import threading
def flood():
    while True: os.write(2, b"x" * 1000 + b"\\n")
received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
threading.Thread(target=flood, daemon=True).start()
ready()
while not received: time.sleep(0.02)
print("saved", flush=True)
os._exit(75)
"""


@pytest.mark.parametrize("how", some(["a signal", "a failure"], "a signal"))
def test_a_reader_of_standard_error_that_stopped_delays_no_signal_and_no_end(tmp_path, how):
    run = Launched(tmp_path, FLOOD, processes=2)
    pids = run.wait_ready()
    time.sleep(0.5)  # The pipe, of which nothing is read, is full.
    if how == "a signal":
        run.process.send_signal(signal.SIGTERM)
    else:
        os.kill(pids[0], signal.SIGTERM)
        run.process.stdout.readline()
        os.kill(pids[1], signal.SIGTERM)
    assert run.process.wait(60) == 75
    out = run.process.stdout.read()
    assert out.count("saved") == (2 if how == "a signal" else 1)
    run.assert_no_process_left()
    run.process.stderr.close()
    run.process.stdout.close()


DEAF = """
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
ready()
time.sleep(600)
"""


def test_a_second_signal_kills(tmp_path):
    run = Launched(tmp_path, DEAF)
    run.wait_ready()
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGTERM)  # Counts as the same stop: some senders signal twice.
    assert "forwarding SIGINT" in run.process.stderr.readline()
    time.sleep(1.2)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    status, _, err = run.end()
    assert status == 130 and "killing all processes" in err


def test_a_process_that_hangs_or_is_stopped_is_killed_after_the_timeout(tmp_path):
    text = """
ready()
if me == 1: os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""
    run = Launched(tmp_path, text, "--stop=0.5")
    run.wait_ready()
    run.process.send_signal(signal.SIGTERM)
    status, _, err = run.end()
    assert status == 143 and "timeout: terminating process 1" in err


def test_a_process_that_runs_on_after_the_others_is_ended(tmp_path):
    text = "if me: time.sleep(600)"
    status, _, err = Launched(tmp_path, text, "--finish=0.5").end()
    assert status == 1 and "timeout: terminating process 1, 2" in err


def test_a_killed_launcher_leaves_no_process(tmp_path):
    run = Launched(tmp_path, "ready()\ntime.sleep(600)")
    run.wait_ready()
    run.process.kill()
    run.process.communicate(timeout=600)
    run.assert_no_process_left()


def test_illegal_commands_are_refused(tmp_path):
    for arguments, words in (
        (["no-such-program"], "error: "),
        ([], "give a command"),
        (["--processes=0", "true"], "--processes=1 or more"),
        (["--processes=2", "--gpus=2", "true"], "lists 3 GPUs; 2 processes with 2 each need 4"),
    ):
        done = subprocess.run(
            [sys.executable, SCRIPT, *arguments],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "4,5,6"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_gpus_are_assigned_in_order(tmp_path):
    text = """print(os.environ["CUDA_VISIBLE_DEVICES"])"""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    _, out, _ = Launched(tmp_path, text, "--gpus=2").end()
    assert sorted(out.split("\n")) == ["", "[0] 0,1", "[1] 2,3", "[2] 4,5"]
