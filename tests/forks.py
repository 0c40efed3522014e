"""Runs programs as forks of a server process that has imported their modules.

A fork saves the seconds of these imports. It is a full process: its jax runtime starts after the
fork, and signals reach it alone. Only the start and the end of Python are not tested this way; a
few tests start real processes for that.

As a program, this file is the server. It imports the modules in its arguments. Each line of its
stdin is a JSON request of `Forks.start`; the server answers with the process id of the new fork.
The fork's output goes to LOG.out and LOG.err, and its status (as in `subprocess.Popen.returncode`)
to LOG.status when it has ended.
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

TIMEOUT_SECONDS = 600
"""A process that takes longer hangs, even on a busy machine."""


class Fork:
    """A program that runs in a fork."""

    def __init__(self, pid, log):
        self.pid = pid
        self._out, self._err, self._status = (
            _with_suffix(log, suffix) for suffix in ("out", "err", "status")
        )

    @property
    def stdout(self):
        """Standard output so far."""
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    @property
    def stderr(self):
        """Standard error so far."""
        return self._err.read_text(errors="replace") if self._err.exists() else ""

    @property
    def text(self):
        """Standard output and standard error so far."""
        return self.stdout + self.stderr

    @property
    def returncode(self):
        """Exit status, negative for a signal; None while the fork runs."""
        return int(self._status.read_text()) if self._status.exists() else None

    def signal(self, number):
        """Sends a signal if the fork still runs."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, seconds=TIMEOUT_SECONDS):
        """Waits for the end and returns the status; kills the fork after a timeout."""
        end = time.monotonic() + seconds
        while self.returncode is None:
            if time.monotonic() > end:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"the process hangs: {self.text}")
            time.sleep(0.02)
        return self.returncode


class Forks:
    """The server process: `start` starts it when first called, `close` ends it and all forks."""

    def __init__(self, environment, folder, modules):
        self._environment, self._folder, self._modules = environment, Path(folder), modules
        self._process, self._count = None, 0

    def close(self):
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(TIMEOUT_SECONDS)

    def start(self, program, *arguments, environment=None, cwd=None, log=None):
        """Runs `python PROGRAM ARGUMENTS` in a fork.

        Args:
          program: path of a Python file.
          *arguments: command-line arguments.
          environment: additional variables; modules that the server imported do not see them.
          cwd: working folder; the folder of the server if None.
          log: path of the output files without suffix; a new one in that folder if None.

        Returns:
          The `Fork`.
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
        request = {
            "argv": [str(program), *map(str, arguments)],
            "environment": environment or {},
            "cwd": str(cwd or self._folder),
            "log": str(log),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Fork(int(self._process.stdout.readline()), log)


def _with_suffix(log, suffix):
    return log.with_name(f"{log.name}.{suffix}")


def serve():
    """Serves requests until stdin ends."""
    logs, rest = {}, b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02)
        while logs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            log = logs.pop(pid)
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
            request = json.loads(line)
            if (pid := os.fork()) == 0:
                _run_request(request)
            logs[pid] = request["log"]
            os.write(1, f"{pid}\n".encode())
    for pid in logs:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _run_request(request):
    status = 70
    try:
        for number, suffix in ((1, "out"), (2, "err")):
            path = f"{request['log']}.{suffix}"
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(request["cwd"])
        os.environ.update(request["environment"])
        sys.argv = request["argv"]
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
    for name in sys.argv[1:]:
        importlib.import_module(name)
    # Frees garbage and freezes the rest, so that forks share its memory pages.
    gc.collect()
    gc.freeze()
    serve()
