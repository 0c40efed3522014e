"""Runs an experiment to which something happens at a chosen file operation or call.

    python eventful_run.py '{"events": [], "calls": [], "whole": false}' EXPERIMENT ARGUMENTS...

"events" are [PATH, N, WHAT]: one after the other, at the N-th file operation whose path matches the
regular expression PATH, WHAT happens: a signal's name sends it to this process, "SIGINT again"
sends one once the program has noted the first (to Python, two that come together are one), "full"
makes the disk refuse more than 20 kB a file, an error's name ("EIO") makes this operation fail so,
"clock SECONDS" sets the time of day forward or back.

"calls" are ["module.function", N, WHAT] at its N-th call: a signal, "full", "no memory" (8 MiB more
are left to it) or "no threads" of Python. "SIGTERM in a long call" sends it to another thread while
the main one is in a C function for a minute.

"ignored" are names of signals that are ignored from the start, as under nohup.

"flushed" is a file that gets a line for each file or folder that is flushed to disk: its path,
inode and size.

What is not "whole" leaves out what takes seconds beside the training: see `shorten`.
"""

import errno
import hashlib
import importlib
import json
import os
import re
import resource
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from sparse_dataflow.data import cache

OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
asked = json.loads(sys.argv[1])
happenings = asked["events"]
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
    elif what in LIMITS:
        LIMITS[what]()
    elif what == "SIGINT again":
        give_up = time.monotonic() + 600
        while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            assert time.monotonic() < give_up, "the first SIGINT was not noted"
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    else:
        os.kill(os.getpid(), getattr(signal, what))


def fill_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def fill_memory():
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**23
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def fill_threads():
    def start(*_, **__):
        raise RuntimeError("can't start new thread")

    threading.Thread.start = start


LIMITS = {"full": fill_disk, "no memory": fill_memory, "no threads": fill_threads}


def long_call(seconds):
    """A C function that does not return when a signal comes, and lets other threads run."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000 * seconds)


def at_call(name, count, what):
    module, _, function = name.rpartition(".")
    module = importlib.import_module(module)
    whole, left = getattr(module, function), [count]

    def counted(*arguments, **options):
        left[0] -= 1
        if left[0] == 0 and what in LIMITS:
            LIMITS[what]()
        elif left[0] == 0 and what == "SIGTERM in a long call":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            long_call(60)
        elif left[0] == 0:
            os.kill(os.getpid(), getattr(signal, what))
        return whole(*arguments, **options)

    setattr(module, function, counted)


def note_flushes(path):
    log, fsync = open(path, "a", buffering=1), os.fsync

    def noted(file):
        number = file if isinstance(file, int) else file.fileno()
        fsync(number)
        status = os.fstat(number)
        print(os.readlink(f"/proc/self/fd/{number}"), status.st_ino, status.st_size, file=log)

    os.fsync = noted


def shorten():
    """Leaves out rates of this machine, and continuations in the report."""
    from sparse_dataflow.commands import run_report
    from sparse_dataflow.hardware import detect as hardware

    hardware.measure_cpu = lambda dtype="float32": 1e11
    hardware.measure_cpu_bandwidth = lambda: 1e10
    run_report._continuations = lambda *_: ([], {})


# Of the environment of the process that was forked, where this is a fork.
cache.FOLDER = Path(os.environ["XDG_CACHE_HOME"]) / "sparse_dataflow"
if not asked["whole"]:
    shorten()
for number in asked["ignored"]:
    signal.signal(getattr(signal, number), signal.SIG_IGN)
for call in asked["calls"]:
    at_call(*call)
if asked["flushed"]:
    note_flushes(asked["flushed"])
if happenings:
    sys.addaudithook(watch)
name, sys.argv = sys.argv[2], [sys.argv[0], *sys.argv[3:]]
runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
