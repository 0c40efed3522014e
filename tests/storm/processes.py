"""Functions in new processes: a draw that crashes, hangs or grows ends alone."""

import contextlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

PROCESSOR_SECONDS = 120
"""After which a draw is stuck in a computation."""

MOST_SECONDS = 1800
"""After which a draw hangs, on a busy machine."""


def in_fork(function: Callable[[], dict | None], log: Path) -> dict:
    """Returns the JSON value of a function in a new process, or {"error": why it has none}."""
    worker = Worker(function, log)
    worker.begin()
    value = worker.result()
    worker.end()
    return value


class Worker:
    """A new process that calls a function, which is warm after the first call.

    Args:
      function: (JSON values) -> a JSON object, or None for {}.
      log: file of what it prints.
    """

    def __init__(self, function: Callable[..., dict | None], log: Path):
        self._log, self.calls = log, 0
        log.parent.mkdir(parents=True, exist_ok=True)
        theirs, requests = os.pipe()
        results, mine = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._child = os.fork()
        if not self._child:
            try:
                os.close(requests)
                os.close(results)
                _work(function, log, theirs, mine)
            finally:
                os._exit(0)
        os.close(theirs)
        os.close(mine)
        self._requests, self._results = os.fdopen(requests, "w"), os.fdopen(results)

    def begin(self, *arguments) -> None:
        """Begins a call."""
        self.calls += 1
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps(arguments) + "\n")
            self._requests.flush()

    def result(self) -> dict:
        """Returns the value of the call that was begun; {"error": why it has none} where the
        process died or was killed as it hung, after which the worker is dead."""
        signal.signal(signal.SIGALRM, lambda *_: os.kill(self._child, signal.SIGKILL))
        signal.alarm(MOST_SECONDS)
        try:
            text = self._results.readline()
        except BaseException:
            self.end()
            raise
        finally:
            signal.alarm(0)
        if text:
            return json.loads(text)
        status = self.end()
        tail = self._log.read_text(errors="replace")[-3000:]
        return {"error": f"the process ended with {status}: {tail}"}

    @property
    def alive(self) -> bool:
        """Whether it can be called again."""
        return bool(self._child)

    def end(self) -> int:
        """Ends the process; returns its exit status, negative for a signal."""
        for pipe in (self._requests, self._results):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        child, self._child = self._child, 0
        if not child:
            return 0
        # Workers that were made later hold its pipe open too.
        os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _work(function, log, requests, results):
    """Answers the calls that come through a pipe, until it is closed."""
    place = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(place, 1)
    os.dup2(place, 2)
    with os.fdopen(requests) as calls, os.fdopen(results, "w") as answers:
        for arguments in calls:
            used = int(time.process_time())
            most = used + PROCESSOR_SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
            try:
                value = function(*json.loads(arguments)) or {}
            except BaseException:
                value = {"error": traceback.format_exc()[-4000:]}
            answers.write(json.dumps(value) + "\n")
            answers.flush()
