"""What a processor can run, for files that hold its instructions.  Loads no jax."""

import contextlib
import hashlib
import platform
from pathlib import Path

_FEATURES = {"flags", "features"}
"""Names of the line of /proc/cpuinfo, on x86 and on Arm."""


def processor() -> str:
    """Returns a name of the processor's instructions.

    Hosts that share a home folder may differ in them. jax's own key does not tell every such pair
    apart, and a program with instructions that a processor lacks ends the process (SIGILL).
    """
    features = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        named = (line.partition(":") for line in lines)
        values = (value for name, _, value in named if name.strip().lower() in _FEATURES)
        # Sorted, as kernels list the same features in other orders.
        features = " ".join(sorted(next(values, "").split()))
    digest = hashlib.sha256(f"{platform.machine()} {features}".encode())
    return f"{platform.machine()}-{digest.hexdigest()[:12]}"
