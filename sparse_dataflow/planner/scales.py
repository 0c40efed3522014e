"""Which named scale trains on a device, by its memory."""

import dataclasses
import math
from collections.abc import Callable, Mapping

from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.planner import memory, plan_memory
from sparse_dataflow.runs.run_config import SIZES

LAPTOP_SCALE = "nano"
TARGET_SCALE = "13b"
LARGE_SCALES = ("125m", "350m", "1.3b", "6.7b", TARGET_SCALE)
"""Scales of the main job on an accelerator, smallest first."""


def scale_estimate(scale: str, linears: Mapping[str, LinearSpec]) -> memory.MemoryEstimate:
    """Estimates the smallest memory in which a scale trains on one device.

    It assumes micro-batches of one full sequence, bfloat16 compute with float32 masters, and full
    remat.  A run at this scale must use these settings.

    Args:
      scale: key of SIZES.
      linears: projection name -> LinearSpec of a sparse model; missing names are dense, and names
        that the scale does not have are ignored.
    """
    config = SIZES[scale]
    linears = {name: spec for name, spec in linears.items() if name in config.projections}
    config = dataclasses.replace(config, linears=linears, remat="full", compute_dtype="bfloat16")
    training = TrainingConfig(batch=1, sequence=config.max_len)
    return plan_memory.training_bytes(config, training)


def choose_scale(memory_bytes: int | None, backend: str, linears: Mapping[str, LinearSpec]) -> str:
    """Returns the scale for `--scale=auto`: the largest of LARGE_SCALES that fits, else "nano".

    Args:
      memory_bytes: of one device, of which `memory.USABLE` counts; None if unknown, which selects
        "nano".
      backend: as in `jax.default_backend()`.  A CPU always selects "nano", because larger scales
        are too slow there.
      linears: see `scale_estimate`.
    """
    if backend == "cpu" or memory_bytes is None:
        return LAPTOP_SCALE
    usable = int(memory_bytes * memory.USABLE)
    fitting = [s for s in LARGE_SCALES if scale_estimate(s, linears).total <= usable]
    return fitting[-1] if fitting else LAPTOP_SCALE


def scale_message(memory_bytes: int, scale: str, linears: Mapping[str, LinearSpec]) -> str:
    """Returns a log line with the scale that runs, and why it is not TARGET_SCALE.

    Args:
      memory_bytes: of this machine's device; host memory on a CPU.
      linears: see `scale_estimate`.
    """
    need = scale_estimate(TARGET_SCALE, linears).total
    line = (
        f"{TARGET_SCALE.upper()} in training needs {in_gib(need, math.ceil)} GiB; "
        f"this machine has {in_gib(memory_bytes, math.floor)}"
    )
    if scale == TARGET_SCALE:
        return f"{line}: running the '{scale}' scale"
    # A CPU with enough memory still runs the laptop scale.
    reason = ", but it is too slow for it" if need <= memory_bytes * memory.USABLE else ""
    return f"{line}{reason}: running the '{scale}' scale; on a pod pass --scale={TARGET_SCALE}"


def in_gib(size: float, rounding: Callable[[float], int]) -> str:
    """Returns bytes in GiB, rounded by math.floor or math.ceil: below ten to a hundredth."""
    gib = size / GIB
    # A limit that went through a division keeps its last digit.
    return f"{rounding(gib):,}" if gib >= 10 else f"{rounding(round(100 * gib, 3)) / 100:.2f}"
