"""Which GPUs, and which releases of jax, run the Triton kernels."""

import jax
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import triton
except ImportError:
    triton = None  # type: ignore[assignment]

OLDEST = 8
"""Major compute capability of Ampere, the first with mma of bfloat16."""


def gpu_refusal() -> str:
    """Return why Triton kernels cannot run here; empty if they can."""
    if triton is None:
        return f"jax {jax.__version__} has no Triton lowering of Pallas."
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    # An abstract device has no compute capability; NVIDIA's names before Ampere say "Tesla".
    capability = getattr(device, "compute_capability", None)
    major = capability.partition(".")[0] if isinstance(capability, str) else ""
    recent = major.isdecimal() and int(major) >= OLDEST
    if recent or (not major and device.device_kind.startswith("NVIDIA")):
        return ""
    return f"this is {device.device_kind}; legal: NVIDIA GPUs of compute capability {OLDEST}.0 on."


def whole(array: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """Returns the spec of an array that a kernel reads or writes in place."""
    # One block of the whole array for all programs: the kernel itself picks what it reads.
    origin = (0,) * len(array.shape)
    return pl.BlockSpec(array.shape, lambda *_: origin)
