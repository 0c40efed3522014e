"""Energy that the machine's own counters report: CPU packages by RAPL, NVIDIA GPUs by NVML.

A counter covers its whole package or GPU: idle power, and everything else that runs there.  Memory
modules and TPUs have none.  Importing this module loads no jax.
"""

import dataclasses
import importlib
import os
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
UNKNOWN = "not told"
"""What reports say of a machine without counters."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """Energy counters at one moment.

    Attributes:
      source: "RAPL" or "NVML".
      counts: name of each counter -> microjoules since its last restart at zero.
      ranges: name of each counter -> microjoules at which it restarts.
    """

    source: str
    counts: dict[str, int]
    ranges: dict[str, int]

    def joules_since(self, before: "Reading | None") -> float | None:
        """Returns the joules between two readings, which a counter restarts at most once.

        Returns:
          None where a counter is new or stands still, as those of virtual machines do.
        """
        if before is None or before.counts.keys() != self.counts.keys():
            return None
        moved = [(self.counts[n] - before.counts[n]) % self.ranges[n] for n in self.counts]
        return sum(moved) / 1e6 if all(moved) else None


def read(platform: str, powercap: Path = POWERCAP) -> Reading | None:
    """Returns the energy counters of a chip; None where the machine does not report them.

    Args:
      platform: that of its jax device, "cpu", "gpu" or "tpu".
      powercap: folder of the kernel's power zones.
    """
    readers = {"cpu": lambda: _packages(powercap), "gpu": _first_gpu}
    try:
        return readers[platform]() if platform in readers else None
    # A driver's library raises errors of its own, and missing energy must not end a benchmark.
    except Exception:
        return None


def source(platform: str) -> str:
    """Returns what reports the energy of a jax platform's chip: RAPL, NVML or `UNKNOWN`."""
    reading = read(platform)
    return reading.source if reading else UNKNOWN


def _packages(powercap: Path) -> Reading | None:
    """Returns the counters of all CPU packages, which most systems let only root read."""
    counts, ranges = {}, {}
    # A zone within a package (intel-rapl:0:1) is counted in the package's own zone. The name
    # removes a second path to the same package, intel-rapl-mmio:0.
    for zone in sorted(powercap.glob("intel-rapl*:*")):
        name = (zone / "name").read_text().strip()
        if zone.name.count(":") == 1 and name.startswith("package"):
            counts[name] = int((zone / "energy_uj").read_text())
            ranges[name] = int((zone / "max_energy_range_uj").read_text())
    return Reading("RAPL", counts, ranges) if counts else None


def _first_gpu() -> Reading | None:
    """Returns the counter of the first GPU that CUDA shows to this process."""
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        if visible.isdigit():
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            # CUDA numbers different GPUs by speed, NVML by their place on the bus.
            ordered = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
            if not ordered and len({nvml.nvmlDeviceGetName(handle) for handle in handles}) > 1:
                return None
            handle = handles[int(visible)]
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(visible)
        millijoules = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        return Reading("NVML", {visible: 1000 * millijoules}, {visible: 1000 * 2**64})
    finally:
        nvml.nvmlShutdown()
