"""Runs a script of the tests in a process with eight virtual CPU devices."""

import atexit
import functools
import json
import os
import tempfile

from forks import Forks
from places import ROOT

IMPORTED = (
    "sparse_dataflow.data.batches", "sparse_dataflow.pipeline.pipelined",
    "sparse_dataflow.core.checkpoint.checkpoint", "sparse_dataflow.core.training.loop",
)  # fmt: skip
"""Modules that most scripts import."""


def on_eight_devices(script, *arguments):
    """Runs a script, relative to tests/, and returns the JSON value in its last line of output."""
    run = _forks().start(ROOT / "tests" / script, *arguments)
    assert run.wait(1500) == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@functools.cache
def _forks():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
        # Threads of XLA's pool: each device blocks one while it waits for the others.
        "NPROC": "32",
        # As in conftest.py.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    forks = Forks(environment, folder.name, IMPORTED)
    atexit.register(forks.close)
    return forks
