"""Which kernels a program spends its time in, from a trace of jax's profiler."""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from sparse_dataflow.compile import hlo

CONTAINERS = ("while", "call", "conditional", "async-start", "async-done")
"""Beginnings of operations whose time is that of others inside them."""


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """Executions of a kernel in a trace.

    Attributes:
      name: of its HLO instruction, else of the kernel.
      calls: number of executions.
      seconds: of all executions together.
    """

    name: str
    calls: int
    seconds: float


def traced(run: Callable[[], Any], times: int) -> list[KernelTime]:
    """Returns the kernels of `times` calls of a function, largest share first."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's calls would fill the trace.
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(times):
                jax.block_until_ready(run())
        return read(Path(folder))


def read(folder: Path) -> list[KernelTime]:
    """Returns the kernels of the traces in a folder of jax's profiler, largest share first.

    Raises:
      FileNotFoundError: it has no trace.
    """
    files = sorted(folder.rglob("*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"The profiler left no trace in {folder}.")
    calls: dict[str, int] = {}
    nanoseconds: dict[str, float] = {}
    for file in files:
        for name, duration in _executions(jax.profiler.ProfileData.from_file(str(file))):
            calls[name] = calls.get(name, 0) + 1
            nanoseconds[name] = nanoseconds.get(name, 0.0) + duration
    kernels = [KernelTime(name, calls[name], 1e-9 * nanoseconds[name]) for name in calls]
    return sorted(kernels, key=lambda kernel: -kernel.seconds)


def _executions(profile):
    """Yields (name, nanoseconds) of each kernel on GPUs; without a GPU, of each host operation."""
    planes = {plane.name: plane for plane in profile.planes}
    gpus = [plane for name, plane in planes.items() if name.startswith("/device:GPU")]
    for plane in gpus or planes.values():
        for line in plane.lines:
            # Other lines of a device repeat its streams.
            if gpus and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = {key: value for key, value in event.stats if key == "hlo_op"}
                name = stats.get("hlo_op") or (event.name if gpus else None)
                ended = event.name.startswith("end: ")
                if name and not ended and not str(name).startswith(CONTAINERS):
                    yield str(name), event.duration_ns


def table(kernels: list[KernelTime], runs: int, text: str = "") -> dict[str, Any]:
    """Returns a result of `traced` for one run of a program, as JSON.

    Args:
      runs: runs in the trace.
      text: HLO text of the program, from which the bytes of its kernels come; "" for none.
    """
    moved = {kernel.name: kernel for kernel in hlo.kernels(text, counted=False)} if text else {}
    rows: list[dict[str, Any]] = []
    for kernel in kernels:
        row: dict[str, Any] = {
            "name": kernel.name,
            "calls": kernel.calls / runs,
            "ms": 1e3 * kernel.seconds / runs,
        }
        if kernel_bytes := moved.get(kernel.name):
            row["target"], row["bytes"] = kernel_bytes.target, kernel_bytes.bytes
            row["tb_per_second"] = 1e-12 * kernel_bytes.bytes * kernel.calls / (kernel.seconds or 1)
        rows.append(row)
    counted_rows = [row for row in rows if "bytes" in row]
    return {
        "kernels_per_run": sum(row["calls"] for row in rows),
        "ms_per_run": sum(row["ms"] for row in rows),
        "bytes_per_run": sum(row["bytes"] * row["calls"] for row in counted_rows),
        "ms_with_bytes": sum(row["ms"] for row in counted_rows),
        "kernels": rows,
    }
