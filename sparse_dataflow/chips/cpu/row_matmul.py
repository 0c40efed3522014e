"""The product with rows in C++, compiled once for this processor and called by XLA.

`build` compiles it, and the implementation is refused before.  Whoever prepares weights for
decoding calls `build` with a folder for the library.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

SOURCE = Path(__file__).with_name("row_matmul.cc")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-w")
SYMBOL = "sparse_dataflow_row_matmul"
COMPILERS = ("c++", "g++", "clang++")
LONGEST_COMPILATION = 300
"""Seconds; a busy machine takes half a minute."""

_NOT_BUILT = "it is not compiled."
_state = {"refusal": _NOT_BUILT}


def build(folder: Path) -> str:
    """Compiles the product into a folder, unless it is there, and registers it with XLA.

    Any number of processes may do so together: each writes a file of its own, and renames it.

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
    key = hashlib.sha256(SOURCE.read_bytes() + f"{FLAGS} {jax.lib.__version__}".encode())
    library = folder / f"row_matmul-{key.hexdigest()[:16]}.so"
    try:
        if not _registers(library):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as ours:
                made = Path(ours) / library.name
                command = [*compiler.split(), *FLAGS, f"-I{headers}", "-o", made, SOURCE]
                subprocess.run(
                    command, check=True, capture_output=True, timeout=LONGEST_COMPILATION
                )
                os.replace(made, library)
            if not _registers(library):
                return "its library cannot be loaded."
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{compiler} failed{': ' + lines[0][:200] if lines else ''}."
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it was not compiled ({error})."
    return ""


def _registers(library):
    """Returns whether a library could be loaded; a damaged one is compiled again."""
    try:
        handler = getattr(ctypes.CDLL(str(library)), SYMBOL)
    except (OSError, AttributeError):
        return False
    jax.ffi.register_ffi_target(SYMBOL, jax.ffi.pycapsule(handler), platform="cpu")
    return True


def refusal(x, values, inputs, kernel) -> str:
    """Return why the product cannot run; empty if it can."""
    if x.dtype.name not in ("float32", "bfloat16") or values.dtype != x.dtype:
        return f"it multiplies float32 or bfloat16, not {x.dtype.name} with {values.dtype.name}."
    return _state["refusal"]


def run(x: jax.Array, values: jax.Array, inputs: jax.Array, kernel: jax.Array | None) -> jax.Array:
    """Compute `row_matmul`; no number of tokens needs the kernel."""
    groups, _, width = values.shape
    result = jax.ShapeDtypeStruct((len(x), groups * width), x.dtype)
    return jax.ffi.ffi_call(SYMBOL, result)(x, values, inputs)
