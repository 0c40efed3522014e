"""Estimate of a relay step: device, host and disk bytes, traffic, and how much of it overlaps.

The device runs a program for each kind of section and direction (`relay_programs.Programs`).  Its
memory is that of the fullest program: of the blocks' backward pass where blocks are large, of the
head or of the embedding's gradient where the vocabulary is.  Activations at block boundaries are
the stash (L2L, arXiv 2002.05645, section 3.4: `layers x batch` activations on the device, or none
if they go to the host).  Host memory holds masters and moments (12 bytes per stored parameter, 8
for those of Muon; 8 and 6 with bfloat16 moments), copies of the weights for the device, and
gradients.

Pure Python: importing this module loads no jax.
"""

import dataclasses
import math
from collections.abc import Sequence

from sparse_dataflow.core.config.layer_groups import layer_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.remat import chunk_tokens
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.training import cost
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import GIB, Chip
from sparse_dataflow.planner import memory, relay_time
from sparse_dataflow.planner.memory import DTYPE_BYTES, MASTER_BYTES
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.plan_memory import plan_bytes
from sparse_dataflow.relay.clipping import updates_at_once
from sparse_dataflow.relay.pinned_memory import PINNED_SETTING

IN_FLIGHT = 2
"""Sections with gradients on the device at once; that of `parameter_server`, which loads jax."""

FILE_SLOTS = 2
"""Copies of masters and moments in the server's files: last step and current step."""

_UNKNOWN = Chip("unknown")


@dataclasses.dataclass(frozen=True)
class RelayEstimate:
    """Estimate of one relay training step on one device.

    Attributes:
      device: category -> bytes on the device in the fullest program.
      host: category -> bytes in host memory.
      disk: bytes in the server's files.
      fetched: bytes per step from host to device.
      returned: bytes per step from device to host.
      updated: parameters per step that the host updates.
      transfer_seconds: of the slower direction, because both run concurrently; None if the rate is
        unknown.
      compute_seconds: by `step_time`, as of other executors; None if a rate is unknown.
      update_seconds: of AdamW on the host's cores, with the copies that are not kept.
      step_seconds: of a step without the flush of files; None if a rate is unknown.
      overlaps: whether updates overlap with compute, as with eager clipping.
      micro_batches: smallest number of micro-batches of this size at which the forward pass of a
        block takes as long as fetching the next block; None if a rate is unknown.
      hidden_transfer: fraction in [0, 1] of the time of transfers that overlaps with compute; None
        if a rate is unknown.
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
    step_seconds: float | None
    overlaps: bool
    micro_batches: int | None
    hidden_transfer: float | None

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
        update += ", blocks while it computes" if self.overlaps else " after it has computed"
        if self.step_seconds:
            lines.append(
                f"a step of {self.step_seconds:,.3g} s computes {self.compute_seconds:,.3g} s, "
                f"transfers {self.transfer_seconds:,.3g} s and {update}; "
                f"{self.hidden_transfer:.0%} of the transfers overlap with compute; fetches of "
                f"blocks overlap from {self.micro_batches} micro-batches on"
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
    cores: int | None = None,
    copies: bool = True,
    depth: float = 1.0,
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
      cores: cores of the host that update; None for an unknown host, whose memory is the bound.
      copies: whether the device's copies are kept; else each is made when it is fetched.
      depth: mean share of the blocks that take part in a step; see `DepthSchedule`.

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
    tokens = batch * model.row(sequence)
    boundary = tokens // devices * model.d_model * compute
    parameters = cost.parameter_count(model)
    state = parameters * MASTER_BYTES
    matrices = memory.matrix_count(model)
    state += memory.moment_bytes(model, parameters, matrices, state_dtype, training.optimizer)
    block, rest = _largest_block(model)
    # An update at once frees the gradients of a block.
    overlaps = updates_at_once(training, clipping)
    # With updates at once: the block that returns, the one that updates and the one whose buffers
    # are not freed yet.
    gradients = rest + 3 * block if overlaps else parameters
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
    last_bytes = memory.block_and_rest(last)[0] * compute + memory.table_bytes(last)
    blocks = depth * (parameters - rest) * compute + depth * memory.table_bytes(model)
    ends = rest * compute
    fetched = 2 * (blocks + ends) - last_bytes + depth * stashed
    returned = parameters * compute - (1 - depth) * (parameters - rest) * compute + depth * stashed
    plan = ParallelPlan(
        data=devices,
        micro_batch=batch // micro_batches // devices,
        accumulation=micro_batches,
        remat="full",
        fused_attention=fused_attention,
        tpu=chip.is_tpu,
    )
    updated = round(rest + depth * (parameters - rest))
    host_rates = relay_time.HostRates(
        state / parameters, compute, state_dtype, cores, copies, pinned
    )
    traffic = relay_time.Traffic(
        blocks, ends, last_bytes, depth * stashed, returned - depth * stashed, updated - rest, rest
    )
    times = relay_time.times(
        relay_time.device_seconds(model, sequence, plan, chip, depth),
        traffic,
        host_rates,
        chip,
        overlaps=overlaps,
    )
    fewest = None
    if times.fetch_rate and times.forward:
        block_forward = times.forward / (depth * model.num_layers * micro_batches)
        fewest = math.ceil((block * compute + _tables(model)) / times.fetch_rate / block_forward)
    return RelayEstimate(
        device=_device_bytes(model, training, plan, stash),
        host=host,
        disk=FILE_SLOTS * (state + memory.table_bytes(model)) if files else 0,
        fetched=round(fetched),
        returned=round(returned),
        updated=updated,
        transfer_seconds=times.transfer,
        compute_seconds=times.compute,
        update_seconds=host_rates.updating(updated) + 2 * updated * host_rates.narrowing,
        step_seconds=times.step,
        overlaps=overlaps,
        micro_batches=fewest,
        hidden_transfer=times.hidden,
    )


def _largest_block(model):
    """Returns the parameters of the largest block, and of all else."""
    return memory.block_and_rest(_largest_layer(model))


def _largest_layer(model):
    largest = max(layer_groups(model), key=lambda group: cost.parameter_count(group.model)).model
    return dataclasses.replace(largest, num_layers=1, shared_layers=False)


def _tables(model):
    return memory.table_bytes(_largest_layer(model))


def _device_bytes(model, training, plan, stash):
    """Returns category -> bytes of the fullest program.

    XLA keeps a program's arguments, results and temporaries.  A loop over micro-batches sums
    gradients in float32, and one over chunks of the loss those of the output layer once more; a
    temporary that fits has the place of a result until that is written.
    """
    sequence, compute = training.sequence, DTYPE_BYTES[model.compute_dtype]
    several = plan.accumulation > 1
    rows = plan.micro_batch * model.row(sequence)
    tokens = rows * plan.accumulation
    boundary = tokens * model.d_model * compute
    block, rest = _largest_block(model)
    weights = block * compute + _tables(model)
    output = model.vocab_size * model.d_model
    inputs = boundary * model.num_layers if stash == "device" else 0
    batch = 3 * MASTER_BYTES * tokens  # Inputs, targets and their weights.
    micro = plan_bytes(_largest_layer(model), sequence, plan)
    chunk = min(rows, int(chunk_tokens(model.vocab_size)))
    chunked = chunk < rows
    logits = chunk * model.vocab_size
    narrow = compute < MASTER_BYTES
    # Of all micro-batches, and of the chunks of one; a product in float32 has a result of its own.
    gradients = several + (chunked or (several and not narrow))
    temporaries = [MASTER_BYTES * output] * gradients + [MASTER_BYTES * logits]
    temporaries += [compute * logits] * narrow
    reused = max((size for size in temporaries if size <= compute * output), default=0)
    residual = rows * model.d_model * compute
    # In float32 the result is the sum.
    sums = MASTER_BYTES * output * narrow
    programs = (
        {
            "embedding and head": rest * compute,
            "blocks": weights,  # The last one stays.
            "gradients": output * compute,
            "boundaries": 2 * boundary + inputs,
            "inside the head": sum(temporaries) - reused + 5 * residual // 2,
        },
        {
            "blocks": 2 * weights,
            # Of the block, of the one before, and of the head, which the embedding's is added to.
            "gradients": (IN_FLIGHT * block + output) * compute + MASTER_BYTES * block * several,
            "boundaries": (4 + several) * boundary + inputs,
            "inside a layer": round(micro.activations + micro.working_set),
        },
        {
            "gradients": (2 * output + IN_FLIGHT * block) * compute,
            "sums of gradients": sums * (1 + several),
            "boundaries": boundary + residual,
        },
    )
    fullest = max(programs, key=lambda sizes: sum(sizes.values()))
    return {**fullest, "batch": batch}


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
