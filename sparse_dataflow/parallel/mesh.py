"""A mesh of devices from `--mesh=data:8,fsdp:4,tensor:8`."""

import difflib
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh

from sparse_dataflow.files.errors import UserError

AXES = ("data", "stage", "fsdp", "feature", "tensor")
"""Mesh axes from outermost to innermost; inner axes communicate more in a step.

"data" replicates the model, "stage" splits its layers, "fsdp" shards what `parallel.zero` says.
"tensor" and "feature" shard every layer in two dimensions, the latter by the features of the
residual stream. BATCH_AXES shard the rows of a batch.
"""

BATCH_AXES = ("data", "fsdp")

MODEL_AXES = ("tensor", "feature")
"""Axes that shard every layer, in the order in which they cut one dimension."""

AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or of described devices that need not exist."""


def parse(text: str, devices: int | None) -> dict[str, int]:
    """Parses "data:8,tensor:4" or "auto" (all devices in "fsdp") to {axis: size}, in AXES order.

    One size may be -1 or missing, as in "data,tensor:4": it takes the remaining devices.

    Args:
      text: value of --mesh.
      devices: number of devices that the mesh must use; None for the product of the sizes.

    Raises:
      UserError: an unknown or repeated axis, an invalid size, or a product other than `devices`;
        names the legal values.
    """
    if text == "auto":
        return {axis: (devices or 1) if axis == "fsdp" else 1 for axis in AXES}
    sizes: dict[str, int] = {}
    for entry in text.split(","):
        name, _, size = (word.strip() for word in entry.partition(":"))
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"--mesh={text}: {name!r} is not an axis; {hint}Legal: {', '.join(AXES)}, or auto."
            )
        if name in sizes:
            raise UserError(f"--mesh={text} names {name} twice; give each axis once.")
        sizes[name] = _size(text, name, size)
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise UserError(
            f"--mesh={text} leaves the sizes of {' and '.join(open_axes)} open; legal: one axis."
        )
    product = math.prod(size for size in sizes.values() if size != -1)
    if devices is None:
        devices = product
    if open_axes and devices % product == 0:
        sizes[open_axes[0]] = devices // product
    if math.prod(sizes.values()) != devices:  # A size that is still open is -1.
        raise UserError(
            f"--mesh={text} is a mesh of {_product(sizes)} devices, and there "
            f"{'is 1' if devices == 1 else f'are {devices}'}; legal: sizes whose product is "
            f"{devices}, such as --mesh={_nearest(sizes, devices)}."
        )
    return {axis: sizes.get(axis, 1) for axis in AXES}


def _size(text, name, size):
    try:
        number = int(size or -1)
    except ValueError:
        number = 0
    if number < 1 and number != -1:
        raise UserError(
            f"--mesh={text}: {name} has the size {size!r}; legal: 1 or more, or -1 for the "
            "remaining devices."
        )
    return number


def _product(sizes):
    return " x ".join(str(size) for size in sizes.values() if size != -1)


def _nearest(sizes, devices):
    """Returns a legal mesh of the same axes with sizes near the requested ones."""
    legal, remaining = {}, devices
    for name in sorted(sizes, key=AXES.index, reverse=True):
        legal[name] = math.gcd(sizes[name], remaining) if sizes[name] > 0 else 1
        remaining //= legal[name]
    outer = next(name for name in AXES if name in legal)
    legal[outer] *= remaining
    return ",".join(f"{name}:{legal[name]}" for name in AXES if name in legal)


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
    order = [mesh.axis_names.index(axis) for axis in BATCH_AXES]
    others = [i for i in range(mesh.devices.ndim) if i not in order]
    devices = mesh.devices.transpose(*order, *others).reshape(shards, -1)
    process = jax.process_index()
    local = [any(d.process_index == process for d in shard) for shard in devices]
    return tuple(int(r) for r in np.flatnonzero(np.repeat(local, rows // shards)))


def batch_shards(mesh: AnyMesh) -> int:
    """Returns the number of shards of a batch's rows."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
