"""Which mesh axes an array has when its kernel becomes stored blocks: metadata and placement."""

import contextlib
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.core import spmd
from jax.sharding import AxisType, Mesh, NamedSharding

_LOG = logging.getLogger(__name__)

_NAMES = ("out_sharding", "sharding_names", "sharding")
"""Metadata of a variable that name its axes, in this and earlier versions of flax."""

_KERNEL = "kernel_out_sharding"
"""Metadata of stored blocks: the names of the kernel's axes, which `sd.densify` gives back."""


def folded(variable: object, value: jax.Array, groups: Sequence[Sequence[int]]) -> nnx.Variable:
    """Returns a variable of the type and metadata of another, whose axes are joined.

    Args:
      variable: the parameter; metadata may name the mesh axis of each of its axes.
      value: the array, with an axis for each group.
      groups: axes of `variable` that each axis of `value` has the features of.
    """
    if not isinstance(variable, nnx.Variable):
        return nnx.Param(value)
    metadata = dict(variable.get_metadata())
    mesh = _mesh_of(variable, metadata)
    metadata = joined_names(metadata, groups, value.shape, mesh)
    return variable_of(type(variable), value, metadata, mesh)


def unfolded(variable: object, value: jax.Array) -> nnx.Variable:
    """Returns the kernel or bias of stored blocks: inverse of `folded`."""
    if not isinstance(variable, nnx.Variable):
        return nnx.Param(value)
    metadata = dict(variable.get_metadata())
    mesh = _mesh_of(variable, metadata)
    names = metadata.get(_KERNEL)
    if names is not None and len(names) == value.ndim:
        metadata |= {_name_of(metadata): metadata.pop(_KERNEL)}
    elif value.ndim != variable.ndim:
        metadata.pop(_name_of(metadata), None)
    return variable_of(type(variable), value, metadata, mesh)


def joined_names(
    metadata: Mapping[str, Any],
    groups: Sequence[Sequence[int]],
    shape: Sequence[int],
    mesh: Any = None,
) -> dict[str, object]:
    """Returns metadata for joined axes: the mesh axes of all that an axis joins and they divide.

    Logical names are translated by the rules of the metadata and of `nnx.logical_axis_rules`, as
    far as there are any.  Names of a mesh whose size does not divide an axis are left out, which
    is logged.
    """
    metadata, key = dict(metadata), _name_of(metadata)
    entries = {name: metadata.pop(name) for name in _NAMES if name in metadata}
    names = next((each for each in entries.values() if each is not None), None)
    if names is None:
        return metadata
    if isinstance(names, NamedSharding):
        metadata["mesh"], names = names.mesh, names.spec
    names = tuple(names) + (None,) * (max(map(max, filter(None, groups))) + 1 - len(names))
    mesh = metadata.get("mesh") or mesh or jax.sharding.get_abstract_mesh()
    sizes = {} if mesh.empty else dict(mesh.shape)
    new: list[str | tuple[str, ...] | None] = []
    for group, length in zip(groups, shape, strict=True):
        translated = {
            name: _mesh_axes(name, metadata) for axis in group for name in _flat(names[axis])
        }
        axes_of_group = [
            axis for axes in translated.values() for axis in axes if not sizes or axis in sizes
        ]
        legal: list[str] = []
        for axis in dict.fromkeys(axes_of_group):
            shards = math.prod(sizes.get(each, 1) for each in (*legal, axis))
            if length % shards == 0 and not any(axis in _flat(each) for each in new):
                legal.append(axis)
        if missing := [axis for axis in dict.fromkeys(axes_of_group) if axis not in legal]:
            _say_replicated(
                length, tuple(missing), {axis: sizes.get(axis) for axis in axes_of_group}
            )
        # A logical name that has these axes alone stays, because linen's rules translate it later,
        # and take the axes of a tuple as they are.
        alone = [name for name, axes in translated.items() if legal and axes == legal]
        new.append((*alone, *legal)[0] if alone or len(legal) == 1 else tuple(legal) or None)
    metadata.setdefault(_KERNEL, names)
    return {**metadata, key: tuple(new)}


def _name_of(metadata):
    """Returns the name that metadata have for the mesh axes of a variable; flax's if they have
    none."""
    return next((name for name in _NAMES if metadata.get(name) is not None), _name_in_flax())


@functools.cache
def _name_in_flax():
    """Returns the name that this version of flax has for the mesh axes of a variable."""
    variable: Any = nnx.with_partitioning(lambda: 0, ("axis",))()
    return next(name for name in _NAMES if variable.metadata.get(name))


def _mesh_axes(name, metadata):
    """Returns the mesh axes of a name, which may be a logical one."""
    rules = spmd.composite_rules(
        spmd.get_logical_axis_rules(), metadata.get("sharding_rules") or ()
    )
    return list(_flat(dict(rules).get(name, name)))


def _flat(entry):
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


_warned: set[tuple] = set()


def _say_replicated(length, missing, sizes):
    """Logs once that an axis is not sharded over mesh axes."""
    if (length, missing) not in _warned:
        _warned.add((length, missing))
        over = ", ".join(f"{axis} ({sizes[axis]})" for axis in missing)
        _LOG.warning(
            "%d stored blocks are not sharded over %s, which do not divide them.", length, over
        )


def _mesh_of(variable, metadata):
    """Returns the mesh that a variable is on, or None."""
    sharding = getattr(variable.get_value(), "sharding", None)
    if metadata.get("mesh") is not None:
        return metadata["mesh"]
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def variable_of(
    kind: type, value: object, metadata: Mapping[str, object], mesh: object = None
) -> Any:
    """Returns a variable, placed now if its metadata ask for that and a mesh is known.

    Args:
      kind: class of the variable.
      value: its array.
      metadata: its metadata.
      mesh: the mesh where neither the metadata nor the context have one.
    """
    metadata = dict(metadata)
    scope: contextlib.AbstractContextManager = contextlib.nullcontext()
    eager = metadata.get("eager_sharding", nnx.using_eager_sharding())
    if metadata.get(_name_of(metadata)) and eager and metadata.get("mesh") is None:
        if jax.sharding.get_abstract_mesh().empty:
            if isinstance(mesh, Mesh):
                scope = jax.set_mesh(mesh)
            else:
                # flax raises an error where it shards at once and knows no mesh.
                metadata["eager_sharding"] = False
    with scope:
        return kind(value, **metadata)


def placed(array: Any, like: object) -> Any:
    """Returns an array sharded as another, over axes of the mesh that divide it.

    Of an abstract array it returns an abstract one.
    """
    sharding, abstract = getattr(like, "sharding", None), isinstance(like, jax.ShapeDtypeStruct)
    if isinstance(array, jax.core.Tracer) or not isinstance(sharding, NamedSharding):
        return jax.ShapeDtypeStruct(array.shape, array.dtype) if abstract else array
    spec = []
    for size, axes in zip(array.shape, (*sharding.spec, *(None,) * array.ndim)):
        shards = math.prod(sharding.mesh.shape[name] for name in _flat(axes))
        spec.append(axes if size % shards == 0 else None)
    sharding = NamedSharding(sharding.mesh, jax.P(*spec))
    if abstract:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    return jax.device_put(array, sharding)


def over_auto_axes(array: jax.Array) -> jax.Array:
    """Returns an array that is not sharded over Explicit axes, over which it cannot be indexed."""
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return jax.sharding.reshard(array, jax.P(*(None,) * array.ndim))
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return array
    # A mesh without axis types has Auto axes.
    mesh = jax.sharding.Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return jax.device_put(array, NamedSharding(mesh, sharding.spec))


def constrained(y: jax.Array, out_sharding: object) -> jax.Array:
    """Returns a result with the sharding that a caller asked for, as `jax.lax.dot_general` does.

    Over Auto axes, where `dot_general` refuses the argument, it is a constraint.
    """
    if out_sharding is None:
        return y
    mesh = getattr(out_sharding, "mesh", None) or jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(y, out_sharding)
    return jax.lax.with_sharding_constraint(y, out_sharding)
