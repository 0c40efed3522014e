"""Where a model lies: the mesh and what its axes can cut, the executor, and which process this is.

Importing this module loads no jax.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import ROW_PARALLEL
from sparse_dataflow.core.config.settings import (
    ADOPTED,
    ASKED,
    FRESH,
    MOST_SECONDS,
    Readable,
    between,
    positive,
    setting,
    shown,
    validate,
)
from sparse_dataflow.files.errors import UserError

EXECUTORS = ("auto", "whole", "pipeline", "relay")
EXPERTS = ("gather", "exchange")
STASHES = ("device", "host")
CLIPPINGS = ("exact", "eager")
MOST_PROCESSES = 2**20
MOST_BYTES = 1e15
MOST_SUB_BATCHES = 8
PINNED_SETTING = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable of XLA: limit of page-locked host memory for CUDA devices, in GiB."""
PINNED_GIB = 64
"""Its default (`GetGpuHostAllocator` in XLA's pjrt/gpu/gpu_helpers.cc)."""
ONLY_RELAY = ("stash", "clipping", "server_dir", "depth_schedule")
"""Settings that no other executor reads."""


@dataclasses.dataclass(frozen=True, repr=False)
class ParallelConfig(Readable):
    """The parallel plan of a run; it does not change the results.

    Attributes:
      sub_batches: the overlap of arXiv 2305.13525.
      schedule: a name in `executors.pipeline.schedules`.
      memory_limit: compared with the planner's estimate.
      depth_schedule: see `DepthSchedule`.
    """

    executor: str = setting(
        "auto",
        "whole: all layers in one program. pipeline: micro-batches stream through the stages of "
        "the mesh. relay: one layer at a time on the device, parameters in host memory. auto: "
        "pipeline where the mesh has stages, else whole.",
        choices=EXECUTORS,
        resumed=ADOPTED,
    )
    mesh: str = setting(
        "auto",
        "Devices along each axis, as in data:2,fsdp:4,tensor:8 (data replicates, stage cuts by "
        "layers, fsdp shards, context shards the tokens of a sequence, tensor cuts every layer, "
        "feature cuts it by the features of the residual stream too); one size may be left out. "
        "With auto the planner chooses; on a CPU it is fsdp over all devices.",
        resumed=FRESH,
    )
    zero: int = setting(
        3,
        "What fsdp shards: 0 nothing, 1 moments, 2 gradients too, 3 parameters too.",
        legal=("0 to 3", lambda level: 0 <= level <= 3),
        resumed=FRESH,
    )
    experts: str = setting(
        "gather",
        "What fsdp sends for the experts of a layer: gather sends all weights to every device, "
        "exchange sends each token to the devices of its experts (all-to-all).",
        choices=EXPERTS,
        resumed=FRESH,
    )
    sub_batches: int = setting(
        1,
        "Parts of a micro-batch that pass through each layer in turn, so that collectives of one "
        "can overlap with products of another. Not with stages, the relay and experts; no effect "
        "on one device.",
        legal=between(1, MOST_SUB_BATCHES),
        resumed=FRESH,
    )
    schedule: str = setting(
        "1f1b",
        "Pipeline schedule: gpipe, 1f1b, interleaved:V (V model chunks a stage) or zero_bubble.",
        resumed=FRESH,
    )
    memory_limit: str = setting(
        "",
        "Bytes a device that training may use, as in 16GiB or 16e9: the planner then chooses "
        "which layers keep, recompute or offload their activations (model.remat). Empty is no "
        "limit.",
        resumed=ADOPTED,
    )
    stash: str = setting(
        "device",
        "Where the relay stores layer inputs until the backward pass; with host, device memory "
        "does not depend on the depth.",
        choices=STASHES,
        resumed=ADOPTED,
    )
    clipping: str = setting(
        "exact",
        "Gradient clipping of the relay: exact uses the global norm, as whole does; eager clips "
        "and applies each section's gradient at once, which overlaps with compute.",
        choices=CLIPPINGS,
    )
    server_dir: str = setting(
        "",
        "Folder of the relay's mapped files for masters and moments; empty is host memory.",
        resumed=ASKED,
        path=True,
    )
    depth_schedule: str = setting(
        "constant",
        "Layers in a step of the relay: constant; drop:P leaves each out with probability P; "
        "grow:F starts with the first F of them.",
    )
    coordinator: str = setting(
        "", "host:port of process 0; empty reads JAX_COORDINATOR_ADDRESS.", resumed=FRESH
    )
    processes: int = setting(
        0,
        "Processes of the run; 0 reads JAX_NUM_PROCESSES, else 1.",
        legal=between(0, MOST_PROCESSES),
        resumed=FRESH,
    )
    process: int = setting(
        -1,
        "Number of this process, from 0; -1 reads JAX_PROCESS_ID.",
        legal=between(-1, MOST_PROCESSES - 1),
        resumed=FRESH,
    )
    join_timeout: float = setting(
        300.0,
        "Seconds that processes wait for the last one.",
        legal=positive(MOST_SECONDS),
        resumed=FRESH,
    )
    heartbeat: float = setting(
        30.0,
        "Seconds of silence after which every process names the silent one; after ten times as "
        "long all exit with status 75.",
        legal=positive(MOST_SECONDS),
        resumed=FRESH,
    )

    def __post_init__(self):
        validate(self, "parallel")
        _ = self.memory_limit_bytes  # Refuses an illegal one.

    @property
    def memory_limit_bytes(self) -> int | None:
        """Bytes of `memory_limit`; None without one.

        Raises:
          UserError: it is no number of bytes.
        """
        if not self.memory_limit:
            return None
        match = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)(GiB|MiB)?", self.memory_limit)
        size = float(match[1]) * {"GiB": 2**30, "MiB": 2**20, None: 1}[match[2]] if match else 0
        if not 1 <= size <= MOST_BYTES:
            raise UserError(
                f"parallel.memory_limit={shown(self.memory_limit)} is not legal; legal: bytes "
                f"from 1 to {MOST_BYTES:g}, as in 16GiB, 512MiB or 16e9."
            )
        return int(size)


AUTO_MESH = "auto"

AXES = ("data", "stage", "fsdp", "context", "feature", "tensor")
"""Mesh axes from outermost to innermost; inner axes communicate more in a step.

"data" replicates the model, "stage" splits its layers, "fsdp" shards what `parallel.zero` says.
"context" shards the tokens of each sequence, and the state as fsdp does.  "tensor" and "feature"
shard every layer in two dimensions, the latter by the features of the residual stream.  BATCH_AXES
shard the rows of a batch.
"""


def parse_mesh(text: str, devices: int | None) -> dict[str, int]:
    """Parses "data:8,tensor:4" or "auto" (all devices in "fsdp") to {axis: size}, in AXES order.

    One size may be -1 or missing, as in "data,tensor:4": it takes the remaining devices.

    Args:
      text: value of --mesh.
      devices: number of devices that the mesh must use; None for the product of the sizes.

    Raises:
      UserError: an unknown or repeated axis, an invalid size, or a product other than `devices`;
        names the legal values.
    """
    if text == AUTO_MESH:
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
    for name in sorted(sizes, key=AXES.index, reverse=True):
        legal[name] = math.gcd(sizes[name], remaining) if sizes[name] > 0 else 1
        remaining //= legal[name]
    outer = next(name for name in AXES if name in legal)
    legal[outer] *= remaining
    return ",".join(f"{name}:{legal[name]}" for name in AXES if name in legal)


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Returns the axes longer than 1, such as "data:2,fsdp:4"; "fsdp:1" for one device."""
    return ",".join(f"{axis}:{sizes[axis]}" for axis in AXES if sizes[axis] > 1) or "fsdp:1"


def key_value_copies(config: ModelConfig, tensor: Any) -> Any:
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
    if model.low_rank_projections:
        return "cannot cut weights of sparsity.pattern=low_rank"
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


def expert_rows(config: ModelConfig, tokens: int) -> int:
    """Returns the most rows of an expert, for the tokens of a micro-batch on a device."""
    choices = tokens * config.prototypes * config.top_k
    if not config.expert_capacity:
        return choices
    return min(choices, math.ceil(config.expert_capacity * choices / config.experts))


def exchanged_rows(config: ModelConfig, tokens: int, devices: int) -> int:
    """Returns the rows that a device can send to another, and so has room for in its buffer.

    Without a capacity, that is every choice that tokens can have of the experts of one device.

    Args:
      tokens: tokens of a micro-batch on a device.
      devices: number of devices, each with equally many consecutive experts.
    """
    local, group = config.experts // devices, config.experts // config.prototypes

    def choices(first):
        """Returns the most choices that a token has of the experts of one device."""
        shares = (
            min(first + local, start + group) - max(first, start)
            for start in range(0, config.experts, group)
        )
        return sum(min(config.top_k, max(0, share)) for share in shares)

    most = tokens * max(map(choices, range(0, config.experts, local)))
    return min(most, local * expert_rows(config, tokens))


GROWN_AT = 0.5
"""Fraction of the steps after which a growing network has all blocks."""


@dataclasses.dataclass(frozen=True)
class DepthSchedule:
    """Schedule of the depth.

    Attributes:
      kind: "constant"; "drop": every block is left out of a step with probability `value`
        (LayerDrop, arXiv 1909.11556, section 3.2); "grow": training starts with the first `value`
        of the blocks, the others join one by one until GROWN_AT of the steps.
      value: a fraction in (0, 1); 0 if the kind is "constant".
    """

    kind: str = "constant"
    value: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "DepthSchedule":
        """Parses "constant", "drop:0.1" or "grow:0.25".

        Raises:
          UserError: an unknown schedule; names the legal ones.
        """
        kind, _, number = text.partition(":")
        try:
            value = float(number) if kind != "constant" else 0.0
        except ValueError:
            value = -1.0
        valid = kind in ("drop", "grow") and 0 < value < 1
        if not valid and text != "constant":
            raise UserError(
                f"--set parallel.depth_schedule={text} is unknown; legal: constant, drop:P (each "
                "block is left out of a step with probability P) or grow:F (training starts with "
                "the first F of the blocks), P and F above 0 and below 1."
            )
        return cls(kind, value)

    def starting_blocks(self, num_layers: int) -> int:
        """Returns the number of blocks in the first step; they are the first of the model."""
        if self.kind != "grow":
            return num_layers
        return max(1, round(self.value * num_layers))

    def active(self, num_layers: int, step: int, steps: int, seed: int) -> tuple[int, ...]:
        """Returns the blocks of step `step` (from 0) of `steps`, ascending, at least one.

        Depends on the arguments alone, so that a resumed run uses the same blocks.
        """
        if self.kind == "drop":
            draws = np.random.default_rng([seed, step]).random(num_layers)
            blocks = np.flatnonzero(draws >= self.value)
            return tuple(map(int, blocks)) or (int(np.argmax(draws)),)
        return tuple(range(int(self._grown(num_layers, np.asarray(step), steps))))

    def mean_share(self, num_layers: int, start: int, stop: int, steps: int) -> float:
        """Returns the mean share of the blocks in the steps from `start` to `stop` of `steps`.

        It is the expected share where the blocks are drawn.
        """
        if self.kind == "drop":  # Where all blocks are dropped, one of them stays.
            return 1 - self.value + self.value**num_layers / num_layers
        if self.kind == "constant" or stop <= start:
            return 1.0
        blocks = self._grown(num_layers, np.arange(start, stop), steps)
        return float(np.mean(blocks)) / num_layers

    def _grown(self, num_layers, step, steps):
        """Returns int [...], the number of blocks in each step of a schedule that draws none."""
        start = self.starting_blocks(num_layers)
        grown = np.minimum(1.0, step / max(1, GROWN_AT * steps))
        return start + ((num_layers - start) * grown).astype(int)
