"""The variable XLA_FLAGS, which ends a process without an exception if it is illegal."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping

from sparse_dataflow.files.errors import UserError

_LEGAL = re.compile(r"(\s*--xla_force_host_platform_device_count=[1-9]\d{0,3})*\s*")
_READ = "from jaxlib import xla_client; xla_client.CompileOptions()"


def check(environment: Mapping[str, str] = os.environ) -> None:
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
