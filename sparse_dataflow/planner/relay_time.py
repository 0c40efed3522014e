"""Seconds of a relay step: the device's, those of transfers and of the host, and what hides what.

The step takes, in this order: the embedding's fetch; the forward passes of the blocks, while the
next block is fetched; the fetch of embedding and head, and the head; the backward passes of the
blocks, while blocks are fetched, gradients return and, with eager clipping, the host updates; and
the return and update of the embedding, or of all sections with exact clipping, which nothing hides.

Pure Python: importing this module loads no jax.
"""

import dataclasses
from typing import NamedTuple

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planner import efficiency
from sparse_dataflow.planner.memory import MASTER_BYTES
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.step_time import step_time

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

HOST_RATE = 696e6 * 28
"""Bytes/s that updates move however many cores there are: 16 cores of an H200's host updated 696
million parameters a second (see `host_optimizer.PIECE`), of 28 bytes each."""

LINK_SHARE = 0.157
"""Share of the data sheet's rate at which sections are fetched: 0.785 GB in 0.0783 s of 64 GB/s in
`experiments/results/relay_depth_h200.json`."""

RETURN_RATE = 2.3e9
"""Bytes/s of returned gradients, which one thread copies into new pages: 0.265 GB in 0.114 s there,
and 1.4 GB/s in `relay_bert_large_amd-epyc-2-cores.json`."""

SQUARE_RATE = 2.5e9
"""Parameters per second of whose gradient one AMD EPYC core sums the squares, by processor time."""

PIN_RATE = 12e9
"""Bytes/s that such a core copies to memory that it has used before, by processor time."""


@dataclasses.dataclass(frozen=True)
class HostRates:
    """What the host does for each parameter, in seconds.

    Attributes:
      state: bytes of master and moments of a parameter.
      compute: bytes of a parameter on the device.
    """

    state: float
    compute: int
    state_dtype: str
    cores: int | None
    copies: bool
    pinned: bool

    def updating(self, parameters: float) -> float:
        """Returns the seconds of an update: by the cores, or by what the host's memory carries."""
        narrow = "bfloat16" if self.compute < MASTER_BYTES else "float32"
        # Masters and moments are read and written, gradients read, copies written.
        seconds = 2 * (self.state + self.compute) / HOST_RATE
        # The slower of both: with many cores the host's memory is the bound.
        if self.cores:
            seconds = max(seconds, 1 / (self.cores * UPDATE_RATES[self.state_dtype, narrow]))
        if self.pinned and self.copies:
            seconds += self.compute / PIN_RATE
        return parameters * seconds

    def returning(self, parameters: float) -> float:
        """Returns the seconds in which gradients reach the host and their squares are summed."""
        return parameters * (self.compute / RETURN_RATE + 1 / SQUARE_RATE)

    @property
    def narrowing(self) -> float:
        """Seconds in which a parameter is rounded when it is fetched, without kept copies."""
        if self.copies or self.compute == MASTER_BYTES:
            return 0.0
        seconds = (MASTER_BYTES + self.compute) / HOST_RATE
        return max(seconds, 1 / (self.cores * COPY_RATE)) if self.cores else seconds


def device_seconds(
    model: ModelConfig, sequence: int, plan: ParallelPlan, chip: Chip, depth: float
) -> tuple[float, float, float] | None:
    """Returns the seconds of the head, and of the blocks' forward and backward passes; None where a
    rate is unknown."""
    try:
        constants = efficiency.for_family(chip.family, one_program=False)
        time = step_time(model, sequence, plan, chip, constants)
    except UserError:
        return None
    head = float(time.terms["head"])
    blocks = depth * (float(time.total) - head - float(time.terms["optimizer"]))
    forward = blocks / (1 + BACKWARD_PER_FORWARD)
    return head, forward, blocks - forward


class Traffic(NamedTuple):
    """What a step moves and updates.

    Attributes:
      blocks: bytes of all blocks of a step on the device.
      ends: bytes of embedding and head there.
      last: bytes of the last block, which stays for the backward pass.
      stashed: bytes of block inputs in host memory.
      returned: bytes of gradients.
      block_parameters: parameters of the blocks that are updated.
      end_parameters: those of embedding and head.
    """

    blocks: float
    ends: float
    last: float
    stashed: float
    returned: float
    block_parameters: float
    end_parameters: float


class Times(NamedTuple):
    """Seconds of a step; None where a rate is unknown.

    Attributes:
      fetch_rate: bytes/s.
      transfer: of the slower direction.
      compute: of the device.
      forward: of the blocks' forward passes.
      step: of all, with what hides what.
      hidden: fraction in [0, 1] of the time of transfers that overlaps with compute, as of
        `relay.timeline.hidden_share`.
    """

    fetch_rate: float | None
    transfer: float | None
    compute: float | None
    forward: float | None
    step: float | None
    hidden: float | None


def times(
    device: tuple[float, float, float] | None,
    traffic: Traffic,
    host: HostRates,
    chip: Chip,
    overlaps: bool,
) -> Times:
    """Returns the times of a step.

    Args:
      device: result of `device_seconds`.
      overlaps: whether the host updates blocks while the device computes others.
    """
    link = LINK_SHARE * chip.host_bandwidth if chip.host_bandwidth else None
    compute = sum(device) if device else None
    forward = device[1] if device else None
    if link is None:
        return Times(None, None, compute, forward, None, None)
    fetched = 2 * (traffic.blocks + traffic.ends) - traffic.last + traffic.stashed
    transfer = max(fetched / link, traffic.returned / RETURN_RATE)
    if device is None:
        return Times(link, transfer, None, None, None, None)
    head, forward, backward = device
    fetching = 1 / link + host.narrowing / host.compute  # Of a byte.
    behind = [backward, host.returning(traffic.block_parameters)]
    behind.append((traffic.blocks - traffic.last) * fetching + traffic.stashed / link)
    exposed = host.returning(traffic.end_parameters)
    if overlaps:
        behind.append(host.updating(traffic.block_parameters))
        exposed += host.updating(traffic.end_parameters)
    else:
        exposed += host.updating(traffic.block_parameters + traffic.end_parameters)
    # Nothing hides the fetch of the first block, of the embedding, and of the head.
    exposed += (traffic.last + 2 * traffic.ends) * fetching
    # Fetches hide behind the forward passes, or these behind fetches; in the backward pass the
    # slowest of compute, fetches, returns and updates is what shows.
    step = max(forward, traffic.blocks * fetching) + head + max(behind) + exposed
    hidden = _hidden_share(forward, backward, traffic, host.compute, link)
    return Times(link, transfer, compute, forward, step, hidden)


def _hidden_share(forward, backward, traffic, compute_bytes, link):
    """Returns `Times.hidden`.

    The forward pass hides fetches, and the backward pass fetches and returns.  Nothing hides the
    first fetch and the last return of a block, and the transfers of embedding and head.
    """
    following = (traffic.blocks - traffic.last) / link
    last_return = traffic.last / RETURN_RATE
    returned = traffic.block_parameters * compute_bytes / RETURN_RATE - last_return
    behind = max(following + traffic.stashed / link, returned)  # Both directions at the same time.
    exposed = (traffic.last + 2 * traffic.ends) / link + last_return
    exposed += traffic.end_parameters * compute_bytes / RETURN_RATE
    return (min(forward, following) + min(backward, behind)) / (following + behind + exposed)
