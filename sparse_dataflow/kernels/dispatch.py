"""What an op may ask before it chooses an implementation, and how it says what it chose."""

import functools

import jax
from absl import logging

Shaped = jax.Array | jax.ShapeDtypeStruct
"""An operand of which only shape and dtype are read."""


def platform() -> str:
    """The platform compiled for: that of the abstract mesh's device, else of the default one.

    "cpu", "tpu" or, whoever made it, "gpu".
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def partitioned() -> str:
    """Why the compiler might have to split an op, which it cannot do inside a Mosaic kernel.

    Empty where it need not: on one device, or inside `shard_map`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    whole = jax.device_count() == 1
    if not mesh.empty:
        manual = jax.sharding.AxisType.Manual
        whole = all(
            size == 1 or kind == manual for size, kind in zip(mesh.axis_sizes, mesh.axis_types)
        )
    return "" if whole else "arrays may be sharded, and this is not inside shard_map."


@functools.cache
def log_choice(op: str, name: str, platform: str, reason: str = "") -> None:
    """Says once which implementation runs, and why none faster does."""
    because = reason and f", as {reason}"
    logging.info("%s: implementation %s on %s%s", op, name, platform, because)
