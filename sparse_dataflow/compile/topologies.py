"""Topologies for ahead-of-time compilation: TPU slices and GPU nodes, by name."""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
from collections.abc import Iterator

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from sparse_dataflow.compile.gpu_targets import AMD_TARGETS, TARGETS, AmdTarget, GpuTarget
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import CHIPS, Chip

NODE = 8
"""GPUs per node (DGX A100, H100, H200 and B200 datasheets)."""

_GPUS = {"a100": "a100-80gb", "h100": "h100", "h200": "h200", "b200": "b200"}

_TPUS = {"v5e": ("tpu-v5e", 2, 16), "v5p": ("tpu-v5p", 3, 24), "v6e": ("tpu-v6e", 2, 16)}
_CHIPS = _GPUS | {kind: name for kind, (name, *_) in _TPUS.items()}
# Largest slices (Google Cloud TPU documentation): v5e and v6e 16x16, v5p 16x16x24.
_LEGAL = {
    "v5e": "v5e:1x1, v5e:2x2, v5e:2x4, v5e:4x4 and so on by even sides to v5e:16x16",
    "v5p": "v5p:1x1x1, v5p:2x2x1, v5p:2x2x2, v5p:2x4x4, v5p:4x4x4 and so on to 6,144 chips",
    "v6e": "v6e as v5e",
    "h200": f"h200:1 to h200:{NODE}, h200:4x{NODE} for four nodes",
    **{kind: f"{kind} as h200" for kind in _GPUS if kind != "h200"},
}
SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
"""Environment variables of libtpu on a machine without a TPU, and of JAX's plugin on one without a
GPU.  The accelerator type is arbitrary, because the topology names the chip."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips and their arrangement.

    Attributes:
      name: name as parsed.
      kind: "v5e", "v5p", "v6e", "a100", "h100", "h200" or "b200".
      sides: sides of the torus; (nodes, GPUs per node) for GPUs.
      slices: TPU slices, joined by the data-centre network.
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
        """Rates and memory of a chip."""
        return CHIPS[_CHIPS[self.kind]]

    @property
    def platform(self) -> str:
        """Lowering platform of JAX, "cuda" or "tpu"."""
        return "cuda" if self.kind in _GPUS else "tpu"


def parse(name: str, slices: int = 1) -> Topology:
    """Parses a topology such as "v5p:16x16x12", "h200:8" or "h200:4x8".

    Args:
      name: kind and sides.
      slices: number of TPU slices.

    Raises:
      UserError: the name is unknown; lists the legal names.
    """
    kind, _, shape = name.partition(":")
    numbers = re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", shape)
    sides = tuple(int(side) for side in shape.split("x")) if numbers else ()
    # One number is a single node.
    if kind in _GPUS and len(sides) == 1:
        sides = (1, *sides)
    if not _legal(kind, sides):
        legal = _LEGAL.get(kind) or "; ".join(_LEGAL.values())
        raise UserError(f"--topology={name} is unknown; legal: {legal}.")
    if slices > 1 and kind in _GPUS:
        raise UserError(
            f"--slices={slices} is not legal for {name}, because only TPUs have slices; legal: "
            f"--slices=1, and several nodes as in {kind}:4x{NODE}."
        )
    return Topology(name, kind, sides, slices)


def compact_topology(chip: Chip, number: int) -> Topology | None:
    """Returns the most compact topology of a number of chips; None if there is none."""
    kind = next((kind for kind, name in _CHIPS.items() if name == chip.name), "")
    if kind in _GPUS:
        nodes = -(-number // NODE)
        boxes = [(nodes, number // nodes)]
    else:
        boxes = _boxes(number, _TPUS[kind][1]) if kind else []
    legal = [sides for sides in boxes if math.prod(sides) == number and _legal(kind, sides)]
    if not legal:
        return None
    # The smallest sum is nearest to a cube, with the fewest hops.
    sides = min(legal, key=lambda sides: (sum(sides), sides))
    return parse(f"{kind}:{'x'.join(map(str, sides))}")


def _boxes(number, dimensions):
    """Returns all ordered factorisations of a number into `dimensions` factors."""
    if dimensions == 1:
        return [(number,)]
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return [(n, *rest) for n in divisors for rest in _boxes(number // n, dimensions - 1)]


def _legal(kind, sides):
    if not sides:
        return False
    if kind in _GPUS:
        nodes, gpus = sides if len(sides) == 2 else (0, 0)
        return nodes >= 1 and gpus <= NODE and (nodes == 1 or gpus == NODE)
    if kind not in _TPUS:
        return False
    _, dimensions, longest = _TPUS[kind]
    single = math.prod(sides) == 1
    even = all(side % 2 == 0 for side in sides[:2])
    return len(sides) == dimensions and max(sides) <= longest and (single or even)


def missing_compiler(topology: Topology) -> str:
    """Returns why this machine cannot compile for a topology; "" if it can."""
    if topology.platform == "tpu" and not importlib.util.find_spec("libtpu"):
        return (
            "the TPU compiler is not installed; install the extra aot with make aot-tpu, or "
            "pip install libtpu (Linux on x86-64)."
        )
    if topology.platform == "cuda" and not importlib.util.find_spec("jax_cuda13_plugin"):
        return (
            "the GPU compiler is not installed; install the extra cuda with make aot-gpu, or "
            "pip install 'jax[cuda13]' (Linux)."
        )
    return ""


@functools.cache
def devices(topology: Topology) -> tuple[jax.Device, ...]:
    """Returns the devices of a topology, for meshes and compilation only.

    Raises:
      UserError: the compiler is not installed, or does not support the topology.
    """
    if reason := missing_compiler(topology):
        raise UserError(f"--topology={topology.name}: {reason}")
    if topology.platform == "cuda":
        nodes, gpus = topology.sides
        return gpu_devices(topology.kind, nodes, gpus)
    shape = "x".join(map(str, topology.sides))
    try:
        return tpu_devices(f"{topology.kind}:{shape}", topology.slices)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"--topology={topology.name} is not supported by libtpu ({reason}); legal: "
            f"{_LEGAL[topology.kind]}."
        ) from None


def gpu_devices(kind: str, nodes: int = 1, gpus: int = 1) -> tuple[jax.Device, ...]:
    """Returns the devices of nodes with GPUs of a kind in `TARGETS` or `AMD_TARGETS`."""
    target: GpuTarget | AmdTarget = AMD_TARGETS.get(kind) or TARGETS[kind]
    with _settings():
        description = topologies.get_topology_desc(
            "", platform=target.platform, target_config=target.text(), topology=f"1x{nodes}x{gpus}"
        )
    return tuple(description.devices)


def tpu_devices(name: str, slices: int = 1) -> tuple[jax.Device, ...]:
    """Returns the devices of a topology by libtpu's name; a v4 chip has two."""
    options = {"num_slices": slices} if slices > 1 else {}
    with _settings():
        description = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    return tuple(description.devices)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Sets SETTINGS in the environment temporarily; those of the user stay."""
    missing = {name: value for name, value in SETTINGS.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def lowering_platform(device: jax.Device) -> str:
    """Returns JAX's name of the platform that programs of a device are lowered for."""
    if device.platform != "gpu":
        return device.platform
    is_amd = device.device_kind in {target.device_kind for target in AMD_TARGETS.values()}
    return "rocm" if is_amd else "cuda"


def tracing_for(device: jax.Device) -> contextlib.AbstractContextManager:
    """Returns a context in which JAX traces programs and kernels for this kind of device."""
    cores = getattr(device, "num_cores", None) or getattr(device, "core_count", None) or 1
    abstract = AbstractDevice(device.device_kind, cores, lowering_platform(device))
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=abstract)
    return jax.sharding.use_abstract_mesh(mesh)
