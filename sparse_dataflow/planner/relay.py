"""Estimate of a relay step: device, host and disk bytes, traffic, and how much of it overlaps.

The device holds two blocks, the activations of one micro-batch in a block, and those at block
boundaries, the stash (L2L, arXiv 2002.05645, section 3.4: `layers x batch` activations on the
device, or none if they go to the host).  Host memory holds masters and moments (12 bytes per stored
parameter, 8 for those of Muon; 8 and 6 with bfloat16 moments), copies of the weights for the
device, and gradients.

Pure Python: importing this module loads no jax.
"""

import dataclasses
import math
from collections.abc import Sequence

from sparse_dataflow.core.config.layer_groups import layer_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.parallel import PINNED_SETTING
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB, Chip
from sparse_dataflow.planner import memory
from sparse_dataflow.planner.memory import DTYPE_BYTES, MASTER_BYTES
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.plan_memory import plan_bytes

FILE_SLOTS = 2
"""Copies of masters and moments in the server's files: last step and current step."""

EFFICIENCY = 0.5
"""Assumed fraction of the peak rate: published dense training reaches from 41% (Megatron README,
H100) to 68% (MaxText README, v5p)."""

BACKWARD_PER_FORWARD = 3
"""Backward / forward FLOPs, including the recomputed forward pass of each block."""

UPDATE_RATES = {
    ("float32", "float32"): 430e6,
    ("float32", "bfloat16"): 310e6,
    ("bfloat16", "float32"): 240e6,
    ("bfloat16", "bfloat16"): 195e6,
}
"""(dtype of the moments, of the gradients) -> parameters per second that one core updates with
AdamW, by processor time of an AMD EPYC core (`host_optimizer.update`, 2**22 parameters).  Muon's
matrices take longer by their products, which are not counted."""

COPY_RATE = 1.8e9
"""Parameters per second that one such core rounds to bfloat16 (`host_optimizer.narrow`)."""

HOST_MEMORY_RATE = 100e9
"""Assumed bytes/s of host memory, which bounds the update however many cores there are: a third of
what eight channels of DDR5-4800 carry."""

_UNKNOWN = Chip("unknown")


@dataclasses.dataclass(frozen=True)
class RelayEstimate:
    """Estimate of one relay training step on one device.

    Attributes:
      device: category -> bytes on the device.
      host: category -> bytes in host memory.
      disk: bytes in the server's files.
      fetched: bytes per step from host to device.
      returned: bytes per step from device to host.
      updated: parameters per step that the host updates.
      transfer_seconds: of the slower direction, because both run concurrently; None if the rate is
        unknown.
      compute_seconds: at EFFICIENCY of the peak rate; None if the peak is unknown.
      update_seconds: of AdamW on the host's cores, with the copies that are not kept.
      overlaps: whether updates overlap with compute, as with eager clipping.
      micro_batches: smallest number of micro-batches of this size at which the forward pass of a
        block takes as long as fetching the next block; None if a rate is unknown.
    """

    device: dict[str, int]
    host: dict[str, int]
    disk: int
    fetched: int
    returned: int
    updated: int
    transfer_seconds: float | None
    compute_seconds: float | None
    update_seconds: float
    overlaps: bool
    micro_batches: int | None

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step without the flush of files; None if a rate is unknown."""
        if not self.transfer_seconds or not self.compute_seconds:
            return None
        device = max(self.transfer_seconds, self.compute_seconds)
        if self.overlaps:
            return max(device, self.update_seconds)
        return device + self.update_seconds

    @property
    def device_total(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        """Bytes in host memory."""
        return sum(self.host.values())

    def with_host_memory_of(self, others: Sequence["RelayEstimate"]) -> "RelayEstimate":
        """Returns this estimate with the host memory of concurrent runs added."""
        host = {
            name: size + sum(other.host[name] for other in others)
            for name, size in self.host.items()
        }
        return dataclasses.replace(self, host=host)

    def text(self) -> str:
        """Returns the estimate as a few lines of text."""
        lines = [
            f"relay plan: {self.device_total / GIB:,.3g} GiB on the device "
            f"({_listed(self.device)})",
            f"{self.host_total / GIB:,.3g} GiB in host memory ({_listed(self.host)})",
            f"{self.fetched / GIB:,.3g} GiB fetched and {self.returned / GIB:,.3g} GiB returned a "
            f"step, {self.updated:,} parameters updated",
        ]
        if self.disk:
            lines.insert(2, f"{self.disk / GIB:,.3g} GiB on disk")
        update = f"updates {self.update_seconds:,.3g} s on the host"
        update += " while it computes" if self.overlaps else " after it has computed"
        if self.step_seconds:
            lines.append(
                f"a step of {self.step_seconds:,.3g} s computes {self.compute_seconds:,.3g} s, "
                f"transfers {self.transfer_seconds:,.3g} s and {update}; transfers overlap with "
                f"compute from {self.micro_batches} micro-batches on"
            )
        else:
            lines.append(f"a step {update}")
        return "\n  ".join(lines)


def estimate(
    model: ModelConfig,
    training: TrainingConfig,
    *,
    stash: str = "device",
    clipping: str = "exact",
    files: bool = False,
    pinned: bool = True,
    chip: Chip = _UNKNOWN,
    fused_attention: bool = False,
    devices: int = 1,
    local_devices: int = 1,
    cores: int = 1,
    copies: bool = True,
) -> RelayEstimate:
    """Estimates bytes, traffic and seconds of one step.

    Args:
      model: the model; only stored blocks count.
      training: batch, sequence, micro-batches and optimizer.
      stash: "device" or "host".
      clipping: "exact" or "eager".
      files: whether masters and moments are in memory-mapped files.
      pinned: whether the host keeps page-locked copies for the device, even in float32.
      chip: gives the rates; times are None where they are unknown.
      fused_attention: see `ParallelPlan`.
      devices: data-parallel devices; each holds all parameters of a section.
      local_devices: devices of one process; each has its own page-locked copies and stash.
      cores: cores of the host that update.
      copies: whether the device's copies are kept; else each is made when it is fetched.

    Raises:
      UserError: the batch is not divisible by micro_batches x devices.
    """
    batch, sequence = training.batch, training.sequence
    micro_batches, state_dtype = training.micro_batches, training.state_dtype
    if batch % (micro_batches * devices):
        raise UserError(
            f"A batch of {batch} sequences is not divisible into {micro_batches} micro-batches on "
            f"{devices} devices."
        )
    compute = DTYPE_BYTES[model.compute_dtype]
    # The device has room for the largest blocks.
    largest = max(layer_groups(model), key=lambda group: memory.parameter_count(group.model)).model
    single = dataclasses.replace(largest, num_layers=1, shared_layers=False)
    block, rest = memory.block_and_rest(single)
    parameters = memory.parameter_count(model)
    tables = memory.table_bytes(single)
    tokens = batch * sequence // devices
    boundary = tokens * model.d_model * compute
    micro_batch = ParallelPlan(
        micro_batch=batch // micro_batches // devices, remat="full", fused_attention=fused_attention
    )
    micro = plan_bytes(single, sequence, micro_batch)
    accumulated = MASTER_BYTES if micro_batches > 1 else 0
    device = {
        "embedding and head": 2 * rest * compute,
        "two blocks": 2 * (block * compute + tables),
        "their gradients": block * (2 * compute + accumulated),
        "boundaries": boundary * ((model.num_layers + 3) if stash == "device" else 5),
        "inside a block": round(max(micro.activations + micro.working_set, micro.logits)),
    }
    state = parameters * MASTER_BYTES
    matrices = memory.matrix_count(model)
    state += memory.moment_bytes(model, parameters, matrices, state_dtype, training.optimizer)
    # Eager clipping frees the gradients of a block after its update.
    gradients = parameters if clipping == "exact" else rest + 3 * block
    # Without kept copies, those of the blocks that are fetched and of the head exist at once.
    copied = (parameters if copies else min(parameters, rest + 2 * block)) * compute
    if not pinned and compute == MASTER_BYTES:
        copied = 0
    stashed = boundary * model.num_layers if stash == "host" else 0
    host = {
        "masters and moments": 0 if files else state,
        "device's copies": copied * (local_devices if pinned else 1),
        "gradients": gradients * compute,
        "stash": local_devices * stashed,
    }
    # The embedding is fetched twice: for the first section, and for the tied output layer. The last
    # block stays for the backward pass.
    last = dataclasses.replace(layer_groups(model)[-1].model, num_layers=1, shared_layers=False)
    kept = memory.block_and_rest(last)[0] * compute + memory.table_bytes(last)
    fetched = 2 * (parameters * compute + memory.table_bytes(model)) - kept + stashed
    returned = parameters * compute + stashed
    transfer = max(fetched, returned) / chip.host_bandwidth if chip.host_bandwidth else None
    compute_seconds, block_seconds = _seconds(model, sequence, tokens, micro_batches, chip)
    fewest = None
    if chip.host_bandwidth and block_seconds:
        fewest = math.ceil((block * compute + tables) / chip.host_bandwidth / block_seconds)
    return RelayEstimate(
        device=device,
        host=host,
        disk=FILE_SLOTS * (state + memory.table_bytes(model)) if files else 0,
        fetched=fetched,
        returned=returned,
        updated=parameters,
        transfer_seconds=transfer,
        compute_seconds=compute_seconds,
        update_seconds=_update_seconds(
            parameters, state, model.compute_dtype, state_dtype, cores, copies
        ),
        overlaps=clipping == "eager",
        micro_batches=fewest,
    )


def _update_seconds(parameters, state, compute_dtype, state_dtype, cores, copies):
    """Returns the seconds of an update: by the cores, or by what the host's memory carries."""
    narrow = DTYPE_BYTES[compute_dtype] < MASTER_BYTES
    rate = cores * UPDATE_RATES[state_dtype, "bfloat16" if narrow else "float32"]
    # Masters and moments are read and written, gradients read, copies written.
    moved = 2 * state + 2 * parameters * DTYPE_BYTES[compute_dtype]
    seconds = max(parameters / rate, moved / HOST_MEMORY_RATE)
    if narrow and not copies:  # Both passes fetch.
        moved = 2 * parameters * (MASTER_BYTES + DTYPE_BYTES[compute_dtype])
        seconds += max(2 * parameters / (cores * COPY_RATE), moved / HOST_MEMORY_RATE)
    return seconds


def _seconds(model, sequence, tokens, micro_batches, chip):
    """Returns the seconds of a step, and of a block's forward pass over a micro-batch, or Nones."""
    peak = chip.peak(model.compute_dtype)
    if not peak:
        return None, None
    forward = cost.flops_per_token(model, sequence, training=False, causal_half=False)
    blocks, rate = forward.total - forward.head, peak * EFFICIENCY
    total = blocks * (1 + BACKWARD_PER_FORWARD) + 3 * forward.head
    return tokens * total / rate, tokens / micro_batches * blocks / model.num_layers / rate


def check_host_memory(step: RelayEstimate, available: int, processes: int = 1) -> None:
    """Checks that host memory can hold a relay run.

    Args:
      step: estimate of one process, which holds the whole server.
      available: bytes of host memory.
      processes: processes of the run on this machine.

    Raises:
      UserError: the run needs more; names both sizes and flags that need less.
    """
    need = processes * step.host_total
    if need <= available * memory.USABLE:
        return
    state = processes * step.host["masters and moments"]
    advice = "use a smaller scale or density"
    if state:
        advice = (
            f"parallel.server_dir puts {state / GIB:,.3g} GiB of it into files, --set "
            "parallel.clipping=eager keeps "
            "fewer gradients, a lower --density stores less"
        )
    if processes > 1:
        advice += ", one process with all devices has only one server"
    each = f", each of {processes} processes here" if processes > 1 else ""
    raise UserError(
        f"The relay needs {need / GIB:,.3g} GiB of host memory with these flags "
        f"({_listed(step.host)}{each}), and {available / GIB:,.3g} GiB are available; {advice}."
    )


def check_pinned_memory(step: RelayEstimate, limit_gib: float) -> None:
    """Checks page-locked host memory against XLA's limit on a GPU.

    Raises:
      UserError: the run needs more; names the environment variable and a sufficient value.
    """
    need = (step.host["device's copies"] + step.host["stash"]) / GIB
    if need > limit_gib:
        raise UserError(
            f"The relay needs {need:,.3g} GiB of page-locked memory, and XLA's limit is "
            f"{limit_gib:g}; set {PINNED_SETTING}={math.ceil(1.1 * need)} in the environment."
        )


def _listed(sizes):
    return ", ".join(f"{name} {size / GIB:,.3g}" for name, size in sizes.items() if size)
