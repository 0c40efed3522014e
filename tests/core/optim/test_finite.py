"""A state is good if its weights and moments are finite, wherever its arrays are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparse_dataflow.core.optim import finite
from sparse_dataflow.core.optim.finite import non_finite
from sparse_dataflow.core.optim.optimizers import TrainState

GROUPS = ("embed", "blocks.qkv", "blocks.mlp_in", "head")


def tree(fill=lambda group: np.ones((4, 6), np.float32)):
    return {
        "embed": {"tokens": fill("embed")},
        "blocks": {name: {"kernel": fill(f"blocks.{name}")} for name in ("qkv", "mlp_in")},
        "head": {"bias": fill("head")},
    }


def state(params, moments):
    return TrainState(np.int32(3), params, moments, np.uint32(0))


@settings(max_examples=60)
@given(
    places=st.dictionaries(
        st.tuples(st.sampled_from(["parameters", "moments"]), st.sampled_from(GROUPS)),
        st.tuples(st.sampled_from([np.nan, np.inf, -np.inf]), st.integers(0, 23)),
        max_size=3,
    ),
    on_device=st.booleans(),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
)
def test_exactly_the_groups_that_are_not_finite_are_named(places, on_device, dtype):
    def fill(kind):
        def make(group):
            values = np.ones(24, np.float32).astype(dtype)
            if (kind, group) in places:
                value, place = places[kind, group]
                values[place] = value
            return jnp.asarray(values) if on_device else values

        return make

    named = non_finite(state(tree(fill("parameters")), (np.int32(3), tree(fill("moments")))))
    words = {
        (line.partition(" of ")[0], group)
        for line in named
        for group in line.partition(" of ")[2].split(", ")
    }
    assert words == set(places)


def test_integers_keys_and_empty_arrays_are_good():
    moments = {"count": np.int32(-1), "key": jax.random.key(0), "none": np.zeros((0, 3))}
    assert non_finite(state(tree(), moments)) == []


@pytest.mark.parametrize("where", ["host", "device"])
def test_weights_too_large_for_their_norm_are_named_and_such_moments_are_not(where):
    put = jnp.asarray if where == "device" else np.asarray
    large = tree(lambda group: put(np.full((2, 3), 1e30, np.float32)))
    small = tree()
    assert non_finite(state(small, large)) == []
    assert non_finite(state(large, small)) == [
        "parameters of blocks.mlp_in, blocks.qkv, embed, head"
    ]


@pytest.mark.parametrize("place", [0, 7, 23])
def test_a_host_array_is_read_in_parts(monkeypatch, place):
    monkeypatch.setattr(finite, "_HOST_VALUES", 5)
    values = np.ones(24, np.float32)
    assert non_finite(state({"head": values}, {"head": values})) == []
    values[place] = np.inf
    assert non_finite(state({"head": values}, {})) == ["parameters of head"]
    assert non_finite(state({}, {"head": values})) == ["moments of head"]


def test_sharded_arrays_are_read_where_they_are():
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    rows = 4 * len(jax.devices())
    for spec in (PartitionSpec("fsdp"), PartitionSpec()):
        for row in range(0, rows, 3):
            values = np.ones((rows, 2), np.float32)
            values[row, 1] = np.nan
            sharded = jax.device_put(values, NamedSharding(mesh, spec))
            assert non_finite(state(tree(), {"head": sharded})) == ["moments of head"]
