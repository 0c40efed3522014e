import contextlib
import gc
import importlib.util
import math
import os
import pathlib
import signal
import sys
import time

import hypothesis
import jax
import pytest
from places import ROOT

# A busy machine is slow, which is no failure of a test. The same code has the same result every
# day; the nightly targets draw new inputs with --hypothesis-profile=new-draws. `make test` draws
# a third where a test does not say how many, and for costly properties (`marks.examples`).
hypothesis.settings.register_profile(
    "new-draws", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "same-draws", hypothesis.settings.get_profile("new-draws"), derandomize=True
)
hypothesis.settings.register_profile(
    "fewer-draws", hypothesis.settings.get_profile("same-draws"), max_examples=34
)
hypothesis.settings.load_profile("same-draws")

# The interpreter of GPU kernels blocks threads of XLA's pool, which has one thread per core. With
# two cores all threads can block, a deadlock. XLA reads the size of the pool from NPROC once.
os.environ.setdefault("NPROC", "16")

# Processes that tests start would compile every module they import, for seconds each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Without a driver CUPTI has no version, and jax would then not load the GPU compiler.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

# The interpreter of TPU kernels needs the threads that asynchronously dispatched work occupies, a
# deadlock with two cores. jax reads this once, when the CPU client starts.
jax.config.update("jax_cpu_enable_async_dispatch", False)

# A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP. Processes to which
# tests send them would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# jax keeps many objects per program, which slow every garbage collection of a long-lived worker.
gc.set_threshold(200_000, 50, 1000)

# Workers, processes that tests start, and later sessions share compiled programs: many tests need
# the same small ones, and reading one takes a tenth of the time. jax finds a program by its
# operations, the processor, and the compiler's version and options; not by names, so the text of a
# program may show names of before.  One that a killed process left unfinished is compiled again.
PROGRAMS = ROOT / ".pytest_cache" / "programs"
MOST_DAYS_UNREAD = 7
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Where the folder cannot be made, jax compiles everything.
    with contextlib.suppress(OSError):
        PROGRAMS.mkdir(parents=True, exist_ok=True)
    oldest = time.time() - MOST_DAYS_UNREAD * 24 * 3600
    for program in PROGRAMS.glob("*"):
        # Of two sessions that begin together, the other may have removed it.
        with contextlib.suppress(OSError):
            used = program.stat()
            if max(used.st_atime, used.st_mtime) < oldest:
                program.unlink()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# This process may have imported jax, which reads the variables, before.
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# jax does not promise that programs for chips that are not there can be read.
if any(map(importlib.util.find_spec, ("libtpu", "jax_cuda13_plugin"))):
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"

# Compiles in half the time; the programs are slower and their results stay. Processes that tests
# start inherit the variable.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"


def pytest_addoption(parser):
    parser.addoption(
        "--kills", type=int, default=50, help="kills of tests/experiments/test_random_kills.py"
    )


MAPPINGS = pathlib.Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def bounded_programs():
    """Frees compiled programs when this process has many.

    Each maps memory. Linux gives a process 65,530 mappings, beyond which XLA's compiler crashes.
    """
    yield
    if MAPPINGS.exists() and len(MAPPINGS.read_bytes().splitlines()) > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def array_sizes():
    """Returns array_sizes(function, *arguments), the element count of each array in its program.

    It reads the jaxpr and its inner jaxprs, so arrays of loops, custom gradients and remat count.
    Nothing runs, and arguments may be ShapeDtypeStructs. Arrays inside Pallas kernels do not count:
    they are in on-chip memory, which the kernel's tuning bounds.
    """

    def sizes(function, *arguments):
        variables = _variables(jax.make_jaxpr(function)(*arguments).jaxpr)
        return [math.prod(getattr(variable.aval, "shape", ())) for variable in variables]

    return sizes


@pytest.fixture(scope="module")
def optimized():
    """Compiles the programs of this module with all optimizations, as for a user."""
    jax.config.update("jax_disable_most_optimizations", False)
    os.environ.pop("JAX_DISABLE_MOST_OPTIMIZATIONS")
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"


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


@pytest.fixture(scope="session")
def kernel_folder():
    """Folder of compiled kernels for the CPU."""
    from sparse_dataflow.hardware.processor import processor

    return PROGRAMS.with_name("kernels") / processor()


@pytest.fixture(scope="session")
def compiled_kernels(kernel_folder):
    """Why kernels for the CPU are not compiled here; "" where they are.  A compiler that refuses
    them is a fault."""
    from sparse_dataflow.chips.cpu import kernels

    reason = kernels.build(kernel_folder)
    assert not reason or "has no C++ compiler" in reason, reason
    return reason
