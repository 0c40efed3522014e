"""Memory and traffic of a relay run: estimated and checked before it, measured after it."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import psutil

from sparse_dataflow.core import collectives
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import detect as hardware
from sparse_dataflow.hardware.chips import GIB, KNOWN, Chip
from sparse_dataflow.hardware.machines import Machine
from sparse_dataflow.planner import memory, relay_step, settle
from sparse_dataflow.relay import timeline
from sparse_dataflow.relay.pinned_memory import PINNED_GIB, PINNED_SETTING
from sparse_dataflow.relay.relay import RelayConfig
from sparse_dataflow.relay.relay_executor import RelayExecutor
from sparse_dataflow.reporting.quantities import size


def estimate(
    model: ModelConfig,
    training: TrainingConfig,
    how: RelayConfig,
    chip: Chip,
    files: bool = False,
    devices: int = 1,
    cores: int | None = None,
    copies: bool = True,
) -> relay_step.RelayEstimate:
    """Returns the estimate of a model; see `planner.settle.relay_estimate`.

    Args:
      training: batch, sequence and micro-batches.
      how: stash, clipping and depth.
      chip: the chip; a known one has page-locked host memory and fused attention.
      files: whether masters and moments are in files.
      devices: data-parallel devices.
      cores: cores of the host; those of this process if None.
      copies: whether the device's copies are kept.
    """
    host = chip.name not in KNOWN
    machine = Machine(chip, devices, host, cores=cores or hardware.cpu_count())
    return settle.relay_estimate(
        model,
        training,
        machine,
        depth=how.depth,
        stash=how.stash,
        clipping=how.clipping,
        files=files,
        local_devices=jax.local_device_count() if devices > 1 else 1,
        copies=copies,
    )


def largest_estimate(
    phases: Sequence[ModelConfig],
    training: TrainingConfig,
    executor: RelayExecutor,
    chip: Chip,
    copies: bool = True,
) -> relay_step.RelayEstimate:
    """Returns the estimate of the phase of a model that takes the most memory of the device.

    Args:
      phases: the model in each of its phases.
      copies: whether the device's copies are kept.
    """
    options: dict[str, Any] = {
        "files": bool(executor.server_dir),
        "devices": executor.devices,
        "copies": copies and executor.config.copies,
    }
    each = [estimate(model, training, executor.config, chip, **options) for model in phases]
    return max(each, key=lambda estimate: estimate.device_total)


def settled(variants: list[Variant], chip: Chip, executor: RelayExecutor) -> RelayExecutor:
    """Prints the estimate of each variant and checks that it fits; all processes call it.

    Returns:
      The executor; where host memory has no room for the device's copies, one that does not keep
      them.

    Raises:
      UserError: the device, the host or the disk is too small, or `parallel.server_dir` cannot be
        used; names the bytes needed.
    """

    def planned(copies):
        each = [
            largest_estimate([p.model for p in v.phase_specs], v.training, executor, chip, copies)
            for v in variants
        ]
        return each, each[0].with_host_memory_of(each[1:])

    # Copies save a cast of all weights at each fetch, so only a lack of memory gives them up.
    estimates, together = planned(True)
    if not _fits_host(together):
        without, fewer = planned(False)
        if _fits_host(fewer):
            say(
                "host memory has no room for the device's copies of all weights: each is made "
                "when it is fetched"
            )
            estimates, together = without, fewer
            less = dataclasses.replace(executor.config, copies=False)
            executor = dataclasses.replace(executor, config=less)
    for v, each in zip(variants, estimates):
        say(f"{v.name:>6}: {each.text()}")
    refuse_small_host(together)
    need = max(each.device_total for each in estimates)
    if chip.memory_bytes is not None and need > chip.memory_bytes * memory.USABLE:
        raise UserError(
            f"The relay needs {need / GIB:,.1f} GiB on the device with these settings, and it has "
            f"{chip.memory_bytes / GIB:,.1f}; legal: more training.micro_batches, or "
            "parallel.stash=host, which stores block inputs in host memory."
        )
    executor.refuse_unusable_files({v.name: each.disk for v, each in zip(variants, estimates)})
    return executor


def _fits_host(estimate):
    """Returns whether `refuse_small_host` accepts an estimate, on every process."""
    try:
        refuse_small_host(estimate)
    except UserError:
        fits = False
    else:
        fits = True
    return not collectives.any_process(not fits)


def refuse_small_host(estimate: relay_step.RelayEstimate) -> None:
    """Checks that this host's memory, and its page-locked share, can hold an estimate.

    All processes call it.

    Raises:
      UserError: it cannot; names the bytes needed.
    """
    available = psutil.virtual_memory().available
    relay_step.check_host_memory(estimate, available, collectives.count_on_host())
    if jax.default_backend() == "gpu":
        limit = float(os.environ.get(PINNED_SETTING) or PINNED_GIB)
        relay_step.check_pinned_memory(estimate, limit)


def measured(spans) -> str:
    """Returns one line with the times of the last step, from its timeline."""
    seconds = {kind: timeline.seconds(spans, kind) for kind in timeline.KINDS}
    times = ", ".join(f"{kind} {value:.3g} s" for kind, value in seconds.items())
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    used = "" if peak is None else f"; most device memory {size([peak])[0]}"
    return (
        f"relay measured, last step: {times}; {timeline.hidden_share(spans):.0%} of the transfer "
        f"and {timeline.hidden_share(spans, ('update',)):.0%} of the updates were hidden behind "
        f"computing{used}; host memory {size([psutil.Process().memory_info().rss])[0]}"
    )
