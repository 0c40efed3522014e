"""The product with rows in C++, compiled once for this processor and called by XLA.

`build` compiles it, and the implementation is refused before.  Whoever prepares weights for
decoding calls `build` with a folder for the library.
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

SOURCE = Path(__file__).with_name("row_matmul.cc")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-w")
SYMBOL = "sparse_dataflow_row_matmul"
COMPILERS = ("c++", "g++", "clang++")
LONGEST_COMPILATION = 300
"""Seconds; a busy machine takes half a minute."""

_NOT_BUILT = "it is not compiled."
_state = {"refusal": _NOT_BUILT}


def build(folder: Path) -> str:
    """Compiles the product into a folder, unless it is there whole, and registers it with XLA.

    Any number of processes may do so together; see `files.derived`.

    Args:
      folder: for libraries with this processor's instructions.

    Returns:
      Why it cannot be compiled or loaded; empty if it runs.
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
        "source": SOURCE.read_bytes(),
        "flags": FLAGS,
        "compiler": compiler,
        "jax": jax.lib.__version__,
        "processor": processor(),
    }

    def compile_to(path):
        command = [*compiler.split(), *FLAGS, f"-I{headers}", "-o", path, SOURCE]
        subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_COMPILATION)

    try:
        for _ in range(2):
            library = derived.derive(folder, "row_matmul", origin, compile_to, ".so").path
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
        handler = getattr(ctypes.CDLL(str(library)), SYMBOL)
    except (OSError, AttributeError):
        return False
    jax.ffi.register_ffi_target(SYMBOL, jax.ffi.pycapsule(handler), platform="cpu")
    return True


DTYPES = ("float32", "bfloat16")
"""Of tokens; values may be int8 too."""


def row_matmul_refusal(x, values, inputs, scale) -> str:
    """Return why the product cannot run; empty if it can."""
    if x.dtype.name not in DTYPES or values.dtype.name not in (*DTYPES, "int8"):
        return f"it multiplies float32 or bfloat16, not {x.dtype.name} with {values.dtype.name}."
    return _state["refusal"]


def run_row_matmul(
    x: jax.Array, values: jax.Array, inputs: jax.Array | None, scale: jax.Array | None
) -> jax.Array:
    """Compute `row_matmul`."""
    groups, _, width = values.shape
    result = jax.ShapeDtypeStruct((len(x), groups * width), x.dtype)
    index = np.empty((0, 0), np.uint16) if inputs is None else inputs
    factors = np.empty(0, np.float32) if scale is None else scale
    return jax.ffi.ffi_call(SYMBOL, result)(x, values, index, factors)
