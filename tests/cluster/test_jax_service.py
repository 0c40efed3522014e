"""What jax's own service of a run lacks, so that `handshake` and `rendezvous` exist.

If a test here fails with a newer jax, weigh again whether they are still needed.
"""

import os
import signal
import subprocess
import sys

import pytest
from ports import free_port

MEMBER = """
import sys, jax
jax.distributed.initialize(
    sys.argv[1], 2, int(sys.argv[2]), initialization_timeout=int(sys.argv[3]),
    cluster_detection_method="deactivate",
)
print("joined", jax.process_count(), flush=True)
jax.distributed.shutdown()
"""


def members(numbers, timeout, **variables):
    """(exit status, output) of processes that only jax's service brings together."""
    address = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, address, str(number), str(timeout)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", **variables.get(f"of_{number}", {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in numbers
    ]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    return [(p.returncode, text) for p, text in zip(started, outputs, strict=True)]


@pytest.mark.slow
def test_jax_aborts_if_a_process_is_missing():
    """No exception reaches Python: a run cannot say a sentence, and exits by a signal."""
    [(status, text)] = members([0], timeout=3)
    assert status == -signal.SIGABRT and "Traceback" not in text


@pytest.mark.slow
def test_jax_admits_a_process_without_a_secret():
    """The member of another job, which names the port by mistake, takes the place of process 1."""
    tokens = {
        "of_0": {"SPARSE_DATAFLOW_TOKEN": "a" * 9},
        "of_1": {"SPARSE_DATAFLOW_TOKEN": "b" * 9},
    }
    for status, text in members([0, 1], timeout=120, **tokens):
        assert status == 0 and "joined 2" in text
