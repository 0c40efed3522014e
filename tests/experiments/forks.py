"""Runs of the main job as forks of one process that has imported it: seconds less a run.

As a program, the process that forks: each line of its input, {"argv", "events", "calls", "log"},
starts one run and is answered by its number.  What a run prints goes to `log`, and once it has
ended its status, as `subprocess.Popen.returncode` has it, to `log` + ".status".
"""

import contextlib
import importlib
import json
import os
import resource
import runpy
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GUARD = 600
"""Seconds after which something hangs, on a machine that is busy with other things."""


class Fork:
    """One run."""

    def __init__(self, pid, log):
        self.pid, self.log = pid, log
        self._status = log.with_name(f"{log.name}.status")

    @property
    def text(self):
        """What it has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def returncode(self):
        """Its status; None while it runs."""
        return int(self._status.read_text()) if self._status.exists() else None

    def signal(self, number):
        """Sends it a signal, if it still runs."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait_for(self, words, others=()):
        """Returns once it has printed `words`; fails if it ends before, or never does."""
        end = time.monotonic() + GUARD
        while words not in self.text:
            assert self.returncode is None and time.monotonic() < end, self.text
            time.sleep(0.05)

    def wait(self):
        """Its status, once it has ended."""
        end = time.monotonic() + GUARD
        while self.returncode is None:
            assert time.monotonic() < end, f"it hangs: {self.text}"
            time.sleep(0.02)
        return self.returncode


class Forks:
    """The process that forks; ended with its `with` block, and with it all that still runs."""

    def __init__(self, environment, folder):
        self._folder, self._count = Path(folder), 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait(GUARD)

    def start(self, *arguments, experiment="gpt13b_sparse", events=(), calls=(), environment=None):
        """A run of `python -m experiments.EXPERIMENT ARGUMENTS`.

        `events` as in `eventful_run`; `calls` are ("module.function", n, what happens at its
        n-th call): a signal, or "full" as there.
        """
        self._count += 1
        log = self._folder / f"{self._count}.log"
        asked = {
            "argv": [experiment, *map(str, arguments)],
            "events": list(events),
            "calls": list(calls),
            "environment": environment or {},
            "log": str(log),
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Fork(int(self._process.stdout.readline()), log)


def serve():
    """Forks what is asked for until its input ends."""
    running, rest = {}, b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            log = running.pop(pid)
            new = Path(f"{log}.status.new")
            new.write_text(str(os.waitstatus_to_exitcode(status)))
            new.rename(f"{log}.status")
        if not ready:
            continue
        piece = os.read(0, 65536)
        if not piece:
            break
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            asked = json.loads(line)
            if (pid := os.fork()) == 0:
                _become(asked)
            running[pid] = asked["log"]
            os.write(1, f"{pid}\n".encode())
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _become(asked):
    status = 70
    try:
        out = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(asked["environment"])
        for name, count, what in asked["calls"]:
            _at_call(name, count, what)
        program = str(Path(__file__).with_name("eventful_run.py"))
        sys.argv = [program, json.dumps(asked["events"]), *asked["argv"]]
        runpy.run_path(program, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _at_call(name, count, what):
    module, _, function = name.rpartition(".")
    module = importlib.import_module(module)
    whole, left = getattr(module, function), [count]

    def counted(*arguments, **options):
        left[0] -= 1
        if left[0] == 0 and what == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        elif left[0] == 0:
            os.kill(os.getpid(), getattr(signal, what))
        return whole(*arguments, **options)

    setattr(module, function, counted)


if __name__ == "__main__":
    for wanted in (
        "array_record.python.array_record_data_source", "grain", "matplotlib.figure",
        "scipy.optimize", "sparse_dataflow.data.builders", "tensorboardX", "tokenizers",
    ):  # fmt: skip
        importlib.import_module(wanted)
    importlib.import_module("experiments.gpt_run")
    importlib.import_module("experiments.run_report")
    serve()
