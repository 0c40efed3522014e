"""Programs as forks of one process that has imported what they need: seconds less for each.

As a program, the process that forks: it imports the modules that its arguments name; each line of
its input, a JSON object as `Forks.start` writes it, then starts a fork and is answered by its
number.  What a fork prints goes to `log` + ".out" and ".err", and once it has ended its status, as
`subprocess.Popen.returncode` has it, to ".status".

A fork is a process like any other: it has its own jax, whose runtime starts after the fork, and
signals and kills reach it alone.  What it does not do is to start Python and to end it; a few tests
run real processes for that.
"""

import contextlib
import gc
import importlib
import json
import os
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
        self.pid = pid
        self._out, self._err, self._status = (_with(log, end) for end in ("out", "err", "status"))

    @property
    def stdout(self):
        """What it has printed so far."""
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    @property
    def stderr(self):
        """What it has said so far."""
        return self._err.read_text(errors="replace") if self._err.exists() else ""

    @property
    def text(self):
        """Both."""
        return self.stdout + self.stderr

    @property
    def returncode(self):
        """Its status; None while it runs."""
        return int(self._status.read_text()) if self._status.exists() else None

    def signal(self, number):
        """Sends it a signal, if it still runs."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, seconds=GUARD):
        """Its status, once it has ended; it is killed if it never does."""
        end = time.monotonic() + seconds
        while self.returncode is None:
            if time.monotonic() > end:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"it hangs: {self.text}")
            time.sleep(0.02)
        return self.returncode


class Forks:
    """The process that forks: it begins with the first fork that is asked for, and `close` ends it
    and all that still runs."""

    def __init__(self, environment, folder, modules):
        self._environment, self._folder, self._modules = environment, Path(folder), modules
        self._process, self._count = None, 0

    def close(self):
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(GUARD)

    def start(self, program, *arguments, environment=None, cwd=None, log=None):
        """A run of `python PROGRAM ARGUMENTS`.

        Args:
          environment: variables that it alone has; of no use to what reads them when imported.
          cwd: the folder that it runs in; one of the tests if None.
          log: what files of its output are called; one of its own in that folder if None.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *self._modules],
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self._count += 1
        log = Path(log or self._folder / str(self._count))
        asked = {
            "argv": [str(program), *map(str, arguments)],
            "environment": environment or {},
            "cwd": str(cwd or self._folder),
            "log": str(log),
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Fork(int(self._process.stdout.readline()), log)


def _with(log, end):
    return log.with_name(f"{log.name}.{end}")


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
        for number, end in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{asked['log']}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.chdir(asked["cwd"])
        os.environ.update(asked["environment"])
        sys.argv = asked["argv"]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
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


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        importlib.import_module(wanted)
    # What is not there when a fork begins is not copied into it either.
    gc.collect()
    gc.freeze()
    serve()
