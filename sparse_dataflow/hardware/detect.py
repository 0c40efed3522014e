"""Detects the hardware of this process: jax's chip, the host's memory, a CPU's measured rates.

`chips.py` has the table of chips. Importing this module loads no jax.
"""

import dataclasses
import functools
import os
import platform
import re
import time
from collections.abc import Iterable
from pathlib import Path

from sparse_dataflow.hardware.chips import CHIPS, GIB, Chip

__all__ = [
    "CHIPS",
    "GIB",
    "Chip",
    "cgroup_limit",
    "chip_of",
    "detect",
    "host_memory_bytes",
    "measure_cpu",
    "measure_cpu_bandwidth",
]

# jax's `device_kind`, as full matches: similar boards at other clocks (PCIe, NVL, GH200) and slices
# of a chip (MIG) have other rates, and a wrong peak is worse than none.
_DEVICE_KINDS = (
    (r"NVIDIA A100-(SXM4|PCIE)-40GB", "a100-40gb"),
    (r"NVIDIA A100-SXM4-80GB", "a100-80gb"),
    (r"NVIDIA H100 80GB HBM3", "h100"),
    (r"NVIDIA H200", "h200"),
    (r"NVIDIA B200", "b200"),
    (r"AMD Instinct MI250X.*", "mi250x-gcd"),
    (r"TPU v4", "tpu-v4"),
    (r"TPU v5( lite|e)", "tpu-v5e"),
    (r"TPU v5p?", "tpu-v5p"),
    (r"TPU v6( lite|e)", "tpu-v6e"),
)


def chip_of(device_kind: str) -> Chip:
    """Returns the chip of jax's `device_kind`; without rates and memory if unknown."""
    for pattern, name in _DEVICE_KINDS:
        if re.fullmatch(pattern, device_kind.strip(), re.IGNORECASE):
            return CHIPS[name]
    return Chip(device_kind)


def detect(dtypes: Iterable[str] = ("float32",)) -> Chip:
    """Returns the chip of jax's default backend, with the memory that this process may use.

    Args:
      dtypes: on a CPU, the operand types to measure (under 2 s each, once per process); other
        backends ignore it.

    Returns:
      On an accelerator, `chip_of` its kind, with the memory that the runtime reports if it does.
      On a CPU, the measured rates and the host's memory.
    """
    import jax

    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return Chip(
            name=cpu_name(),
            peak_flops={dtype: measure_cpu(dtype) for dtype in dtypes},
            memory_bytes=host_memory_bytes(),
            bandwidth=measure_cpu_bandwidth(),
        )
    chip = chip_of(device.device_kind)
    stats = device.memory_stats() or {}
    return dataclasses.replace(chip, memory_bytes=stats.get("bytes_limit", chip.memory_bytes))


def cpu_name() -> str:
    """Returns the model of the host's CPU and the number of cores that this process may use."""
    cores = _cpu_count()
    return f"{_cpu_model()}, {cores} core{'s' * (cores > 1)}"


def slug(name: str) -> str:
    """Returns a name as lower-case words joined by "-" or "_", for file names."""
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")


@functools.cache
def measure_cpu(dtype: str = "float32") -> float:
    """Measures the FLOP/s of a large dense product on the host's CPU through XLA.

    The best of several runs with side 2048, or 1024 on a slow machine. Takes under 2 s, once per
    process.
    """
    import jax
    import jax.numpy as jnp

    cpu = jax.local_devices(backend="cpu")[0]
    product = jax.jit(jnp.dot)

    def best_seconds(side: int, budget: float) -> float:
        x = jax.device_put(jnp.ones((side, side), dtype), cpu)
        return _best_seconds(lambda: product(x, x), budget)

    small, large = 1024, 2048
    rate = 2 * small**3 / best_seconds(small, 0.1)
    if 2 * large**3 / rate < 0.25:
        rate = max(rate, 2 * large**3 / best_seconds(large, 0.6))
    return rate


@functools.cache
def measure_cpu_bandwidth() -> float:
    """Measures the bytes/s that the host's CPU reads and writes in a pass over 128 MiB in place.

    The best of several runs through XLA. Takes under 1 s, once per process.
    """
    import jax
    import jax.numpy as jnp

    cpu = jax.local_devices(backend="cpu")[0]
    # Donation reuses the buffer: new pages would add page faults to the time.
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(jnp.zeros(32 * 2**20, jnp.float32), cpu)
    moved = 2 * x.nbytes

    def run():
        nonlocal x
        x = increment(x)
        return x

    return moved / _best_seconds(run, 0.3)


def _best_seconds(run, budget: float) -> float:
    """Returns the shortest run of as many as fit into `budget` seconds (at least one)."""
    run().block_until_ready()
    times: list[float] = []
    while not times or sum(times) < budget:
        start = time.perf_counter()
        run().block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


def host_memory_bytes() -> int:
    """Returns the bytes of host memory that this process may use: physical or its cgroup limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit()
    return physical if limit is None else min(physical, limit)


def cgroup_limit(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Returns the lowest memory limit of this process's cgroups in bytes; None without a limit.

    Reads `memory.max` (version 2) and `memory.limit_in_bytes` (version 1) of the process's cgroup
    and of all its parents: any of them may be the lowest.

    Args:
      membership: the kernel's list of the process's cgroups, one `id:controllers:path` per line.
      mount: mount point of the cgroup file systems.
    """
    limits = []
    for line in _read(membership).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be that of the host, with only the root mounted: missing
        # files are no error.
        leaf = root / group.lstrip("/")
        folders = [leaf, *(parent for parent in leaf.parents if parent.is_relative_to(root))]
        texts = (_read(folder / name).strip() for folder in folders)
        limits += [int(text) for text in texts if text.isdigit()]
    return min(limits, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _cpu_model() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _cpu_count() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1
