"""TPUs that are only described, and programs compiled for them."""

import functools
import os

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from simulated import targeted_tpu

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


@functools.cache
def described(name):
    """The devices of a slice that is only described."""
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in settings.items():
            if variable not in os.environ:
                patch.setenv(variable, value)
        return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[name]).devices


def compiled(function, arguments, device, donated=()):
    """`function` compiled for the device, given arguments with shapes and dtypes."""
    sharding = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    structs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
    )
    jitted = jax.jit(function, donate_argnums=donated)
    with targeted_tpu(device.device_kind, device.num_cores):
        return jitted.trace(*structs).lower(lowering_platforms=("tpu",)).compile()
