"""Scores and generated tokens over a mesh equal those on one device."""

import pytest
from eight_devices import on_eight_devices


@pytest.mark.slow
def test_scores_over_meshes_equal_those_of_one_device(run_folder):
    meshes = ["data:2,fsdp:2,tensor:2", "data:2,feature:2,tensor:2", "tensor:8"]
    differences = on_eight_devices("evaluation/mesh_scores.py", run_folder.path, *meshes)
    assert len(differences) == 6
    for variant in ("sparse", "dense"):
        message = differences.pop(f"{variant} tensor:8")
        assert "tensor:8 does not divide 4 heads" in message
    for error, greedy_differences in differences.values():
        assert error < 1e-5 and greedy_differences == 0, differences


@pytest.mark.slow
def test_a_tensor_axis_longer_than_the_key_value_heads_scores_and_decodes_as_one_device():
    [(error, same_tokens, refusal)] = on_eight_devices(
        "evaluation/mesh_decoding.py", "data:2,tensor:4"
    ).values()
    assert error < 1e-5 and same_tokens
    assert "sharded over 8 devices; legal with expert_slots: one device" in refusal
