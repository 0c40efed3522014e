"""A mesh of devices from `--mesh=data:8,fsdp:4,tensor:8`."""

import difflib
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh

from sparse_dataflow.files.errors import UserError

AXES = ("data", "stage", "fsdp", "tensor")
"""From the outermost to the innermost: the further in, the more an axis says in a step.

"data" holds copies of the model, "stage" cuts it by layers, "fsdp" deals out what `--zero` says,
"tensor" cuts every layer.  Rows of a batch are dealt out over BATCH_AXES.
"""

BATCH_AXES = ("data", "fsdp")

AnyMesh = Mesh | AbstractMesh
"""Of devices, or of described ones that need not be here."""


def parse(text: str, devices: int | None) -> dict[str, int]:
    """Axis sizes in the order of AXES, of "data:8,tensor:4" or "auto" (all devices in "fsdp").

    One size may be -1, or left out as in "data,tensor:4": what the others leave.

    Args:
      text: of the flag.
      devices: that the mesh must use, all of them; None for as many as the sizes say.

    Raises:
      UserError: an unknown or repeated axis, a size that is none, or a product other than
        `devices`; the legal values are named.
    """
    if text == "auto":
        return {axis: (devices or 1) if axis == "fsdp" else 1 for axis in AXES}
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition(":"))
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"--mesh={text}: {name!r} is no axis; {hint}Legal: {', '.join(AXES)}, or auto."
            )
        if name in sizes:
            raise UserError(f"--mesh={text} names {name} twice; give each axis once.")
        sizes[name] = _size(text, name, size)
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise UserError(
            f"--mesh={text} leaves the sizes of {' and '.join(open_axes)} open; legal: one axis."
        )
    given = math.prod(size for size in sizes.values() if size != -1)
    if devices is None:
        devices = given
    if open_axes and devices % given == 0:
        sizes[open_axes[0]] = devices // given
    if math.prod(sizes.values()) != devices or (open_axes and devices % given):
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
            f"--mesh={text}: {name} has the size {size!r}; legal: 1 or more, or -1 for what the "
            "other axes leave."
        )
    return number


def _product(sizes):
    return " x ".join(str(size) for size in sizes.values() if size != -1)


def _nearest(sizes, devices):
    """A legal mesh of the same axes: each as large as asked for where it divides what is left."""
    found, left = {}, devices
    for name in sorted(sizes, key=AXES.index, reverse=True):
        found[name] = math.gcd(sizes[name], left) if sizes[name] > 0 else 1
        left //= found[name]
    outer = next(name for name in AXES if name in found)
    found[outer] *= left
    return ",".join(f"{name}:{found[name]}" for name in AXES if name in found)


def make(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with all of AXES, laid out so that inner axes are near each other.

    Where devices belong to several slices, or, without fast links between them, to several nodes,
    the outermost axes are those that cross (jax's hybrid mesh).

    Args:
      sizes: of `parse`.
      devices: in the order of their numbers; those that are there where None.

    Raises:
      UserError: the axes cannot be cut at the borders of slices or nodes.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = [sizes[axis] for axis in AXES]
    groups, by_process = _groups(devices)
    if groups == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(grid, AXES)
    crossed = across(sizes, groups)
    inside = [size // other for size, other in zip(shape, crossed)]
    grid = mesh_utils.create_hybrid_device_mesh(
        inside, crossed, devices, process_is_granule=by_process
    )
    return Mesh(grid, AXES)


def _groups(devices):
    """(groups of devices with fast links inside, whether a group is a process)."""
    slices = {getattr(device, "slice_index", None) for device in devices}
    if len(slices) > 1:
        return len(slices), False
    processes = {device.process_index for device in devices}
    return (1, False) if devices[0].platform == "tpu" else (len(processes), True)


def across(sizes: Mapping[str, int], groups: int) -> list[int]:
    """How many parts of each axis lie in different groups, taken from the outermost axis on.

    Args:
      sizes: of `parse`.
      groups: slices or nodes.

    Raises:
      UserError: the axes cannot be cut so.
    """
    parts, left = [], groups
    for axis in AXES:
        part = math.gcd(sizes[axis], left)
        parts.append(part)
        left //= part
    if left > 1:
        axes = ", ".join(f"{axis}:{sizes[axis]}" for axis in AXES)
        raise UserError(
            f"A mesh of {axes} cannot be cut at the borders of {groups} slices or nodes; "
            f"legal: axes whose product is a multiple of {groups}, outer ones first."
        )
    return parts


def describe(mesh: AnyMesh) -> str:
    """ "data:2,fsdp:4": the axes that are longer than 1, or "one device"."""
    named = [f"{axis}:{size}" for axis, size in mesh.shape.items() if size > 1]
    return ",".join(named) or "one device"


def rows_here(mesh: AnyMesh, rows: int) -> tuple[int, ...]:
    """Rows of a batch that are on this process's devices, ascending.

    Raises:
      UserError: the rows cannot be dealt out evenly, or the devices are only described.
    """
    if isinstance(mesh, AbstractMesh):
        raise UserError(f"The devices of {describe(mesh)} are only described; none holds rows.")
    parts = batch_parts(mesh)
    if rows % parts:
        raise UserError(
            f"A batch of {rows} sequences cannot be dealt out to {parts} devices "
            f"({' x '.join(f'{axis}:{mesh.shape[axis]}' for axis in BATCH_AXES)}); legal: a "
            f"multiple of {parts}."
        )
    order = [mesh.axis_names.index(axis) for axis in BATCH_AXES]
    others = [i for i in range(mesh.devices.ndim) if i not in order]
    by_part = mesh.devices.transpose(*order, *others).reshape(parts, -1)
    here = jax.process_index()
    mine = [any(d.process_index == here for d in part) for part in by_part]
    each = rows // parts
    return tuple(int(r) for r in np.flatnonzero(np.repeat(mine, each)))


def batch_parts(mesh: AnyMesh) -> int:
    """Into how many parts the rows of a batch are cut."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
