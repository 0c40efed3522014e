"""A Hopper GPU that is not there: a device to trace and compile for, and its interpreter."""

import contextlib

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper import NEEDED_JAX


@contextlib.contextmanager
def simulated_hopper(multiprocessors=2, detect_races=False):
    """What is traced here is for this GPU; its kernels are interpreted, memory starting as NaN."""
    if jax.__version_info__ < NEEDED_JAX:
        pytest.skip(
            f"the interpreter of Mosaic GPU kernels needs jax >= 0.11, not {jax.__version__}"
        )
    parameters = plgpu.InterpretGPUParams(uninitialized_memory="nan", detect_races=detect_races)
    with targeted_gpu("NVIDIA H200", multiprocessors), plgpu.force_gpu_interpret_mode(parameters):
        yield


def targeted_gpu(kind="NVIDIA H200", multiprocessors=132):
    """What is traced here is for this GPU."""
    device = AbstractDevice(kind, multiprocessors, "cuda")
    auto = (AxisType.Auto,)
    mesh = AbstractMesh((1,), ("device",), axis_types=auto, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
