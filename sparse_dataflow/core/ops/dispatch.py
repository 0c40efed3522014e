"""Queries of platform, mesh and shapes that ops share, and the log line of a choice."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from absl import logging
from jax import lax
from jax.sharding import PartitionSpec as P

Shaped = jax.Array | jax.ShapeDtypeStruct
"""An operand whose shape and dtype alone are read."""


def platform() -> str:
    """Return the target platform: "cpu", "tpu" or "gpu" (any vendor).

    The abstract mesh's device decides where there is one, else the default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def sharding_refusal() -> str:
    """Return why a Pallas kernel cannot run here; empty if it can.

    XLA cannot partition a Pallas kernel. One device or `shard_map` avoids the need.
    """
    mesh = jax.sharding.get_abstract_mesh()
    unsharded = jax.device_count() == 1
    if not mesh.empty:
        manual = jax.sharding.AxisType.Manual
        unsharded = all(
            size == 1 or kind == manual for size, kind in zip(mesh.axis_sizes, mesh.axis_types)
        )
    return "" if unsharded else "arrays may be sharded outside shard_map."


@functools.cache
def log_choice(op: str, name: str, platform: str, reason: str = "") -> None:
    """Log once which implementation runs, and why the faster one was refused."""
    because = reason and f", because {reason}"
    logging.info("%s: implementation %s on %s%s", op, name, platform, because)


def equally_varying(*operands: Any) -> Any:
    """Returns operands (pytrees) that all vary over the same axes of `shard_map`.

    A custom gradient of an operand that varies less than another would vary too much.  JAX sums the
    gradient of the operand over the axes that are added here.
    """
    axes = frozenset[str]().union(*map(_varying, jax.tree.leaves(operands)))

    def vary(leaf):
        missing = tuple(axes - _varying(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, operands) if axes else operands


def _varying(operand):
    """Returns the axes of `shard_map` over which an operand varies."""
    aval = jax.typeof(operand)
    manual = getattr(aval, "manual_axis_type", None)  # Since jax 0.11; `vma` before.
    return aval.vma if manual is None else manual.varying


def over_auto_axes(function: Callable, x: jax.Array, *others: Any) -> jax.Array | None:
    """Returns `function(x, *others)` of a product with x on a mesh with Explicit axes, else None.

    Products split and merge axes in ways for which JAX asks how the result is sharded.  Within
    `function` the compiler decides.  The result is sharded as x, its last axis replicated.
    """
    mesh, aval = jax.sharding.get_abstract_mesh(), jax.typeof(x)
    mesh = aval.sharding.mesh if mesh.empty else mesh
    if jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return None
    spec = (*aval.sharding.spec, *(None,) * x.ndim)[: x.ndim - 1]
    return jax.sharding.auto_axes(function, out_sharding=P(*spec, None))(x, *others)


def at_most(size: Any, limit: int) -> bool:
    """Returns whether a dimension is known to be at most a limit; one of `jax.export` is not."""
    return isinstance(size, int) and size <= limit
