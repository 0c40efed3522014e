"""An abstract Hopper GPU to trace for, and the interpreter of its kernels."""

import contextlib

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from sparse_dataflow.chips.hopper.api import NEEDED_JAX


@contextlib.contextmanager
def simulated_hopper(multiprocessors=2, detect_races=False):
    """Trace for this GPU and interpret its kernels, with memory initialised to NaN."""
    if jax.__version_info__ < NEEDED_JAX:
        pytest.skip(
            f"the interpreter of Mosaic GPU kernels needs jax >= 0.11, not {jax.__version__}"
        )
    parameters = plgpu.InterpretGPUParams(uninitialized_memory="nan", detect_races=detect_races)
    with targeted_gpu("NVIDIA H200", multiprocessors), plgpu.force_gpu_interpret_mode(parameters):
        yield


def targeted_gpu(kind="NVIDIA H200", multiprocessors=132):
    """Trace for this GPU."""
    device = AbstractDevice(kind, multiprocessors, "cuda")
    auto = (AxisType.Auto,)
    mesh = AbstractMesh((1,), ("device",), axis_types=auto, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
