"""A mesh of devices as text: `--mesh=data:8,fsdp:4,tensor:8`.

Pure Python: importing this module loads no jax.
"""

import difflib
import math
from collections.abc import Mapping

from sparse_dataflow.files.errors import UserError

AUTO = "auto"

AXES = ("data", "stage", "fsdp", "context", "feature", "tensor")
"""Mesh axes from outermost to innermost; inner axes communicate more in a step.

"data" replicates the model, "stage" splits its layers, "fsdp" shards what `parallel.zero` says.
"context" shards the tokens of each sequence, and the state as fsdp does.  "tensor" and "feature"
shard every layer in two dimensions, the latter by the features of the residual stream.  BATCH_AXES
shard the rows of a batch.
"""


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
    if text == AUTO:
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


def text(sizes: Mapping[str, int]) -> str:
    """Returns the axes longer than 1, such as "data:2,fsdp:4"; "fsdp:1" for one device."""
    return ",".join(f"{axis}:{sizes[axis]}" for axis in AXES if sizes[axis] > 1) or "fsdp:1"
