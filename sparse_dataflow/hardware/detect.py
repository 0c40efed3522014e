"""Hardware of this process: chip of the JAX backend, host memory, measured rates of the CPU.

Data sheets are in `chips.py`.  Importing this module loads no jax.
"""

import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import KNOWN, Chip

# Full match of jax's `device_kind`: boards with other clocks (PCIe, NVL, GH200) and slices of a
# chip (MIG) have other rates, and no peak is better than a wrong peak.
_DEVICE_KINDS = (
    (r"NVIDIA A100-(SXM4|PCIE)-40GB", "a100-40gb"),
    (r"NVIDIA A100-SXM4-80GB", "a100-80gb"),
    (r"NVIDIA H100 80GB HBM3", "h100"),
    (r"NVIDIA H200", "h200"),
    (r"NVIDIA B200", "b200"),
    (r"NVIDIA GeForce RTX 4090", "rtx-4090"),
    (r"AMD Instinct MI250X.*", "mi250x-gcd"),
    (r"AMD Instinct MI300X( OAM| VF)?", "mi300x"),
    (r"AMD Instinct MI355X", "mi355x"),
    (r"TPU v4", "tpu-v4"),
    (r"TPU v5( lite|e)", "tpu-v5e"),
    (r"TPU v5p?", "tpu-v5p"),
    (r"TPU v6( lite|e)", "tpu-v6e"),
    (r"TPU7x", "tpu-7x-core"),
)


POOL_SHARE = 0.92
"""Share of a GPU's memory that jax takes where XLA_PYTHON_CLIENT_MEM_FRACTION is not set.  Its own
default, 0.75, is less than the planner counts on (`memory.USABLE`)."""


def chip_of(device_kind: str) -> Chip:
    """Returns the chip of a JAX `device_kind`; an unknown chip has no rates or memory."""
    for pattern, name in _DEVICE_KINDS:
        if re.fullmatch(pattern, device_kind.strip(), re.IGNORECASE):
            return KNOWN[name]
    return Chip(device_kind)


def detect(dtypes: Iterable[str] = ("float32",)) -> Chip:
    """Returns the chip of the default JAX backend, with the memory available to this process.

    Args:
      dtypes: operand dtypes whose peak is measured on a CPU (under 2 s each, once per process).

    Returns:
      On an accelerator the chip of its device kind; its memory is that of which jax takes its
      limit, if known, and at most the memory of the kind.
      On a CPU the measured rates and the host memory.
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
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return chip
    # The planner's usable share is of a whole GPU, as `--chips` plans it, and not of jax's pool.
    whole = limit if device.platform == "tpu" else min(limit / POOL_SHARE, chip.capacity)
    return dataclasses.replace(chip, memory_bytes=int(whole))


def cpu_name() -> str:
    """Returns the CPU model and the number of cores available to this process."""
    cores = cpu_count()
    return f"{_cpu_model()}, {cores} core{'s' * (cores > 1)}"


def has_bfloat16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether this CPU is an x86 on Linux that multiplies bfloat16 (AMX or AVX-512)."""
    flags = re.search(r"^flags\s*:(.*)$", _read(cpuinfo), re.MULTILINE)
    return flags is not None and not {"amx_bf16", "avx512_bf16"}.isdisjoint(flags[1].split())


def slug(name: str) -> str:
    """Returns a name in lower case for a file name: letters, digits, "-" and "_"."""
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")


@functools.cache
def measure_cpu(dtype: str = "float32") -> float:
    """Measures FLOP/s of a large dense product on the CPU: the best of several runs, cached.

    The side is 2048, or 1024 on a slow machine.  Takes under 2 s.
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
    # A larger product is nearer to the peak; on a slow machine it would take too long.
    if 2 * large**3 / rate < 0.25:
        rate = max(rate, 2 * large**3 / best_seconds(large, 0.6))
    return rate


@functools.cache
def measure_cpu_bandwidth() -> float:
    """Measures the bytes/s that the CPU reads and writes in an in-place pass over 128 MiB.

    The best of several runs, cached.  Takes under 1 s.
    """
    import jax
    import jax.numpy as jnp

    cpu = jax.local_devices(backend="cpu")[0]
    # Donation reuses the buffer, so that page faults are not measured.
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    # Larger than the caches of any CPU.
    x = jax.device_put(jnp.zeros(32 * 2**20, jnp.float32), cpu)
    moved = 2 * x.nbytes

    def run():
        nonlocal x
        x = increment(x)
        return x

    return moved / _best_seconds(run, 0.3)


def _best_seconds(run, budget: float) -> float:
    """Returns the shortest run within `budget` seconds, at least one, after a warm-up run."""
    run().block_until_ready()
    times: list[float] = []
    while not times or sum(times) < budget:
        start = time.perf_counter()
        run().block_until_ready()
        times.append(time.perf_counter() - start)
    # The shortest: other programs can only make a run slower.
    return min(times)


def host_memory_bytes() -> int:
    """Returns the bytes of host memory for this process: physical, or a lower cgroup limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit()
    return physical if limit is None else min(physical, limit)


def cgroup_limit(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Returns the lowest memory limit of this process's cgroups in bytes, or None.

    Reads `memory.max` (version 2) and `memory.limit_in_bytes` (version 1) of the process's cgroup
    and of all its ancestors.

    Args:
      membership: file with lines `id:controllers:path`, the cgroups of the process.
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
        # In a container the path may be the host's while only the root is mounted, so missing files
        # are skipped.
        folder = root / group.lstrip("/")
        folders = [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
        texts = (_read(path / name).strip() for path in folders)
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


def cpu_count() -> int:
    """Returns the number of cores available to this process."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def only_cpu(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether jax can find nothing but CPUs: its platform is named, or no package of
    another one is installed.  Loads no jax."""
    if platforms := environment.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    spaces = importlib.util.find_spec("jax_plugins")
    return not plugins and spaces is None and importlib.util.find_spec("libtpu") is None


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # glibc's malloc.h


def keep_freed_memory() -> bool:
    """Makes glibc's malloc reuse large freed buffers instead of returning them to the kernel.

    XLA on a CPU allocates its temporaries again in every step. Above 32 MiB, glibc would map and
    unmap them each time, and the page faults cost more than a block-sparse product. The end of the
    heap is not trimmed either. Affects the whole process; call it before the first large
    allocation.

    Returns:
      Whether the C library is glibc and accepted the settings; otherwise nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {
        # No mapping for a single buffer, and no trimming.
        _M_MMAP_MAX: 0,
        _M_TRIM_THRESHOLD: -1,
        # The heap grows by 256 MiB at a time.
        _M_TOP_PAD: 2**28,
        # One heap, so that each thread can use what another freed.
        _M_ARENA_MAX: 1,
    }
    # A list, so that every setting is made, even if one is refused.
    return all([mallopt(option, value) for option, value in settings.items()])


_LEGAL = re.compile(r"(\s*--xla_force_host_platform_device_count=[1-9]\d{0,3})*\s*")
_READ = "from jaxlib import xla_client; xla_client.CompileOptions()"


def check_xla_flags(environment: Mapping[str, str] = os.environ) -> None:
    """Raises UserError if XLA does not read its flags; another process tries, for 0.3 s."""
    flags = environment.get("XLA_FLAGS", "")
    if _LEGAL.fullmatch(flags):
        return
    done = subprocess.run(
        [sys.executable, "-c", _READ],
        env={**environment, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        reasons = re.findall(r"^[EF]\d{4} .*?\] (.*)", done.stderr, re.M) or ["unknown flag"]
        raise UserError(
            f"XLA_FLAGS={flags[:200]} is not legal: {reasons[0]} Correct the variable, or unset it."
        )
