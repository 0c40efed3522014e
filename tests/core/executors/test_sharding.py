"""Sharding rules: every parameter has a row, and shards are equal."""

import dataclasses
import functools
import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors import sharding
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.core.training.step import abstract_state
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.step_time import stage_parameters

DENSE = ModelConfig(num_layers=2, d_model=64, num_heads=4, d_ff=256, vocab_size=48, max_len=16)
SPEC = LinearSpec("block_sparse", "random", 0.25, 8, rank=4)
SPARSE = dataclasses.replace(DENSE, linears=dict.fromkeys(DENSE.projections, SPEC))
TRAINING = TrainingConfig(steps=2, batch=16, sequence=16)


def abstract(text):
    sizes = meshes.parse(text, None)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


@st.composite
def drawn_meshes(draw):
    sizes = {axis: draw(st.sampled_from((1, 2, 4))) for axis in ("data", "fsdp", "tensor")}
    return abstract(",".join(f"{axis}:{size}" for axis, size in sizes.items()))


@functools.cache
def shapes(model):
    return abstract_state(model, TRAINING)


def sharded_leaves(model, mesh, zero):
    """Returns [(shape, sharding)] of the params and of the moments of a state."""
    shardings = Sharded(mesh, zero).shardings(shapes(model), model)
    pair = lambda field: list(  # noqa: E731
        zip(*map(jax.tree.leaves, (getattr(shapes(model), field), getattr(shardings, field))))
    )
    return pair("params"), pair("moments")


def bytes_of(tree):
    """Returns the bytes on one device; raises if an axis does not divide a dimension."""
    return sum(math.prod(s.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, s in tree)


@settings(max_examples=30)
@given(drawn_meshes(), st.integers(0, 3), st.sampled_from((DENSE, SPARSE)))
def test_shards_are_equal_and_zero_shards_its_arrays(mesh, zero, model):
    params, moments = map(bytes_of, sharded_leaves(model, mesh, zero))
    whole_params, whole_moments = map(bytes_of, sharded_leaves(model, mesh, 0))
    fsdp = mesh.shape["fsdp"] > 1
    assert (moments < whole_moments) == (fsdp and zero >= 1)
    assert (params < whole_params) == (fsdp and zero >= 3)


def test_all_axes_shard_large_weights():
    """Only small arrays are replicated."""
    mesh = abstract("fsdp:4,tensor:4")
    state = abstract_state(SPARSE, TRAINING, Sharded(mesh, 3))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        size = math.prod(leaf.sharding.shard_shape(leaf.shape))
        if math.prod(leaf.shape) > 8192:
            shards = 4 if "positions" in sharding.dotted_path(path) else 16
            assert size * shards == math.prod(leaf.shape), path


@given(drawn_meshes())
def test_fsdp_moves_to_a_dimension_that_it_divides(mesh):
    spec = sharding.spec(SPARSE, "blocks.qkv.values", (2, 4 * 3, 8, 8), mesh)
    shape = NamedSharding(mesh, spec).shard_shape((2, 12, 8, 8))
    assert math.prod(shape) * mesh.shape["fsdp"] * mesh.shape["tensor"] == 2 * 12 * 8 * 8
    assert shape[0] == 2


@given(st.integers(1, 60000), st.sampled_from([1, 2, 4, 8]))
def test_a_vocabulary_is_padded_to_full_tiles_per_device(rows, tensor):
    mesh = abstract(f"tensor:{tensor}")
    padded = sharding.padded_rows(rows, mesh)
    assert padded >= rows and padded % tensor == 0
    assert padded - rows < 128 * tensor and (padded == rows or padded % (128 * tensor) == 0)
    assert sharding.padded_rows(padded, mesh) == padded


def test_a_state_is_placed_with_a_padded_vocabulary():
    model = dataclasses.replace(DENSE, vocab_size=50257)
    executor = Sharded(abstract("fsdp:2,tensor:4"))
    placed = executor.arrays(shapes(model), model, False, Batch())
    for group in ("parameters", "gradients"):
        table = placed[group]["embed"]["tokens"]
        assert table.shape == (50688, 64)
        assert table.sharding.shard_shape(table.shape) == (12672, 32)


def test_an_unpadded_vocabulary_is_replicated():
    mesh = abstract("tensor:4")
    assert sharding.axes_of(sharding.spec(DENSE, "embed.tokens", (50257, 64), mesh)) == set()
    assert sharding.axes_of(sharding.spec(DENSE, "embed.tokens", (50256, 64), mesh)) == {"tensor"}


@pytest.mark.parametrize(("tensor", "copied"), [(1, False), (2, False), (4, True)])
def test_a_tensor_axis_longer_than_the_key_value_heads_replicates_their_weights(tensor, copied):
    model = dataclasses.replace(DENSE, num_kv_heads=2, fused_qkv=False)
    model = model.with_linears(LinearSpec("block_sparse", "random", 0.5, 8, rank=4))
    executor = Sharded(abstract(f"fsdp:2,tensor:{tensor}"))
    executor.check(model, TRAINING)
    placed = executor.arrays(shapes(model), model, False, Batch())
    for group, name in itertools.product(("parameters", "gradients"), ("q", "k", "v")):
        for leaf in (placed[group]["blocks"][name][part] for part in ("values", "bias")):
            axes = sharding.axes_of(leaf.sharding.spec)
            assert ("tensor" in axes) == (tensor > 1 and not (copied and name != "q"))
            assert ("fsdp" in axes) == (leaf.ndim == 4)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_the_planner_prices_replicated_key_value_weights(tensor, sparse):
    model = ModelConfig(3, 256, 8, 256, 256, 16, num_kv_heads=2, biases=(), fused_qkv=False)
    if sparse:
        spec = LinearSpec("block_sparse", "random", 0.5, 8)
        model = model.with_linears(spec, ["q", "k", "mlp_in"])
    executor = Sharded(abstract(f"tensor:{tensor}"), 0)
    executor.check(model, TRAINING)
    params = executor.arrays(shapes(model), model, False, Batch())["parameters"]
    local = sum(math.prod(a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(params))
    norms = 4 * model.d_model * (2 * model.num_layers + 1) / 2
    positions = model.max_len * model.d_model
    priced = stage_parameters(model, ParallelPlan(tensor=tensor))
    # The planner shards norms and positions, which are replicated.
    assert local - priced == pytest.approx((norms + positions) * (1 - 1 / tensor))


@pytest.mark.parametrize(
    ("mesh", "model", "training", "message"),
    [
        ("tensor:8", {}, {}, r"tensor:8 does not divide 4 heads; legal for this model: 1, 2, 4"),
        (
            "tensor:4",
            {"num_kv_heads": 2},  # One projection qkv.
            {},
            r"tensor:4 does not divide 2 key/value heads; legal for this model: 1, 2\.",
        ),
        (
            "tensor:4",
            {"num_heads": 12, "head_dim": 8, "num_kv_heads": 6, "fused_qkv": False},
            {},
            r"tensor:4 does not divide 6 key/value heads; legal for this model: 1, 2\.",
        ),
        (
            "tensor:4",
            {
                "num_kv_heads": 2,
                "fused_qkv": False,
                "linears": {"k": LinearSpec("block_sparse", "dense", 1.0, 32)},
            },
            {},
            r"tensor:4 does not divide the 1 output blocks of k; legal for this model: 1\.",
        ),
        ("tensor:4", {}, {"sequence": 6}, r"does not divide 6 tokens; legal for this model: 1, 2"),
        ("data:3", {}, {}, r"batch of 16 .* over 3 devices \(data:3 x fsdp:1\); legal: .* of 3"),
        ("fsdp:8", {}, {"micro_batches": 4}, "legal: a --batch that is a multiple of 32"),
        (
            "tensor:2",
            {"d_ff": 8, "linears": {"mlp_in": LinearSpec("block_sparse", "dense", 1.0, 8)}},
            {},
            "does not divide the 1 output blocks of mlp_in",
        ),
        (
            "tensor:4",
            {"linears": {"attn_out": dataclasses.replace(SPEC, hadamard=32)}},
            {},
            "does not divide the 2 groups of --set sparsity.hadamard=32 of attn_out; .* 1, 2",
        ),
        (
            "feature:4,tensor:2",
            {},
            {},
            r"feature:4 with tensor:2 does not divide 4 key/value heads; legal .*: 1, 2\.",
        ),
        (
            "feature:4",
            {"linears": {"qkv": LinearSpec("block_sparse", "dense", 1.0, 2)}},
            {},
            r"does not divide the 2 features of a block; legal for this model: 1, 2\.",
        ),
        (
            "feature:2",
            {
                "linears": {
                    "qkv": LinearSpec("block_sparse", "dense", 1.0, 8),
                    "mlp_in": LinearSpec("block_sparse", "dense", 1.0, 16),
                }
            },
            {},
            r"needs blocks of the same side .*; legal for this model: 1\.",
        ),
        (
            "feature:2",
            {"linears": {"attn_out": LinearSpec("block_sparse", "dense", 1.0, 8, hadamard=8)}},
            {},
            r"leaves 4 consecutive features to sparsity.hadamard=8; legal for this model: 1\.",
        ),
        (
            "feature:2",
            {"experts": 4},
            {},
            r"model.experts=4 with .*; legal: a mesh without feature",
        ),
        (
            "feature:2,tensor:4",
            {"num_kv_heads": 2, "fused_qkv": False},
            {},
            r"at most the 2 key/value heads; legal for this model: 1\.",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused(mesh, model, training, message):
    executor = Sharded(abstract(mesh))
    with pytest.raises(UserError, match=message):
        executor.check(
            dataclasses.replace(DENSE, **model), dataclasses.replace(TRAINING, **training)
        )


@pytest.mark.parametrize("cut", [(), ("fsdp",), ("tensor",), ("feature", "context"), meshes.AXES])
def test_a_gradient_is_summed_over_every_axis_that_does_not_cut_it(cut):
    mesh = abstract("data:2,fsdp:3,context:2,feature:2,tensor:3")
    axes = [axis for axis in meshes.AXES if mesh.shape[axis] > 1]
    device_gradients = np.random.default_rng(0).normal(size=[mesh.shape[a] for a in axes])
    reduce = lambda gradient: sharding.all_reduce(gradient, P(cut), mesh)  # noqa: E731
    for axis in reversed(axes):
        reduce = jax.vmap(reduce, axis_name=axis)
    over = tuple(i for i, axis in enumerate(axes) if axis not in cut)
    expected = np.broadcast_to(device_gradients.sum(over, keepdims=True), device_gradients.shape)
    np.testing.assert_allclose(reduce(device_gradients), expected, rtol=1e-5, atol=1e-6)
