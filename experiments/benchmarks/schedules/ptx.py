"""Registers, spills and matrix instructions of GPU kernels, from their PTX.

The assembler is that of the CUDA wheels of jax (the extra `cuda`).  Importing this module loads no
jax.
"""

import dataclasses
import importlib.util
import re
import subprocess
from pathlib import Path

from sparse_dataflow.files.errors import UserError

_PRODUCT = re.compile(
    r"\b(wgmma|mma)\.(?:mma_async\.)?sync\.aligned\.(m\d+n\d+k\d+)|\b(tcgen05)\.mma"
)
_ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.S,
)


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor.

    Attributes:
      name: of its entry.
      registers: of a thread.
      spills: bytes of registers stored to memory and loaded again, for lack of registers.
      products: its matrix instructions, such as "wgmma m64n128k16"; tcgen05 has its shape in data.
    """

    name: str
    registers: int
    spills: int
    products: tuple[str, ...]


def resources(path: Path) -> list[Resources]:
    """Assembles a file of PTX and returns what each of its kernels takes.

    A file with several kernels names the matrix instructions of all with each.

    Raises:
      UserError: there is no assembler, or it refuses the text.
    """
    text = path.read_text()
    (arch,) = re.findall(r"^\.target (\w+)", text, re.M)
    command = [assembler(), "-v", f"-arch={arch}", str(path), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"ptxas does not assemble {path.name}: {done.stderr.strip()[-300:]}")
    return read_report(text, done.stderr)


def read_report(text: str, report: str) -> list[Resources]:
    """Returns what each kernel takes, from its PTX and the report of `ptxas -v`."""
    shapes = {f"{m[1]} {m[2]}" if m[1] else m[3] for m in _PRODUCT.finditer(text)}
    return [
        Resources(name, int(registers), int(stored) + int(loaded), tuple(sorted(shapes)))
        for name, stored, loaded, registers in _ENTRY.findall(report)
    ]


def assembler() -> str:
    """Returns the path of ptxas.

    Raises:
      UserError: the CUDA wheels are not installed.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = (spec and spec.submodule_search_locations) or ()
    for folder in folders:
        for path in sorted(Path(folder).glob("*/bin/ptxas")):
            return str(path)
    raise UserError("ptxas is not installed; install the extra cuda with make aot-gpu.")
