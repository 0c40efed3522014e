"""Block-sparse layers over a mesh compute what one device computes."""

import jax
import numpy as np
import pytest
from eight_devices import on_eight_devices
from flax import nnx

import sparse_dataflow as sd


@pytest.fixture(scope="module")
def report():
    return on_eight_devices("layers/on_mesh.py")


def test_shard_map_over_the_batch_has_the_gradients_of_one_device(report):
    assert report["shard_map"] < 1e-6


def test_shard_map_that_checks_varying_axes_has_the_gradients_of_one_device(report):
    assert report["checked_shard_map"] < 1e-6


def test_explicit_axes_have_the_gradients_of_one_device(report):
    assert report["explicit"] < 1e-6


def test_explicit_axes_without_a_mesh_in_context_have_the_results_of_one_device(report):
    assert report["uncontextual"] < 1e-5


def test_stored_blocks_stay_sharded_when_linen_translates_their_logical_names(report):
    assert report["linen"] == [1, 4, 2, 8, 8]


def test_evolution_keeps_arrays_sharded(report):
    before, after, halved = report["evolved"]
    assert before == after and before[-1] == 8
    assert halved[:3] == [blocks // 2 for blocks in before[:3]] and halved[-1] == 8


def test_a_model_sharded_by_its_partition_specs_trains_as_on_one_device(report):
    assert report["training"] < 1e-5
    # Stored blocks, their moments, an index table, a dense kernel, a bias of 3.
    assert report["sharded"] == [True, True, False, True, False]


def test_metadata_of_a_kernel_shard_its_stored_blocks_over_the_axes_that_divide(report):
    for name, (shards, is_same) in report["translated"].items():
        divided = {"one axis": 4, "6 blocks": 2}.get(name.partition(",")[0], 8)
        assert (shards, is_same) == (divided, True), name
    assert len(report["translated"]) == 10


def test_a_sharding_that_a_call_asks_for_is_that_of_the_result(report):
    assert len(report["called"]) == 12
    for difference, is_equal in report["called"]:
        assert difference < 1e-5 and is_equal


def test_a_mesh_without_the_axis_is_refused_in_words():
    layer = sd.BlockSparseLinear(16, 16, density=0.5, block=8, rngs=nnx.Rngs(0))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    with pytest.raises(sd.UserError, match="no axis 'tensor'; legal: data"):
        sd.partition_specs(layer, mesh, "tensor")
