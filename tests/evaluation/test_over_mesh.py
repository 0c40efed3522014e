"""Scores and generated tokens over a mesh equal those on one device."""

import pytest
from eight_devices import on_eight_devices

from sparse_dataflow.evaluation.over_mesh import legal_cuts
from sparse_dataflow.files.errors import UserError


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


@pytest.mark.slow
def test_a_model_that_is_cut_over_devices_has_the_logits_of_one():
    results = on_eight_devices("evaluation/mesh_cuts.py", "tensor:8", "feature:2,tensor:4")
    batch, size, stage = results.pop("refused")
    assert "'data' is not an axis here; Legal: feature, tensor" in batch
    assert "is a mesh of 4 devices, and there are 8" in size and "'stage' is not" in stage
    assert len(results) == 14
    assert {case: error for case, (error, _) in results.items() if error > 1e-5} == {}
    # What an axis does not divide is whole on each device, so no model has all of it cut.
    assert max(share for _, share in results.values()) < 0.8


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("tensor:2048", "is a mesh of 2048 devices"),
        ("auto", "'auto' is not an axis here; Legal: feature, tensor"),
        ("fsdp:8", "'fsdp' is not an axis here; Legal: feature, tensor"),
        ("tensr:2", "did you mean tensor. Legal: feature, tensor"),
    ],
)
def test_a_mesh_that_cuts_no_product_is_refused(mesh, words):
    with pytest.raises(UserError, match=words):
        legal_cuts(mesh)
