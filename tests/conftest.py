import gc
import math
import os
import pathlib
import signal
import sys

import hypothesis
import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

# A machine that is busy with other things is slow, and no test is wrong for that.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# The interpreter of GPU kernels blocks threads of XLA's pool, which has one a core, while other
# threads of the same kernel wait for one: with two cores it sometimes waits for ever.  XLA reads
# the size of the pool here, once.
os.environ.setdefault("NPROC", "16")

# On a machine without a driver CUPTI does not tell its version, and jax would then not load the
# compiler for GPUs at all.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

# The interpreter of TPU kernels runs on the threads that dispatched work would occupy: with two
# cores it sometimes waits for itself.  Read once, when the CPU client starts.
jax.config.update("jax_cpu_enable_async_dispatch", False)

# A shell starts what it puts in the background with Ctrl-C ignored, and so would be the processes
# that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What jax keeps of each program makes every collection of a long-lived worker slower.
gc.set_threshold(200_000, 50, 1000)

# Programs compile in half the time and run slower; what they compute stays.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def array_sizes():
    """array_sizes(function, *arguments) -> elements of each array in the function's program.

    Reads the jaxpr and all jaxprs inside it, so it counts what loops, custom gradients and remat
    make; nothing runs, and arguments may be ShapeDtypeStructs.  Inside a Pallas kernel it does not
    look: what is made there lies on the chip, in memory that the kernel's tuning bounds.
    """

    def sizes(function, *arguments):
        variables = _variables(jax.make_jaxpr(function)(*arguments).jaxpr)
        return [math.prod(getattr(variable.aval, "shape", ())) for variable in variables]

    return sizes


@pytest.fixture(scope="module")
def optimized():
    """Programs of this module are compiled as a user's."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def _variables(jaxpr):
    yield from (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars)
    for equation in jaxpr.eqns:
        yield from equation.outvars
        if equation.primitive.name == "pallas_call":
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _variables(inner)
