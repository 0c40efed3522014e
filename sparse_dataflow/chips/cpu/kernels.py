"""Kernels in C++, compiled once for this processor and called by XLA.

`build` compiles them, and implementations that call one are refused before.  Whoever prepares
weights for decoding calls `build` with a folder for the library.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np

from sparse_dataflow.files import derived
from sparse_dataflow.hardware.processor import processor

FOLDER = Path(__file__).parent
KERNELS = ("row_matmul", "cached_attention")
SOURCES = tuple(FOLDER / f"{kernel}.cc" for kernel in KERNELS)
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-w")
COMPILERS = ("c++", "g++", "clang++")
LONGEST_COMPILATION = 300
"""Seconds; a busy machine takes half a minute."""

_NOT_BUILT = "kernels are not compiled."
_state = {"refusal": _NOT_BUILT}


def build(folder: Path) -> str:
    """Compiles the kernels into a folder, unless they are there whole, and registers them with XLA.

    Any number of processes may do so together; see `files.derived`.

    Args:
      folder: for libraries with this processor's instructions.

    Returns:
      Why they cannot be compiled or loaded; empty if they run.
    """
    if _state["refusal"] == _NOT_BUILT:
        _state["refusal"] = _build(folder)
    return _state["refusal"]


def _build(folder):
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return f"this machine has no C++ compiler ({', '.join(COMPILERS)}, or CXX)."
    headers = jax.ffi.include_dir()
    origin = {
        "sources": [file.read_bytes() for file in (FOLDER / "kernel.h", *SOURCES)],
        "flags": FLAGS,
        "compiler": compiler,
        "jax": jax.lib.__version__,
        "processor": processor(),
    }

    def compile_to(path):
        command = [*compiler.split(), *FLAGS, f"-I{headers}", "-o", path, *SOURCES]
        subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_COMPILATION)

    try:
        # A library that does not load is made once more.
        for _ in range(2):
            library = derived.derive(folder, "kernels", origin, compile_to, ".so").path
            if _registers(library):
                return ""
            derived.remove(library)  # It may be of a machine with another system.
        return "its library cannot be loaded."
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{compiler} failed{': ' + lines[0][:200] if lines else ''}."
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it was not compiled ({error})."


def _registers(library):
    """Returns whether a library could be loaded.  The system's loader does not refuse a damaged
    one: a short one ends the process (SIGBUS)."""
    try:
        loaded = ctypes.CDLL(str(library))
        handlers = {name: getattr(loaded, symbol(name)) for name in KERNELS}
    except (OSError, AttributeError):
        return False
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(symbol(name), jax.ffi.pycapsule(handler), platform="cpu")
    return True


DTYPES = ("float32", "bfloat16")
"""Of activations."""


def symbol(kernel: str) -> str:
    """Returns the name of a kernel's function."""
    return f"sparse_dataflow_{kernel}"


def kernel_refusal(*dtypes: np.dtype) -> str:
    """Return why kernels cannot run with activations of dtypes; empty if they can."""
    if other := {dtype.name for dtype in dtypes} - {*DTYPES}:
        return f"kernels read {' or '.join(DTYPES)}, not {', '.join(sorted(other))}."
    return _state["refusal"]
