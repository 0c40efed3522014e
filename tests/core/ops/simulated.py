"""Abstract TPUs to trace for, and the interpreter of their kernels."""

import contextlib

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


@contextlib.contextmanager
def simulated_tpu(kind="TPU v5 lite", cores=1, copies="on_wait"):
    """Trace for this TPU and interpret its kernels, with memory initialised to NaN.

    Copies are done as late ("on_wait") or as early ("eager") as may be.
    """
    parameters = pltpu.InterpretParams(uninitialized_memory="nan", dma_execution_mode=copies)
    with targeted_tpu(kind, cores), pltpu.force_tpu_interpret_mode(parameters):
        yield


def targeted_tpu(kind="TPU v5 lite", cores=1):
    """Trace for this TPU."""
    device = AbstractDevice(kind, cores, "tpu")
    auto = (AxisType.Auto,)
    mesh = AbstractMesh((1,), ("device",), axis_types=auto, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
