"""A mesh of devices from `--mesh=data:8,fsdp:4,tensor:8`."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh

from sparse_dataflow.core.executors.mesh_axes import AXES
from sparse_dataflow.core.executors.mesh_axes import parse_mesh as parse
from sparse_dataflow.files.errors import UserError

__all__ = ["AXES", "parse"]  # Of `mesh_axes`, for those who import this module.

BATCH_AXES = ("data", "fsdp")

STATE_AXES = ("fsdp", "context")
"""Axes that shard what `parallel.zero` says, outermost first."""

MODEL_AXES = ("tensor", "feature")
"""Axes that shard every layer, in the order in which they cut one dimension."""

AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or of described devices that need not exist."""


def make(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Creates a mesh with all of AXES whose inner axes use the nearest devices.

    If the devices form several islands (TPU slices, or nodes on other platforms), the outermost
    axes cross them (jax's hybrid mesh).

    Args:
      sizes: result of `parse`.
      devices: in the order of their ids; all devices of jax if None.

    Raises:
      UserError: the axes cannot be split at the borders of the islands.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = [sizes[axis] for axis in AXES]
    islands, island_is_process = _islands(devices)
    if islands == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(grid, AXES)
    outer = outer_shape(sizes, islands)
    inner = [size // crossing for size, crossing in zip(shape, outer)]
    grid = mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices, process_is_granule=island_is_process
    )
    return Mesh(grid, AXES)


def _islands(devices):
    """Returns (number of islands with fast links inside, whether an island is a process)."""
    slices = {getattr(device, "slice_index", None) for device in devices}
    if len(slices) > 1:
        return len(slices), False
    processes = {device.process_index for device in devices}
    return (1, False) if devices[0].platform == "tpu" else (len(processes), True)


def outer_shape(sizes: Mapping[str, int], islands: int) -> list[int]:
    """Returns the shape of the mesh of islands: how often each axis crosses them, outer ones first.

    Args:
      sizes: result of `parse`.
      islands: number of slices or nodes.

    Raises:
      UserError: the axes cannot be split at the borders of the islands.
    """
    shape, remaining = [], islands
    for axis in AXES:
        # Outer axes communicate least in a step, so they cross as many of the slow borders as they
        # can.
        shape.append(math.gcd(sizes[axis], remaining))
        remaining //= shape[-1]
    if remaining > 1:
        axes = ", ".join(f"{axis}:{sizes[axis]}" for axis in AXES)
        raise UserError(
            f"A mesh of {axes} cannot be split at the borders of {islands} slices or nodes; "
            f"legal: axes whose product is a multiple of {islands}, outer ones first."
        )
    return shape


def describe(mesh: AnyMesh) -> str:
    """Returns the axes longer than 1, such as "data:2,fsdp:4", or "one device"."""
    named = [f"{axis}:{size}" for axis, size in mesh.shape.items() if size > 1]
    return ",".join(named) or "one device"


def local_rows(mesh: AnyMesh, rows: int) -> tuple[int, ...]:
    """Returns the rows of a batch on this process's devices, ascending.

    Raises:
      UserError: the rows do not shard evenly, or the devices are only described.
    """
    if isinstance(mesh, AbstractMesh):
        raise UserError(f"The devices of {describe(mesh)} are only described; none holds rows.")
    shards = batch_shards(mesh)
    if rows % shards:
        raise UserError(
            f"A batch of {rows} sequences cannot be sharded over {shards} devices "
            f"({' x '.join(f'{axis}:{mesh.shape[axis]}' for axis in BATCH_AXES)}); legal: a "
            f"multiple of {shards}."
        )
    # [batch shards, devices that have the same rows]; P(BATCH_AXES) numbers the shards in this
    # order.
    order = [mesh.axis_names.index(axis) for axis in BATCH_AXES]
    others = [i for i in range(mesh.devices.ndim) if i not in order]
    devices = mesh.devices.transpose(*order, *others).reshape(shards, -1)
    process = jax.process_index()
    local = [any(d.process_index == process for d in shard) for shard in devices]
    return tuple(int(r) for r in np.flatnonzero(np.repeat(local, rows // shards)))


def batch_shards(mesh: AnyMesh) -> int:
    """Returns the number of shards of a batch's rows."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
