"""Arithmetic of a mesh: its axes, and what they can cut.  Loads no jax."""

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import ROW_PARALLEL
from sparse_dataflow.files.errors import UserError

MOST_SUB_BATCHES = 8


AUTO_MESH = "auto"

AXES = ("data", "stage", "fsdp", "context", "feature", "tensor")
"""Mesh axes from outermost to innermost; inner axes communicate more in a step.

"data" replicates the model, "stage" splits its layers, "fsdp" shards what `parallel.zero` says.
"context" shards the tokens of each sequence, and the state as fsdp does.  "tensor" and "feature"
shard every layer in two dimensions, the latter by the features of the residual stream.  BATCH_AXES
shard the rows of a batch.
"""


def parse_mesh(text: str, devices: int | None, legal: Sequence[str] = AXES) -> dict[str, int]:
    """Parses "data:8,tensor:4" or "auto" (all devices in "fsdp") to {axis: size}, in AXES order.

    One size may be -1 or missing, as in "data,tensor:4": it takes the remaining devices.

    Args:
      text: value of --mesh.
      devices: number of devices that the mesh must use; None for the product of the sizes.
      legal: axes that may be named.

    Raises:
      UserError: another or a repeated axis, an invalid size, or a product other than `devices`;
        names the legal values.
    """
    if text == AUTO_MESH and legal == AXES:
        return {axis: (devices or 1) if axis == "fsdp" else 1 for axis in AXES}
    sizes: dict[str, int] = {}
    for entry in text.split(","):
        name, _, size = (word.strip() for word in entry.partition(":"))
        if name not in legal:
            near = difflib.get_close_matches(name, legal, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            auto = ", or auto" if legal == AXES else ""
            raise UserError(
                f"--mesh={text}: {name!r} is not an axis here; {hint}Legal: "
                f"{', '.join(legal)}{auto}."
            )
        if name in sizes:
            raise UserError(f"--mesh={text} names {name} twice; give each axis once.")
        sizes[name] = _axis_size(text, name, size)
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


def _axis_size(text, name, size):
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
    # Inner axes first: they keep their sizes, and the outermost takes what is left.
    for name in sorted(sizes, key=AXES.index, reverse=True):
        legal[name] = math.gcd(sizes[name], remaining) if sizes[name] > 0 else 1
        remaining //= legal[name]
    outer = next(name for name in AXES if name in legal)
    legal[outer] *= remaining
    return ",".join(f"{name}:{legal[name]}" for name in AXES if name in legal)


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Returns the axes longer than 1, such as "data:2,fsdp:4"; "fsdp:1" for one device."""
    return ",".join(f"{axis}:{sizes[axis]}" for axis in AXES if sizes[axis] > 1) or "fsdp:1"


def key_value_copies(config: ModelConfig, tensor: object) -> Any:
    """Returns how many of `tensor` chips compute the same key/value head; also of arrays of counts.

    Where there are more chips than key/value heads, the weights of separate projections `k` and `v`
    are replicated over them, and each chip computes the head that its queries read.
    """
    if config.fused_qkv:
        return 1
    return np.maximum(1, np.asarray(tensor) // config.kv_heads)


def cut_run_length(model: ModelConfig) -> int:
    """Returns the features in a run of the residual stream that the axis cuts into equal parts.

    It is the side of the stored blocks, so that every block is cut alike; d_model without any.
    """
    sides = [model.linear(name).block for name in model.sparse_projections]
    return max(sides, default=model.d_model)


def feature_obstacle(model: ModelConfig, tensor: int, feature: int) -> str:
    """Returns why the axis "feature" cannot have a size; empty if it can.

    Args:
      tensor: size of the axis "tensor", which must be legal.
      feature: size of the axis.
    """
    if feature == 1:
        return ""
    if model.experts:
        return "cannot cut experts"
    for name, spec in dict(model.linears).items():
        if "feature_axis" not in spec.weight.offers:
            return f"cannot cut {spec.weight.words}, as {name}"
    if key_value_copies(model, tensor) > 1:
        return f"needs a tensor axis of at most the {model.kv_heads} key/value heads"
    sparse, run = model.sparse_projections, cut_run_length(model)
    if len({model.linear(name).block for name in sparse}) > 1:
        return "needs blocks of the same side in all block-sparse projections"
    counts = {f"{model.kv_heads} key/value heads": (model.kv_heads, tensor * feature)}
    for name in model.projections:
        if name not in ROW_PARALLEL:
            features = model.projection_shape(name)[1]
            counts[f"the {features} output features of {name}"] = features, tensor * feature
    counts[f"the {run} features of a block" if sparse else f"d_model {run}"] = run, feature
    words = next((words for words, (count, by) in counts.items() if count % by), "")
    if words:
        return f"does not divide {words}"
    # A transform mixes consecutive features, which must be on one device.
    mixed = max(model.linear(name).hadamard for name in model.projections)
    if mixed and run // feature % mixed:
        return f"leaves {run // feature} consecutive features to sparsity.hadamard={mixed}"
    return ""
