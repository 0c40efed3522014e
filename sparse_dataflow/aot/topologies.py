"""Chips that a compiler knows and that need not be there: TPU slices and nodes of H200s by name."""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import CHIPS, Chip

H200 = Path(__file__).parent / "h200.txtpb"
"""What the GPU compiler has to know of an H200: a `GpuTargetConfigProto` as text."""

NODE = 8
"""H200s of a node (DGX H200 datasheet)."""

HOST = 4
"""TPU chips of a host, in the square 2x2 (Google Cloud TPU documentation, "TPU v5e", "TPU v5p")."""

_TPUS = {"v5e": ("tpu-v5e", 2, 16), "v5p": ("tpu-v5p", 3, 24), "v6e": ("tpu-v6e", 2, 16)}
# Sides of the largest slice: "TPU v5e", "TPU v6e": 16x16; "TPU v5p": 6,144 chips, as 16x16x24.
_LEGAL = {
    "v5e": "v5e:1x1, v5e:2x2, v5e:2x4, v5e:4x4 and so on by even sides to v5e:16x16",
    "v5p": "v5p:1x1x1, v5p:2x2x1, v5p:2x2x2, v5p:2x4x4, v5p:4x4x4 and so on to 6,144 chips",
    "v6e": "v6e as v5e",
    "h200": f"h200:1 to h200:{NODE}, h200:4x{NODE} for four nodes",
}
SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What libtpu reads where no TPU is; any type will do, as the topology names the chip."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips and how they are joined.

    Attributes:
      name: as it was asked for.
      kind: "v5e", "v5p", "v6e" or "h200".
      sides: of the torus; (nodes, GPUs of a node) for "h200".
      slices: of a TPU, joined by the data-centre network.
    """

    name: str
    kind: str
    sides: tuple[int, ...]
    slices: int = 1

    @property
    def size(self) -> int:
        """Chips."""
        return self.slices * math.prod(self.sides)

    @property
    def chip(self) -> Chip:
        """Its rates and memory."""
        return CHIPS["h200" if self.kind == "h200" else _TPUS[self.kind][0]]

    @property
    def platform(self) -> str:
        """What jax lowers for."""
        return "cuda" if self.kind == "h200" else "tpu"


def parse(name: str, slices: int = 1) -> Topology:
    """The topology of a name, "v5p:16x16x12", "h200:8" or "h200:4x8".

    Args:
      name: kind and sides.
      slices: of a TPU.

    Raises:
      UserError: there is none of this name; the legal ones are named.
    """
    kind, _, shape = name.partition(":")
    numbers = re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", shape)
    sides = tuple(int(side) for side in shape.split("x")) if numbers else ()
    if kind == "h200" and len(sides) == 1:
        sides = (1, *sides)
    if not _legal(kind, sides):
        named = _LEGAL.get(kind) or "; ".join(_LEGAL.values())
        raise UserError(f"--topology={name} is unknown; legal: {named}.")
    if slices > 1 and kind == "h200":
        raise UserError(
            f"--slices={slices} of {name}: only TPUs come in slices; legal: --slices=1, and nodes "
            f"as in h200:4x{NODE}."
        )
    return Topology(name, kind, sides, slices)


def of_chips(chip: Chip, number: int) -> Topology | None:
    """The most compact topology of so many chips; None where no compiler here knows one."""
    if chip.name == "h200":
        nodes = -(-number // NODE)
        sides = (nodes, number // nodes)
        found = [sides] if math.prod(sides) == number and _legal("h200", sides) else []
        kind = "h200"
    else:
        kinds = [kind for kind, (name, *_) in _TPUS.items() if name == chip.name]
        if not kinds:
            return None
        (kind,) = kinds
        found = [s for s in _boxes(number, _TPUS[kind][1]) if _legal(kind, s)]
    if not found:
        return None
    sides = min(found, key=lambda sides: (sum(sides), sides))
    return parse(f"{kind}:{'x'.join(map(str, sides))}")


def _boxes(number, dimensions):
    """All ways to write the number as so many factors, in ascending order or not."""
    if dimensions == 1:
        return [(number,)]
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return [(n, *rest) for n in divisors for rest in _boxes(number // n, dimensions - 1)]


def _legal(kind, sides):
    if not sides:
        return False
    if kind == "h200":
        nodes, gpus = sides if len(sides) == 2 else (0, 0)
        return nodes >= 1 and gpus <= NODE and (nodes == 1 or gpus == NODE)
    if kind not in _TPUS:
        return False
    _, dimensions, longest = _TPUS[kind]
    one = math.prod(sides) == 1
    square = all(side % 2 == 0 for side in sides[:2])
    return len(sides) == dimensions and max(sides) <= longest and (one or square)


def refusal(topology: Topology) -> str:
    """Why nothing can be compiled for it here; empty where it can."""
    if topology.platform == "tpu" and not importlib.util.find_spec("libtpu"):
        return (
            "the TPU compiler is not installed; it comes with the extra aot: make aot-tpu, or "
            "pip install libtpu (Linux on x86-64)."
        )
    if topology.platform == "cuda" and not importlib.util.find_spec("jax_cuda13_plugin"):
        return (
            "the GPU compiler is not installed; it comes with the extra cuda: make aot-gpu, or "
            "pip install 'jax[cuda13]' (Linux)."
        )
    return ""


@functools.cache
def devices(topology: Topology) -> tuple[jax.Device, ...]:
    """Its devices, to build meshes of and to compile for; nothing can run on them.

    Raises:
      UserError: the compiler is not installed, or has no such topology.
    """
    if reason := refusal(topology):
        raise UserError(f"--topology={topology.name}: {reason}")
    if topology.platform == "cuda":
        nodes, gpus = topology.sides
        described = topologies.get_topology_desc(
            "", platform="cuda", target_config=H200.read_text(), topology=f"1x{nodes}x{gpus}"
        )
        return tuple(described.devices)
    shape = "x".join(map(str, topology.sides))
    try:
        return tpu_devices(f"{topology.kind}:{shape}", topology.slices)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise UserError(
            f"--topology={topology.name}: libtpu refuses it ({said}); legal: "
            f"{_LEGAL[topology.kind]}."
        ) from None


def tpu_devices(name: str, slices: int = 1) -> tuple[jax.Device, ...]:
    """Devices of a topology by libtpu's own name; of a v4 two a chip."""
    more = {"num_slices": slices} if slices > 1 else {}
    with _settings():
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **more)
    return tuple(found.devices)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """libtpu's settings in the environment, for as long as it reads them; a user's own stay."""
    missing = {name: value for name, value in SETTINGS.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def targeted(device: jax.Device) -> contextlib.AbstractContextManager:
    """What is traced inside for one device is for one of this kind, its kernels too."""
    kind = "cuda" if device.platform == "gpu" else device.platform
    cores = getattr(device, "num_cores", None) or getattr(device, "core_count", None) or 1
    abstract = AbstractDevice(device.device_kind, cores, kind)
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=abstract)
    return jax.sharding.use_abstract_mesh(mesh)
