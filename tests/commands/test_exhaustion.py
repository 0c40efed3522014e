"""A process that has no threads or address space left ends with a message."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, threading
from sparse_dataflow.commands import command_line

def main():
    started = threading.Event()
    threading.Thread(target=lambda: (started.set(), threading.Event().wait())).start()
    started.wait()
    {failure}

command_line.run_main(main, "doc", argv=["program"])
"""
FAILURES = {
    "threads": 'raise RuntimeError("can\'t start new thread")',
    "memory": "resource.setrlimit(resource.RLIMIT_AS, (2**28,) * 2); bytearray(2**31)",
}


@pytest.mark.parametrize("kind", FAILURES)
def test_an_exhausted_process_ends_though_a_thread_waits(kind):
    program = PROGRAM.format(failure=FAILURES[kind])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert kind in done.stderr and len(done.stderr.splitlines()) == 1
