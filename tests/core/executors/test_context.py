"""The axis "context" shards the tokens of a sequence."""

import numpy as np
import pytest
from compared import executor_run
from executor_runs import BATCH, MODELS, SEQUENCE

from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.context import zigzag
from sparse_dataflow.core.executors.sharding import refuse_indivisible
from sparse_dataflow.files.errors import UserError


def pairs(order, window):
    """Returns the pairs of query and visible key of each shard."""
    seen = np.minimum(order + 1, window) if window else order + 1
    return seen.sum(axis=1)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_zigzag_gives_every_device_equal_causal_attention(shards):
    order = zigzag(4096, shards)
    np.testing.assert_array_equal(np.sort(order.reshape(-1)), np.arange(4096))
    counts = pairs(order, 0)
    assert counts.min() == counts.max() == 4096 * 4097 // 2 // shards
    contiguous = pairs(np.arange(4096).reshape(shards, -1), 0)
    # In order, the last of 8 devices would have almost twice the mean, and all wait for it.
    assert contiguous.max() / counts.max() == pytest.approx(2 - 1 / shards, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "documents", "bidirectional"])
def test_scores_of_some_tokens_are_those_of_one_device(model):
    texts = ["data:2,context:2,tensor:2/3/1", "fsdp:2,context:4/3/1"]
    assert max(executor_run("scores", model, *texts).values()) < 2e-6


@pytest.mark.slow
def test_a_layer_gathers_keys_and_values_and_shards_the_rest():
    """Without sharded weights, what a step gathers are keys and values of grouped heads."""
    config, text = MODELS["llama"], "data:2,context:4/0/1"
    [steps] = executor_run("collectives", "llama", text).values()
    size = 4 * BATCH // 2 * SEQUENCE * config.kv_heads * config.head_width
    gathers = [step for step in steps if step[0] == "all-gather"]
    # In the forward pass and again for the backward pass (remat), of each layer.
    assert {(group, bytes_) for _, group, bytes_, _ in gathers} == {(4, size)}
    assert sum(times for *_, times in gathers) == 2 * 2 * config.num_layers


def test_a_sequence_that_the_axis_does_not_divide_is_refused():
    mesh = meshes.AbstractMesh((1, 1, 1, 4, 1, 1), meshes.AXES)
    with pytest.raises(UserError, match="legal: a sequence of a multiple of 8 tokens"):
        refuse_indivisible(mesh, MODELS["dense"], 4, 1, 12)
    refuse_indivisible(mesh, MODELS["dense"], 4, 1, 16)
