"""Described devices for ahead-of-time compilation: TPU slices and nodes of H200s, by name."""

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
"""The GPU compiler's description of an H200, a `GpuTargetConfigProto` as text."""

GPUS_PER_NODE = 8
"""H200s per node (DGX H200 datasheet)."""

_TPUS = {"v5e": ("tpu-v5e", 2, 16), "v5p": ("tpu-v5p", 3, 24), "v6e": ("tpu-v6e", 2, 16)}
# Sides of the largest slice: "TPU v5e", "TPU v6e": 16x16; "TPU v5p": 6,144 chips, as 16x16x24.
_LEGAL = {
    "v5e": "v5e:1x1, v5e:2x2, v5e:2x4, v5e:4x4 and so on by even sides to v5e:16x16",
    "v5p": "v5p:1x1x1, v5p:2x2x1, v5p:2x2x2, v5p:2x4x4, v5p:4x4x4 and so on to 6,144 chips",
    "v6e": "v6e as v5e",
    "h200": f"h200:1 to h200:{GPUS_PER_NODE}, h200:4x{GPUS_PER_NODE} for four nodes",
}
LIBTPU_SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment that libtpu needs without a TPU.  Any accelerator type works: the topology names the
chip."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A set of chips and their network.

    Attributes:
      name: the name that the user gave.
      kind: "v5e", "v5p", "v6e" or "h200".
      sides: sides of the TPU torus, in chips; (nodes, GPUs per node) for "h200".
      slices: number of TPU slices, joined by the data-centre network.
    """

    name: str
    kind: str
    sides: tuple[int, ...]
    slices: int = 1

    @property
    def size(self) -> int:
        """Number of chips."""
        return self.slices * math.prod(self.sides)

    @property
    def chip(self) -> Chip:
        """Rates and memory of one chip."""
        return CHIPS["h200" if self.kind == "h200" else _TPUS[self.kind][0]]

    @property
    def platform(self) -> str:
        """Platform that jax lowers for."""
        return "cuda" if self.kind == "h200" else "tpu"


def parse(name: str, slices: int = 1) -> Topology:
    """Returns the topology of a name such as "v5p:16x16x12", "h200:8" or "h200:4x8".

    Args:
      name: kind and sides.
      slices: number of TPU slices.

    Raises:
      UserError: the name or the number of slices is illegal; names the legal ones.
    """
    kind, _, shape = name.partition(":")
    numbers = re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", shape)
    sides = tuple(int(side) for side in shape.split("x")) if numbers else ()
    if kind == "h200" and len(sides) == 1:
        sides = (1, *sides)
    if not _legal(kind, sides):
        legal = _LEGAL.get(kind) or "; ".join(_LEGAL.values())
        raise UserError(f"--topology={name} is unknown; legal: {legal}.")
    if slices > 1 and kind == "h200":
        raise UserError(
            f"--slices={slices} of {name}: only TPUs come in slices; legal: --slices=1, and nodes "
            f"as in h200:4x{GPUS_PER_NODE}."
        )
    return Topology(name, kind, sides, slices)


def most_compact(chip: Chip, number: int) -> Topology | None:
    """Returns the topology of `number` chips with the smallest sum of sides.

    None if no compiler here supports the chip, or it has no topology of that size.
    """
    if chip.name == "h200":
        kind, nodes = "h200", -(-number // GPUS_PER_NODE)
        candidates = [(nodes, number // nodes)]
    else:
        kinds = [kind for kind, (name, *_) in _TPUS.items() if name == chip.name]
        if not kinds:
            return None
        (kind,) = kinds
        candidates = _factorizations(number, _TPUS[kind][1])
    legal = [s for s in candidates if math.prod(s) == number and _legal(kind, s)]
    if not legal:
        return None
    sides = min(legal, key=lambda sides: (sum(sides), sides))
    return parse(f"{kind}:{'x'.join(map(str, sides))}")


def _factorizations(number, dimensions):
    """Returns all ordered tuples of `dimensions` factors whose product is `number`."""
    if dimensions == 1:
        return [(number,)]
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return [(n, *rest) for n in divisors for rest in _factorizations(number // n, dimensions - 1)]


def _legal(kind, sides):
    if not sides:
        return False
    if kind == "h200":
        nodes, gpus = sides if len(sides) == 2 else (0, 0)
        return nodes >= 1 and gpus <= GPUS_PER_NODE and (nodes == 1 or gpus == GPUS_PER_NODE)
    if kind not in _TPUS:
        return False
    _, dimensions, longest = _TPUS[kind]
    single = math.prod(sides) == 1
    whole_hosts = all(side % 2 == 0 for side in sides[:2])  # A host has 2x2 chips.
    return len(sides) == dimensions and max(sides) <= longest and (single or whole_hosts)


def missing_compiler(topology: Topology) -> str:
    """Returns how to install the compiler of a topology; "" if it is installed."""
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
    """Returns the described devices, for meshes and for compiling; nothing can run on them.

    Raises:
      UserError: the compiler is not installed, or does not support the topology.
    """
    if reason := missing_compiler(topology):
        raise UserError(f"--topology={topology.name}: {reason}")
    if topology.platform == "cuda":
        nodes, gpus = topology.sides
        description = topologies.get_topology_desc(
            "", platform="cuda", target_config=H200.read_text(), topology=f"1x{nodes}x{gpus}"
        )
        return tuple(description.devices)
    shape = "x".join(map(str, topology.sides))
    try:
        return tpu_devices(f"{topology.kind}:{shape}", topology.slices)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"--topology={topology.name}: libtpu refuses it ({reason}); legal: "
            f"{_LEGAL[topology.kind]}."
        ) from None


def tpu_devices(name: str, slices: int = 1) -> tuple[jax.Device, ...]:
    """Returns the devices of a topology by libtpu's name for it; a v4 has two devices per chip."""
    options = {"num_slices": slices} if slices > 1 else {}
    with _libtpu_environment():
        description = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    return tuple(description.devices)


@contextlib.contextmanager
def _libtpu_environment() -> Iterator[None]:
    """Sets libtpu's settings inside the context, except those that the user has set."""
    missing = {name: value for name, value in LIBTPU_SETTINGS.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def tracing_for(device: jax.Device) -> contextlib.AbstractContextManager:
    """Returns a context in which code, with its kernels, is traced for a device of this kind."""
    kind = "cuda" if device.platform == "gpu" else device.platform
    cores = getattr(device, "num_cores", None) or getattr(device, "core_count", None) or 1
    abstract = AbstractDevice(device.device_kind, cores, kind)
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=abstract)
    return jax.sharding.use_abstract_mesh(mesh)
