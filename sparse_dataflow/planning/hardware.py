"""The chips that models run on: peak rates, memory and bandwidth, each with its source.

Rates are the vendors' dense figures (never the doubled "with sparsity" ones) for the SXM / OAM
boards.  "float32" is the rate of float32 products at JAX's default matmul precision
(https://docs.jax.dev/en/latest/201/precision.html): TF32 tensor cores on NVIDIA, one bfloat16 pass
on TPU, float32 matrix cores on AMD.

Importing this module loads no jax.
"""

import dataclasses
import functools
import os
import platform
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

TERA = 1e12
GIGA = 1e9
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator as JAX sees it (one device), or the host's CPU.

    Attributes:
      name: short name; a key of CHIPS where the chip is known.
      peak_flops: dtype name of the operands -> FLOP/s of dense matrix products; None where the
        chip is not known.  A dtype that is missing has no known rate.
      memory_bytes: bytes of device memory; None where not known.
      bandwidth: bytes/s between that memory and the chip; None where not known.
    """

    name: str
    peak_flops: Mapping[str, float] | None = None
    memory_bytes: int | None = None
    bandwidth: float | None = None

    def peak(self, dtype: str) -> float | None:
        """FLOP/s for operands of `dtype`, or None where it is not known."""
        return None if self.peak_flops is None else self.peak_flops.get(dtype)


def _chip(name, bfloat16, float32, memory, gigabytes_per_second):
    peaks = {"bfloat16": bfloat16 * TERA, "float16": bfloat16 * TERA, "float32": float32 * TERA}
    if name.startswith("tpu"):
        del peaks["float16"]  # the MXU has no float16 mode
    return Chip(name, peaks, int(memory), gigabytes_per_second * GIGA)


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        # NVIDIA A100 datasheet (2021): 312 bf16, 156 TF32; 40 GB 1,555 GB/s, 80 GB SXM 2,039 GB/s.
        _chip("a100-40gb", 312, 156, 40 * GIB, 1555),
        _chip("a100-80gb", 312, 156, 80 * GIB, 2039),
        # NVIDIA H100 datasheet, SXM: 1,979 bf16 and 989 TF32 with sparsity, halved; 3.35 TB/s.
        _chip("h100", 989.4, 494.7, 80 * GIB, 3350),
        # NVIDIA H200 datasheet, SXM: rates of the H100; 141 GB, 4.8 TB/s.
        _chip("h200", 989.4, 494.7, 141 * GIGA, 4800),
        # NVIDIA HGX/DGX B200 datasheets, one GPU of eight: 2.25 PFLOP/s bf16, 1.1 TF32, 180 GB,
        # 8 TB/s.
        _chip("b200", 2250, 1100, 180 * GIGA, 8000),
        # AMD Instinct MI250X datasheet, one of its two GCDs (a GCD is a device to JAX):
        # 383/2 bf16, 95.7/2 float32 matrix, 64 GB, 3.2768/2 TB/s; 191.5 as in arXiv 2312.12705.
        _chip("mi250x-gcd", 191.5, 47.85, 64 * GIB, 1638.4),
        # Google Cloud TPU documentation, page "TPU v4": 275, 32 GiB, 1,200 GB/s a chip.
        _chip("tpu-v4", 275, 275, 32 * GIB, 1200),
        # Google Cloud TPU documentation, page "TPU v5e": 197, 16 GB, 819 GB/s.
        _chip("tpu-v5e", 197, 197, 16 * GIGA, 819),
        # Google Cloud TPU documentation, page "TPU v5p": 459, 95 GB, 2,765 GB/s.
        _chip("tpu-v5p", 459, 459, 95 * GIGA, 2765),
        # Google Cloud TPU documentation, page "TPU v6e": 918, 32 GB, 1,638 GB/s.
        _chip("tpu-v6e", 918, 918, 32 * GIGA, 1638),
    )
}

# jax's `device_kind`, matched whole: boards of the same name at other clocks (PCIe, NVL, GH200)
# and slices of a chip (MIG) have other rates, and a wrong peak is worse than none.
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
    """The chip that jax calls `device_kind`; one without rates or memory where it is not known."""
    for pattern, name in _DEVICE_KINDS:
        if re.fullmatch(pattern, device_kind.strip(), re.IGNORECASE):
            return CHIPS[name]
    return Chip(device_kind)


def detect(dtypes: Iterable[str] = ("float32",)) -> Chip:
    """The chip under jax's default backend, with the memory that this process may use.

    Args:
      dtypes: on a CPU, the operand types whose peak is measured (under 2 s each, once a process);
        other backends ignore it.

    Returns:
      On an accelerator `chip_of` its kind, with the memory that the runtime offers where it says
      so.  On a CPU the measured rates, and the host's memory.
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
    """Model of the host's CPU, and the cores that this process may use."""
    return f"{_cpu_model()}, {_cpu_count()} cores"


def slug(name: str) -> str:
    """A name in lower-case words joined by "-" or "_", for a file."""
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")


@functools.cache
def measure_cpu(dtype: str = "float32") -> float:
    """FLOP/s of a large dense product on the host's CPU through XLA: the best of several runs.

    The side is 2048, or 1024 where a machine is too slow for that; under 2 s in all, and measured
    once a process.
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
    """Bytes/s that the host's CPU reads and writes in an in-place pass over 128 MiB.

    The best of several runs through XLA, under 1 s, measured once a process.
    """
    import jax
    import jax.numpy as jnp

    cpu = jax.local_devices(backend="cpu")[0]
    # Donation reuses the buffer: fresh pages would be timed as page faults.
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(jnp.zeros(32 * 2**20, jnp.float32), cpu)
    moved = 2 * x.nbytes

    def run():
        nonlocal x
        x = add_one(x)
        return x

    return moved / _best_seconds(run, 0.3)


def _best_seconds(run, budget: float) -> float:
    """Shortest of the runs (one at least) that fit into `budget` seconds, after a warm-up."""
    run().block_until_ready()
    times = []
    while not times or sum(times) < budget:
        start = time.perf_counter()
        run().block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


def host_memory_bytes() -> int:
    """Bytes of host memory that this process may use: physical, or its cgroup's lower limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit()
    return physical if limit is None else min(physical, limit)


def cgroup_limit(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """The lowest memory limit on this process's control groups, in bytes; None without one.

    Both versions are read: `memory.max` of version 2 and `memory.limit_in_bytes` of version 1, of
    the process's own group and of every group above it (any of them may be the lowest).

    Args:
      membership: the kernel's list of the process's groups, `id:controllers:path` a line.
      mount: where the cgroup file systems are mounted.
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
        # Inside a container the path may be the host's, with only the root mounted: missing
        # files along the way are no error.
        own = root / group.lstrip("/")
        folders = [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
        texts = (_read(folder / name).strip() for folder in folders)
        limits += [int(text) for text in texts if text.isdigit()]
    return min(limits, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _cpu_model() -> str:
    named = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _cpu_count() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1
