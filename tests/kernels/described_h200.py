"""An H200 that is only described, and programs compiled for it."""

import functools
import pathlib

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from simulated_hopper import targeted_gpu

import sparse_dataflow.planning

TARGET = pathlib.Path(sparse_dataflow.planning.__file__).parent / "h200.txtpb"


@functools.cache
def devices(number=1):
    """So many in one machine."""
    return topologies.get_topology_desc(
        "", platform="cuda", target_config=TARGET.read_text(), topology=f"1x1x{number}"
    ).devices


def compiled(function, arguments, donated=()):
    """`function` compiled for it, given arguments with shapes and dtypes."""
    sharding = NamedSharding(Mesh(np.array(devices()), ("device",)), PartitionSpec())
    structs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
    )
    jitted = jax.jit(function, donate_argnums=donated)
    with targeted_gpu():
        return jitted.trace(*structs).lower(lowering_platforms=("cuda",)).compile()
