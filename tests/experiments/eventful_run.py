"""Runs an experiment to which something happens at a chosen file operation.

    python eventful_run.py '[[PATH, N, WHAT], ...]' EXPERIMENT ARGUMENTS...

One after the other, at the N-th file operation whose path matches the regular expression PATH, WHAT
happens: a signal's name sends it to this process, "SIGINT again" sends one once the program has
noted the first (to Python, two that come together are one), "full" makes the disk refuse more than
20 kB a file, an error's name ("EIO") makes this operation fail so, "clock SECONDS" sets the time of
day forward or back.
"""

import errno
import json
import os
import re
import resource
import runpy
import signal
import sys
import time

OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
happenings = json.loads(sys.argv[1])
seen = 0


def watch(event, arguments):
    global seen
    if event not in OPERATIONS or not happenings:
        return
    pattern, count, what = happenings[0]
    if not any(isinstance(a, str | os.PathLike) and re.search(pattern, str(a)) for a in arguments):
        return
    seen += 1
    if seen < count:
        return
    happenings.pop(0)
    seen = 0
    if what in vars(errno):
        number = getattr(errno, what)
        raise OSError(number, os.strerror(number))
    if what.startswith("clock "):
        before, jump = time.time, float(what.removeprefix("clock "))
        time.time = lambda: before() + jump
    elif what == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    elif what == "SIGINT again":
        give_up = time.monotonic() + 600
        while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            assert time.monotonic() < give_up, "the first SIGINT was not noted"
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    else:
        os.kill(os.getpid(), getattr(signal, what))


sys.addaudithook(watch)
name, sys.argv = sys.argv[2], [sys.argv[0], *sys.argv[3:]]
runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
