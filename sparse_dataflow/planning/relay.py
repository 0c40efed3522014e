"""What the relay needs: bytes on the device, in host memory and on disk, traffic and its hiding.

The device holds two blocks, one micro-batch inside a block, and what stands at block boundaries
(L2L, arXiv 2002.05645, section 3.4, where the stash is `layers x batch` activations, or none when
it goes to the host).  Host memory holds 12 bytes a stored parameter of masters and moments, the
device's copies and the gradients.

Pure Python: importing this module loads no jax.
"""

import dataclasses
import math
from collections.abc import Sequence

from sparse_dataflow.errors import UserError
from sparse_dataflow.models.groups import layer_groups
from sparse_dataflow.models.sizes import ModelConfig
from sparse_dataflow.planning import cost, memory
from sparse_dataflow.planning.hardware import GIB, Chip
from sparse_dataflow.planning.memory import DTYPE_BYTES, MASTER_BYTES

STATE_BYTES = MASTER_BYTES * (1 + memory.ADAM_MOMENTS)
FILE_SLOTS = 2
"""Copies of masters and moments in the server's files: the last step's and the one under way."""

EFFICIENCY = 0.5
"""Fraction of a chip's peak that a step is taken to reach: dense training records lie between 41%
(Megatron, H100) and 68% (MaxText, v5p), as their READMEs say."""

BACKWARD_PER_FORWARD = 3
"""The relay's backward pass computes a block's forward again before its two products each."""


@dataclasses.dataclass(frozen=True)
class RelayPlan:
    """One training step of the relay on one device.

    Attributes:
      device: category -> bytes on the device.
      host: category -> bytes in host memory.
      disk: bytes in the server's files.
      fetched: bytes a step from the host to the device.
      returned: bytes a step from the device to the host.
      updated: parameters a step that the host updates.
      transfer_seconds: of the longer of both directions, which run at once; None without a rate.
      compute_seconds: at EFFICIENCY of the chip's peak; None without a peak.
      micro_batches: the fewest, of the plan's size, at which computing a block's forward takes as
        long as fetching the next block; None without both rates.
    """

    device: dict[str, int]
    host: dict[str, int]
    disk: int
    fetched: int
    returned: int
    updated: int
    transfer_seconds: float | None
    compute_seconds: float | None
    micro_batches: int | None

    @property
    def device_total(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        """Bytes in host memory."""
        return sum(self.host.values())

    def beside(self, others: Sequence["RelayPlan"]) -> "RelayPlan":
        """This plan, with what others hold in host memory at the same time."""
        host = {
            name: size + sum(other.host[name] for other in others)
            for name, size in self.host.items()
        }
        return dataclasses.replace(self, host=host)

    def text(self) -> str:
        """The plan as a few lines."""
        parts = [
            f"relay plan: {self.device_total / GIB:,.3g} GiB on the device "
            f"({_listed(self.device)})",
            f"{self.host_total / GIB:,.3g} GiB in host memory ({_listed(self.host)})",
            f"{self.fetched / GIB:,.3g} GiB fetched and {self.returned / GIB:,.3g} GiB returned a "
            f"step, {self.updated:,} parameters updated",
        ]
        if self.disk:
            parts.insert(2, f"{self.disk / GIB:,.3g} GiB on disk")
        if self.transfer_seconds and self.compute_seconds:
            parts.append(
                f"a step computes {self.compute_seconds:,.3g} s and transfers "
                f"{self.transfer_seconds:,.3g} s; transfer hides from {self.micro_batches} "
                "micro-batches on"
            )
        return "\n  ".join(parts)


def plan(
    model: ModelConfig,
    batch: int,
    sequence: int,
    micro_batches: int = 1,
    *,
    stash: str = "device",
    clipping: str = "exact",
    files: bool = False,
    pinned: bool = True,
    chip: Chip | None = None,
    host_bandwidth: float | None = None,
    fused_attention: bool = False,
    devices: int = 1,
    local_devices: int = 1,
) -> RelayPlan:
    """Bytes, traffic and times of one step.

    Args:
      model: only its stored blocks count.
      batch: sequences in a step.
      sequence: tokens in each.
      micro_batches: that the batch is cut into.
      stash: "device" or "host".
      clipping: "exact" or "eager".
      files: whether masters and moments are in mapped files.
      pinned: whether the device's copies are kept beside float32 masters of the same dtype.
      chip: gives the peak; times are None without.
      host_bandwidth: bytes/s between device and host, one direction.
      fused_attention: see `memory.training_bytes`.
      devices: that share each micro-batch; each holds all parameters of a section.
      local_devices: those of them that one process has; page-locked memory belongs to a device, so
        each has copies and a stash of its own there.

    Raises:
      UserError: a batch that cannot be cut so.
    """
    if micro_batches < 1 or batch % (micro_batches * devices):
        raise UserError(
            f"A batch of {batch} sequences does not cut into {micro_batches} micro-batches on "
            f"{devices} devices."
        )
    compute = DTYPE_BYTES[model.compute_dtype]
    # Of layers that store unequally much, the largest have their place on the device.
    largest = max(layer_groups(model), key=lambda group: memory.parameter_count(group.model)).model
    one, two = (dataclasses.replace(largest, num_layers=n) for n in (1, 2))
    block = memory.parameter_count(two) - memory.parameter_count(one)
    rest = memory.parameter_count(one) - block
    parameters = memory.parameter_count(model)
    tables = memory.table_bytes(one)
    tokens = batch * sequence // devices
    boundary = tokens * model.d_model * compute
    micro = memory.training_bytes(
        dataclasses.replace(one, remat="full"),
        batch // micro_batches // devices,
        sequence,
        fused_attention=fused_attention,
    )
    accumulated = MASTER_BYTES if micro_batches > 1 else 0
    device = {
        "embedding and head": 2 * rest * compute,
        "two blocks": 2 * (block * compute + tables),
        "their gradients": block * (2 * compute + accumulated),
        "boundaries": boundary * ((model.num_layers + 3) if stash == "device" else 5),
        "inside a block": max(micro.activations + micro.working_set, micro.logits),
    }
    kept = parameters * STATE_BYTES + memory.table_bytes(model)
    held = parameters if clipping == "exact" else rest + 3 * block
    copied = parameters * compute if pinned or compute != MASTER_BYTES else 0
    waiting = local_devices * boundary * model.num_layers if stash == "host" else 0
    host = {
        "masters and moments": 0 if files else parameters * STATE_BYTES,
        "device's copies": copied * (local_devices if pinned else 1),
        "gradients": held * compute,
        "stash": waiting,
    }
    stashed = boundary * model.num_layers if stash == "host" else 0
    # The embedding comes twice: for the first section, and for the tied output layer.
    fetched = 2 * (parameters * compute + memory.table_bytes(model)) + stashed
    returned = parameters * compute + stashed
    transfer = compute_seconds = needed = None
    if host_bandwidth:
        transfer = max(fetched, returned) / host_bandwidth
    rate = chip.peak(model.compute_dtype) if chip is not None else None
    if rate:
        forward = cost.flops_per_token(model, sequence, training=False, causal_half=False)
        blocks = forward.total - forward.head
        total = blocks * (1 + BACKWARD_PER_FORWARD) + 3 * forward.head
        compute_seconds = tokens * total / (rate * EFFICIENCY)
        if host_bandwidth:
            a_block = tokens / micro_batches * blocks / model.num_layers / (rate * EFFICIENCY)
            needed = math.ceil((block * compute + tables) / host_bandwidth / a_block)
    return RelayPlan(
        device=device,
        host=host,
        disk=FILE_SLOTS * kept if files else 0,
        fetched=fetched,
        returned=returned,
        updated=parameters,
        transfer_seconds=transfer,
        compute_seconds=compute_seconds,
        micro_batches=needed,
    )


def refuse_small_host(found: RelayPlan, available: int, processes: int = 1) -> None:
    """Refuses a plan that host memory cannot hold.

    Args:
      found: the plan of one process, which holds the whole server.
      available: bytes of host memory.
      processes: of the run on this machine.

    Raises:
      UserError: naming what is needed, what there is, and what needs less.
    """
    need = processes * found.host_total
    if need <= available * memory.USABLE:
        return
    state = processes * found.host["masters and moments"]
    advice = "a smaller scale or density"
    if state:
        advice = (
            f"--server_dir puts {state / GIB:,.3g} GiB of it into files, --clipping=eager holds "
            "fewer gradients, a lower --density stores less"
        )
    if processes > 1:
        advice += ", one process with all devices holds one server"
    each = f", each of {processes} processes here" if processes > 1 else ""
    raise UserError(
        f"The relay needs {need / GIB:,.3g} GiB of host memory with these flags "
        f"({_listed(found.host)}{each}), and {available / GIB:,.3g} GiB are available; {advice}."
    )


PINNED_SETTING = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable: GiB of page-locked host memory that XLA hands out to CUDA devices."""

PINNED_GIB = 64
"""What it is where it is not set (`GetGpuHostAllocator` in XLA's pjrt/gpu/gpu_helpers.cc)."""


def refuse_unpinned(found: RelayPlan, limit_gib: float) -> None:
    """Refuses a plan whose page-locked memory is above XLA's limit on a GPU.

    Raises:
      UserError: naming the setting and the value that is needed.
    """
    need = (found.host["device's copies"] + found.host["stash"]) / GIB
    if need > limit_gib:
        raise UserError(
            f"The relay keeps {need:,.3g} GiB in page-locked memory, and XLA hands out "
            f"{limit_gib:g}; set {PINNED_SETTING}={math.ceil(1.1 * need)} in the environment."
        )


def _listed(parts):
    return ", ".join(f"{name} {size / GIB:,.3g}" for name, size in parts.items() if size)
