"""Runs a script of the tests in a process of eight virtual CPU devices."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def on_eight_devices(script, *arguments):
    """What the script, named from the tests' folder, prints as JSON in its last line."""
    path = ROOT / "tests" / script
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": f"{ROOT}:{path.parent}",
        # Threads of XLA's pool: devices wait for each other, each on one.
        "NPROC": "32",
    }
    done = subprocess.run(
        [sys.executable, str(path), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
