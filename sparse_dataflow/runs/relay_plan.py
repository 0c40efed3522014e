"""What the relay needs for a run: told before it, refused where the machine is too small, and set
beside what was measured after it."""

import os

import jax
import psutil

from sparse_dataflow.config.run import RunConfig
from sparse_dataflow.distributed import processes
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.detect import CHIPS, GIB, Chip
from sparse_dataflow.parallel.relay import timeline
from sparse_dataflow.parallel.relay.executor import RelayExecutor
from sparse_dataflow.planning import memory, relay
from sparse_dataflow.training.metrics import say
from sparse_dataflow.training.variants import Variant


def of(config: RunConfig, variant: Variant, chip: Chip, devices: int = 1) -> relay.RelayEstimate:
    """The plan of one variant under a config's `parallel` part."""
    training = variant.training
    return relay.estimate(
        variant.model,
        training.batch,
        training.sequence,
        training.micro_batches,
        stash=config.parallel.stash,
        clipping=config.parallel.clipping,
        files=bool(config.parallel.server_dir),
        pinned=chip.name in CHIPS,
        chip=chip,
        host_bandwidth=chip.host_bandwidth,
        devices=devices,
        local_devices=jax.local_device_count() if devices > 1 else 1,
    )


def tell(config: RunConfig, variants: list[Variant], chip: Chip, executor: RelayExecutor) -> None:
    """Prints each variant's plan; called by all processes.

    Raises:
      UserError: the device, the host or its disk is too small, or the server's files cannot be
        kept where `parallel.server_dir` says; names what is needed.
    """
    plans = [of(config, v, chip, executor.devices) for v in variants]
    for v, found in zip(variants, plans):
        say(f"{v.name:>6}: {found.text()}")
    refuse_small_host(plans[0].with_host_memory_of(plans[1:]))
    need = max(found.device_total for found in plans)
    if chip.memory_bytes is not None and need > chip.memory_bytes * memory.USABLE:
        raise UserError(
            f"The relay needs {need / GIB:,.1f} GiB on the device with these flags, and it has "
            f"{chip.memory_bytes / GIB:,.1f}; more training.micro_batches makes them smaller, "
            "parallel.stash=host keeps their boundaries in host memory."
        )
    executor.refuse_unusable_files({v.name: plan.disk for v, plan in zip(variants, plans)})


def refuse_small_host(found: relay.RelayEstimate) -> None:
    """Refuses a plan that this machine's memory, or its page-locked part, cannot hold; called by
    all processes.

    Raises:
      UserError: names what is needed.
    """
    available = psutil.virtual_memory().available
    relay.check_host_memory(found, available, processes.count_on_host())
    if jax.default_backend() == "gpu":
        limit = float(os.environ.get(relay.PINNED_SETTING) or relay.PINNED_GIB)
        relay.check_pinned_memory(found, limit)


def measured(spans) -> str:
    """One line on what the last step took, from its timeline."""
    seconds = {kind: timeline.seconds(spans, kind) for kind in timeline.KINDS}
    parts = ", ".join(f"{kind} {value:.3g} s" for kind, value in seconds.items())
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    used = "" if peak is None else f"; most device memory {peak / GIB:,.2f} GiB"
    return (
        f"relay measured, last step: {parts}; {timeline.hidden_share(spans):.0%} of the transfer "
        f"and {timeline.hidden_share(spans, ('update',)):.0%} of the updates were hidden behind "
        f"computing{used}; host memory {psutil.Process().memory_info().rss / GIB:,.2f} GiB"
    )
