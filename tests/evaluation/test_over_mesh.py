"""Over a mesh a model scores as on one device, batches of any shape included."""

import json
import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_scores_over_meshes_are_those_of_one_device(run_folder):
    meshes = ["fsdp:8", "data:2,fsdp:2,tensor:2", "fsdp:2,tensor:4", "tensor:8"]
    root = pathlib.Path(__file__).parents[2]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(root),
    }
    command = [sys.executable, str(root / "tests/evaluation/mesh_scores.py"), str(run_folder.path)]
    done = subprocess.run(
        [*command, *meshes], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 8
    for variant in ("sparse", "dense"):
        refused = found.pop(f"{variant} tensor:8")
        assert "tensor:8 does not divide 4 heads" in refused
    for error, differing in found.values():
        assert error < 1e-5 and differing == 0, found
