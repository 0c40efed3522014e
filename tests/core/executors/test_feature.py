"""The axis "feature" trains as one device, by the collectives of the planner's formula."""

import collections

import pytest
from mesh_training import BATCH, MODELS, SEQUENCE
from mesh_trainings import assert_like_single_device, mesh_training

from sparse_dataflow.core.config.projections import ROW_PARALLEL
from sparse_dataflow.planner import collectives

nightly = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "text"),
    [
        pytest.param("sparse_depth", "fsdp:2,feature:2,tensor:2/3/2", marks=nightly),
        ("sparse_depth", "halves,fsdp:2,feature:2,tensor:2/3/2"),
        pytest.param("llama", "halves,fsdp:2,feature:2,tensor:2/3/1", marks=nightly),
        pytest.param("dense_odd", "data:2,feature:4/0/1", marks=nightly),
        pytest.param("sparse_deep_full", "data:4,feature:2/0/1", marks=nightly),
        pytest.param("llama", "fsdp:4,feature:2/3/2", marks=nightly),
        pytest.param("gemma2", "data:4,feature:2/0/1", marks=nightly),
        pytest.param("qwen3", "data:4,feature:2/0/1", marks=nightly),
        pytest.param("sparse+muon", "fsdp:2,feature:2,tensor:2/3/2", marks=nightly),
        pytest.param("sparse_depth+adapters", "fsdp:2,feature:2,tensor:2/3/1", marks=nightly),
    ],
)
def test_two_axes_that_cut_a_projection_train_like_a_single_device(model, text):
    assert_like_single_device(mesh_training("compare", model, text))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sparse_gated", "sparse_gated_full"])
def test_the_step_gathers_and_reduce_scatters_what_the_formula_says(model):
    """Arrays of other steps than the layers' are those of the embedding and of the output layer."""
    text, config, tensor, feature = "feature:4,tensor:2/0/1", MODELS[model], 2, 4
    expected, tokens = collections.Counter(), BATCH * SEQUENCE
    size, arrays = collectives.layer_gathers(config, tokens, tensor, feature)
    remat = config.remat == "full"
    for kind in ("all-gather", "reduce-scatter"):
        # Recomputed: both inputs are gathered again, and attn_out's output is reduced again.
        again = {"all-gather": 2, "reduce-scatter": 1}[kind] * remat
        expected[kind, tensor, size] += config.num_layers * (4 + again)
        for name, array in arrays.items():
            again = remat and (name in ROW_PARALLEL) == (kind == "all-gather")
            expected[kind, feature, array] += config.num_layers * (1 + again)
        whole = 4 * tokens * config.d_model
        expected[kind, tensor, whole] += 2
        expected[kind, feature, whole / tensor] += 2
    [steps] = mesh_training("collectives", model, text).values()
    sharing = [step for step in steps if step[0] != "all-reduce"]
    assert {(kind, group, size): times for kind, group, size, times in sharing} == expected


@pytest.mark.slow
def test_a_checkpoint_moves_between_meshes_with_and_without_the_axis():
    texts = ["data:2,feature:2,tensor:2/3/1", "fsdp:8/1/1", "feature:4,fsdp:2/2/1"]
    results = mesh_training("move", "sparse_depth", *texts)
    assert all(results.values()), results
