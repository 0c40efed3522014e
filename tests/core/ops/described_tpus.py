"""Ahead-of-time compilation for TPUs, without one."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparse_dataflow.compile import topologies

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


@functools.cache
def described(name):
    """Return the abstract devices of a TPU slice."""
    return topologies.tpu_devices(TOPOLOGIES[name])


def compiled(function, arguments, device, donated=()):
    """Compile `function` for the device, given arguments with shapes and dtypes."""
    sharding = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    structs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
    )
    jitted = jax.jit(function, donate_argnums=donated)
    platform = "cuda" if device.platform == "gpu" else device.platform
    with topologies.tracing_for(device):
        return jitted.trace(*structs).lower(lowering_platforms=(platform,)).compile()
