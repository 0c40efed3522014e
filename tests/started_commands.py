"""Starts commands of this project, each in a process of its own, up to their first computation.

    python tests/started_commands.py FOLDER SECONDS < commands.json

reads a JSON list of commands, each a list of words, and writes a line of JSON for each: its number,
how it went, and the end of what it wrote.  It imports nothing of the tests, so it runs in a clone
and where a wheel alone is installed.

| how | means |
|---|---|
| computes | a first program was compiled: it has read its arguments and data, and made its plan |
| ended | it ended with status 0 |
| runs | it ran on for SECONDS without an error |
| refused | it ended with status 2 and a sentence |
| failed | anything else |

A command is a fork of this process, which has imported what commands have in common.
"""

import importlib
import json
import os
import pathlib
import runpy
import signal
import sys
import traceback

COMPUTES, ENDED, RUNS, REFUSED, FAILED = "computes", "ended", "runs", "refused", "failed"
LAST = 600
"""Characters of what a command wrote that are kept."""
COMMON = (
    "jax",
    "optax",
    "sparse_dataflow.commands.command_line",
    "sparse_dataflow.commands.train",
)


class ComputesError(BaseException):
    """A program was compiled."""


def started(words, folder, seconds, output):
    """Runs a command in this process; returns how it went."""
    import jax

    def compiled(event, *_, **__):
        if "backend_compile" in event:
            raise ComputesError

    jax.monitoring.register_event_duration_secs_listener(compiled)
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError(RUNS)))
    signal.alarm(seconds)
    for number in (1, 2):
        os.dup2(output, number)
    os.chdir(folder)
    try:
        _run(words)
        return ENDED
    except ComputesError:
        return COMPUTES
    except SystemExit as end:
        return {None: ENDED, 0: ENDED, 2: REFUSED}.get(end.code, FAILED)
    except BaseException as error:
        if isinstance(error, TimeoutError) and error.args == (RUNS,):
            return RUNS
        traceback.print_exc()
        return FAILED
    finally:
        signal.alarm(0)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _run(words):
    if words[0] == "sparse-dataflow":
        sys.argv = words
        importlib.import_module("sparse_dataflow.__main__").main()
    elif words[:2] == ["python", "-m"]:
        sys.argv = words[2:]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        raise ValueError(f"{words} is no command of this project.")


def in_a_fork(words, folder, seconds):
    """Returns (how it went, the end of what it wrote) of a command."""
    log = pathlib.Path(folder, ".started.log")
    output = os.open(log, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    child = os.fork()
    if not child:
        os.setsid()
        how = FAILED
        try:
            how = started(words, folder, seconds, output)
        finally:
            os.write(output, f"\n{how}".encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(output)
    try:
        os.killpg(child, signal.SIGKILL)  # What it started.
    except ProcessLookupError:
        pass
    text, _, how = log.read_text(errors="replace").rpartition("\n")
    return how if how in (COMPUTES, ENDED, RUNS, REFUSED) else FAILED, text[-LAST:].strip()


def main():
    """Starts the commands of standard input."""
    folder, seconds = sys.argv[1], int(sys.argv[2])
    for name in COMMON:
        importlib.import_module(name)
    for number, words in enumerate(json.load(sys.stdin)):
        how, text = in_a_fork(words, folder, seconds)
        print(json.dumps([number, how, text]), flush=True)


if __name__ == "__main__":
    main()
