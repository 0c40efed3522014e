"""Platform queries that ops use to choose an implementation, and the log line of the choice."""

import functools

import jax
from absl import logging

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
