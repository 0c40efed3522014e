"""Over a mesh a model scores as on one device, batches of any shape included."""

import pytest
from eight_devices import on_eight_devices


@pytest.mark.slow
def test_scores_over_meshes_are_those_of_one_device(run_folder):
    meshes = ["data:2,fsdp:2,tensor:2", "tensor:8"]
    found = on_eight_devices("evaluation/mesh_scores.py", run_folder.path, *meshes)
    assert len(found) == 4
    for variant in ("sparse", "dense"):
        refused = found.pop(f"{variant} tensor:8")
        assert "tensor:8 does not divide 4 heads" in refused
    for error, differing in found.values():
        assert error < 1e-5 and differing == 0, found
