"""Chips: peak rates, memory, bandwidth and links, with sources.

Rates are the vendors' dense figures (without structured sparsity) of the SXM / OAM boards.
"float32" is the rate of float32 products at JAX's default matmul precision
(https://docs.jax.dev/en/latest/201/precision.html): TF32 tensor cores on NVIDIA, one bfloat16 pass
on TPU, float32 matrix cores on AMD.

"int8" and "fp8" are the rates of 8-bit products; a chip of the table without one converts its
operands to a wider type.  Sources: NVIDIA, the same datasheets with sparsity, halved (A100 624
int8; H100 and H200 3,958 fp8 and int8; HGX B200 and GB200 NVL72, one GPU: 9 and 10 PFLOP/s of
each); AMD, the MI250X datasheet, 383/2 int8; TPU, pages "TPU v4" (275 bf16 or int8), "TPU v5e" (393
int8) and "TPU v6e" (1,836 int8), jax/_src/tpu_info.py (v5p 918 int8; v6e fp8 at the rate of
bfloat16; none on v5e and v5p).

| chip | rates, memory, bandwidth | links of one chip, bytes/s in one direction |
| --- | --- | --- |
| a100-40gb, a100-80gb | NVIDIA A100 datasheet (2021): 312 bf16, 156 TF32; 40 GB 1,555 GB/s, 80 GB SXM 2,039 GB/s | NVLink 3, 600 GB/s both ways, 8 in a node; one 200 Gb/s InfiniBand HDR a GPU (DGX A100 datasheet); PCIe 4 x16 to the host |
| h100 | NVIDIA H100 datasheet, SXM: 1,979 bf16 and 989 TF32 with sparsity, halved; 3.35 TB/s | NVLink 4, 900 GB/s both ways, 8 in a node; one 400 Gb/s NDR a GPU (DGX H100 datasheet); PCIe 5 x16 |
| h200 | NVIDIA H200 datasheet, SXM: rates of the H100; 4.8 TB/s, 141 GB, of which its driver offers programs 139 GiB | as the H100 |
| b200 | NVIDIA HGX/DGX B200 datasheets, one GPU of eight: 2.25 PFLOP/s bf16, 1.1 TF32, 180 GB, 8 TB/s | NVLink 5, 1,800 GB/s both ways, 8 in a node; 400 Gb/s a GPU (DGX B200 datasheet); PCIe 5 x16 |
| gb200 | NVIDIA/dgxc-benchmarking README.md: 2.45 PFLOP/s bf16; half of it TF32 (recalled); GB200 NVL72 datasheet, one GPU of 72: 186 GB, 8 TB/s | NVLink 5 over 72 GPUs, of which jobs take 64; 400 Gb/s a GPU; NVLink-C2C to the host |
| h100-96gb | pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 96 GB HBM2e, 2.4 TB/s, limited to 500 W | as the H100 (same source) |
| mi250x-gcd | AMD Instinct MI250X datasheet, one of its two GCDs (a GCD is a device to JAX): 383/2 bf16, 95.7/2 float32 matrix, 64 GB, 3.2768/2 TB/s; 191.5 as in arXiv 2312.12705 | OLCF Frontier user guide: 200 GB/s between the GCDs of a board, 50 to 100 between boards of a node (100 taken), 8 GCDs a node; 4 Slingshot-11 NICs of 25 GB/s a node; 36 GB/s to the host |
| mi300x | AMD Instinct MI300X datasheet: 1,307.4 bf16, 653.7 TF32, 2,614.9 fp8 and int8, 192 GB, 5.3 TB/s | 7 Infinity Fabric links of 64 GB/s to the others of 8; one 400 Gb/s adapter a GPU (MI300X platform datasheet); PCIe 5 x16 |
| b300 | NVIDIA HGX B300 data sheet, one GPU of eight: 36 PFLOP/s bf16, 18 TF32 and 72 fp8 with sparsity for eight, halved; its int8 is slower than bf16 and left out; 2.3 TB for eight, 8 TB/s | as the B200, but 800 Gb/s a GPU (ConnectX-8; the data sheet's 1.6 TB/s both ways for eight) |
| gb300 | NVIDIA GB300 NVL72 page, one GPU of 72: 180 PFLOP/s bf16, 90 TF32 and 360 fp8 for 72; 20 TB and 576 TB/s for 72 | as the GB200, but 800 Gb/s a GPU (72 ConnectX-8) |
| mi355x | AMD Instinct MI355X page: 2.5 PFLOP/s bf16 (2.4 GHz x 1,024 matrix cores), 157.3 TFLOP/s float32, as it has no TF32; 5 PFLOP/s fp8 and int8; 288 GB, 8 TB/s | 7 links of 153.6 GB/s both ways to the others of 8; one 400 Gb/s adapter a GPU assumed; PCIe 5 x16 |
| rtx-4090 | NVIDIA Ada GPU architecture whitepaper: 165.2 bf16 with float32 sums, 82.6 TF32, 24 GB, 1,008 GB/s | no NVLink: PCIe 4 x16, to the host and to others; 25 Gb/s a GPU assumed between hosts |
| tpu-v4 | Google Cloud TPU documentation, page "TPU v4": 275, 32 GiB, 1,200 GB/s a chip | arXiv 2304.01433: 3D torus, 6 links of 50 GB/s; data-centre network 200 Gb/s a host of 4 (recalled) |
| tpu-v5e | page "TPU v5e": 197, 16 GB, 819 GB/s | same page: 2D torus, 400 GB/s both ways, 256 a pod; 2 x 100 Gb/s a host of 8 |
| tpu-v5p | page "TPU v5p": 459, 95 GB, 2,765 GB/s | same page: 3D torus, 1,200 GB/s both ways, 6,144 in one job; 50 Gb/s a chip |
| tpu-v6e | page "TPU v6e": 918, 32 GB, 1,638 GB/s | same page: 2D torus, 800 GB/s both ways, 256 a pod; 100 Gb/s a chip (recalled) |
| tpu-7x-core | Google Cloud TPU documentation, page "TPU7x", one of the two devices of a chip: 2,307 bf16 and 4,614 fp8 a chip; 192 GiB, 7,380 GB/s a chip; no int8 rate is published | same page: 3D torus, 1,200 GB/s both ways a chip, 9,216 in a pod; 100 Gb/s a chip; the host's link as v6e's a chip (assumed) |

Latencies of a hop are orders of magnitude, not data-sheet figures: 5 us over NVLink and xGMI, 1 us
over ICI, 15 us between nodes.

Importing this module loads no jax.
"""  # noqa: E501

import dataclasses
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from sparse_dataflow.files import json_files
from sparse_dataflow.files.errors import UserError

TERA = 1e12
GIGA = 1e9
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Network:
    """Links of a chip: fast within an island, slow between islands.

    Attributes:
      island: number of chips joined by fast links (a node, a TPU pod).
      fast: bytes/s that a chip sends within its island: in total for a switch, along one axis in
        both directions for a torus.
      slow: bytes/s that a chip sends to other islands: its share of the node's adapters.
      axes: axes of the torus; 1 for a switch.
      pair: bytes/s between two chips of a board if it is not `fast`, else 0.
      fast_latency: seconds per hop within an island.
      slow_latency: seconds per hop between islands.
    """

    island: int
    fast: float
    slow: float
    axes: int = 1
    pair: float = 0.0
    fast_latency: float = 5e-6
    slow_latency: float = 15e-6


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator as JAX sees it (one device), or the host's CPU.

    Attributes:
      name: short name; key of CHIPS for a known chip.
      peak_flops: operand dtype -> FLOP/s of dense products; None for an unknown chip.  A missing
        dtype has no known rate.
      memory_bytes: bytes of device memory; None if unknown.
      bandwidth: memory bandwidth in bytes/s; None if unknown.
      network: links to other chips; None if unknown.
      host_bandwidth: bytes/s between device and host memory, in one direction; None if unknown.
      family: key of its constants in `efficiency.EFFICIENCIES`; "" for none.
    """

    name: str
    peak_flops: Mapping[str, float] | None = None
    memory_bytes: int | None = None
    bandwidth: float | None = None
    network: Network | None = None
    host_bandwidth: float | None = None
    family: str = ""

    def peak(self, dtype: str) -> float | None:
        """Returns FLOP/s for operands of `dtype`, or None if unknown."""
        return None if self.peak_flops is None else self.peak_flops.get(dtype)

    def product_words(self, precision: str, compute_dtype: str) -> str:
        """Returns how quantised products run here, next to those of `compute_dtype`."""
        head = f"{precision} products on {self.name}:"
        peak, wide = self.peak(precision), self.peak(compute_dtype)
        if peak and wide:
            return (
                f"{head} native, up to {peak / TERA:,.0f} TFLOP/s; {compute_dtype} has "
                f"{wide / TERA:,.0f}"
            )
        slower = "slower than without, meant for tests"
        if self.peak_flops is None:
            return f"{head} not known to be native; if they are emulated, they are {slower}"
        return f"{head} emulated, which is {slower}"

    def rates(self, dtype: str) -> tuple[float, float]:
        """Returns (FLOP/s for operands of `dtype`, memory bandwidth in bytes/s).

        Raises:
          UserError: one of them is unknown.
        """
        peak = self.peak(dtype)
        if peak is None or self.bandwidth is None:
            raise UserError(f"{self.name} has no known {dtype} rate or no known memory bandwidth.")
        return peak, self.bandwidth

    @property
    def is_tpu(self) -> bool:
        """Whether it is a TPU, by its constants."""
        return self.family.startswith("tpu")

    @property
    def capacity(self) -> float:
        """Bytes of device memory; infinite if unknown."""
        return math.inf if self.memory_bytes is None else self.memory_bytes


def _chip(
    name, family, bfloat16, float32, memory, gigabytes_per_second, host, network, **eight_bits
):
    peaks = {"bfloat16": bfloat16 * TERA, "float16": bfloat16 * TERA, "float32": float32 * TERA}
    if name.startswith("tpu"):
        del peaks["float16"]  # the MXU has no float16 mode
    peaks |= {dtype: rate * TERA for dtype, rate in eight_bits.items()}
    return Chip(name, peaks, int(memory), gigabytes_per_second * GIGA, network, host * GIGA, family)


def _switch(fast, slow, pair=0.0, island=8):
    return Network(island, fast * GIGA, slow * GIGA, pair=pair * GIGA)


def _torus(island, axis, slow, axes):
    return Network(island, axis * GIGA, slow * GIGA, axes, fast_latency=1e-6)


_HOPPER = {"fp8": 1979, "int8": 1979}

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _chip("a100-40gb", "ampere", 312, 156, 40 * GIB, 1555, 32, _switch(300, 25), int8=624),
        _chip("a100-80gb", "ampere", 312, 156, 80 * GIB, 2039, 32, _switch(300, 25), int8=624),
        _chip("h100", "hopper", 989.4, 494.7, 80 * GIB, 3350, 64, _switch(450, 50), **_HOPPER),
        _chip(
            "h100-96gb", "hopper-500w", 989.4, 494.7, 96e9, 2400, 64, _switch(450, 50), **_HOPPER
        ),
        _chip("h200", "hopper", 989.4, 494.7, 139 * GIB, 4800, 64, _switch(450, 50), **_HOPPER),
        _chip(
            "b200", "blackwell", 2250, 1100, 180 * GIGA, 8000, 64, _switch(900, 50),
            fp8=4500, int8=4500,
        ),
        _chip(
            "gb200", "blackwell", 2450, 1225, 186e9, 8000, 450, _switch(900, 50, island=64),
            fp8=5000, int8=5000,
        ),
        _chip(
            "mi250x-gcd", "cdna2", 191.5, 47.85, 64 * GIB, 1638.4, 36,
            _switch(100, 12.5, pair=200), int8=191.5,
        ),
        _chip(
            "tpu-v4", "tpu-v4", 275, 275, 32 * GIB, 1200, 16, _torus(4096, 100, 6.25, 3), int8=275
        ),
        _chip(
            "tpu-v5e", "tpu-v5e", 197, 197, 16 * GIGA, 819, 16, _torus(256, 100, 3.125, 2),
            int8=393,
        ),
        _chip(
            "tpu-v5p", "tpu-v5p", 459, 459, 95 * GIGA, 2765, 16, _torus(6144, 200, 6.25, 3),
            int8=918,
        ),
        _chip(
            "tpu-v6e", "tpu-v6e", 918, 918, 32 * GIGA, 1638, 32, _torus(256, 200, 12.5, 2),
            fp8=918, int8=1836,
        ),
    )
}  # fmt: skip

UNFITTED: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _chip(
            "mi300x", "", 1307.4, 653.7, 192e9, 5300, 64, _switch(448, 50), fp8=2614.9, int8=2614.9
        ),
        _chip("rtx-4090", "", 165.2, 82.6, 24e9, 1008, 32, _switch(32, 3)),
        _chip("b300", "blackwell", 2250, 1125, 288e9, 8000, 64, _switch(900, 100), fp8=4500),
        _chip(
            "gb300", "blackwell", 2500, 1250, 277e9, 8000, 450, _switch(900, 100, island=64),
            fp8=5000,
        ),
        _chip(
            "mi355x", "", 2516.6, 157.3, 288e9, 8000, 64, _switch(537.6, 50),
            fp8=5033.2, int8=5033.2,
        ),
        _chip(
            "tpu-7x-core", "tpu-v5p", 1153.5, 1153.5, 96 * GIB, 3690, 16,
            _torus(18432, 100, 6.25, 3), fp8=2307,
        ),
    )
}  # fmt: skip
"""Chips without published runs: their times have the constants of their family, or the prior."""

KNOWN = CHIPS | UNFITTED

ALIASES = {
    "a100": "a100-80gb",
    "v5litepod": "tpu-v5e",
    "rtx4090": "rtx-4090",
    **{kind: f"tpu-{kind}" for kind in ("v4", "v5e", "v5p", "v6e")},
    **dict.fromkeys(("tpu7x", "tpu-7x", "v7x", "ironwood"), "tpu-7x-core"),
}
"""Another name of a chip -> its key in KNOWN; as vendors and clouds say it."""

_MOST_BYTES = 2**20
_REQUIRED = ("name", "bfloat16_tflops", "memory_gb", "bandwidth_gb_s")
_OPTIONAL = ("float32_tflops", "fp8_tflops", "int8_tflops", "host_gb_s", "family")
_NETWORK = ("island", "fast_gb_s", "slow_gb_s", "axes")


def lookup(name: str, flag: str = "--hardware") -> Chip:
    """Returns the chip of a name in KNOWN or ALIASES, of a unique prefix, or of a TOML file.

    Args:
      flag: that errors name.

    Raises:
      UserError: no chip or several chips match; lists the legal names.
    """
    if chip := KNOWN.get(ALIASES.get(name, name)):
        return chip
    if name.endswith(".toml"):
        return read(Path(os.path.expanduser(name)), flag)
    matches = [chip for key, chip in KNOWN.items() if name and key.startswith(name)]
    if len(matches) != 1:
        raise UserError(
            f"{flag}={name} matches {'several chips' if matches else 'no chip'}; legal: "
            f"{', '.join(KNOWN)}, or a TOML file that describes a chip."
        )
    return matches[0]


def read(path: Path, flag: str = "--hardware") -> Chip:
    """Reads a chip from a TOML file.

    Keys: name, bfloat16_tflops, memory_gb, bandwidth_gb_s; optional float32_tflops (default: half
    of bfloat16_tflops), fp8_tflops and int8_tflops (absent: emulated), host_gb_s, family (whose
    fitted constants apply), and a table [network] with island, fast_gb_s, slow_gb_s and optional
    axes.  1 GB is 1e9 bytes; rates are per chip.

    Raises:
      UserError: the file does not exist or is not TOML, or a key is missing, unknown or not legal.
    """
    try:
        fields = tomllib.loads(json_files.read_bytes(path, _MOST_BYTES).decode())
    except OSError:
        raise UserError(f"{flag}={path} does not exist.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{flag}={path} is not TOML: {error}.") from None
    links = fields.pop("network", None)
    _check(path, fields, _REQUIRED, _OPTIONAL)
    if links is not None:
        if not isinstance(links, dict):
            raise UserError(f"{path}: network is not a table; legal: [network].")
        _check(path, links, _NETWORK[:3], _NETWORK[3:])
    family = fields.get("family", "")
    families = sorted({chip.family for chip in CHIPS.values()})
    if family and family not in families:
        raise UserError(f"{path}: family {family!r} is unknown; legal: {', '.join(families)}.")
    rate = fields["bfloat16_tflops"] * TERA
    # Of matrix units that have no rate for float32, half of bfloat16's is usual: TF32 on GPUs.
    peaks = {"bfloat16": rate, "float32": fields.get("float32_tflops", rate / 2 / TERA) * TERA}
    eight_bits = (dtype for dtype in ("fp8", "int8") if f"{dtype}_tflops" in fields)
    peaks |= {dtype: fields[f"{dtype}_tflops"] * TERA for dtype in eight_bits}
    network = links and Network(
        int(links["island"]),
        links["fast_gb_s"] * GIGA,
        links["slow_gb_s"] * GIGA,
        int(links.get("axes", 1)),
    )
    return Chip(
        fields["name"],
        peaks,
        int(fields["memory_gb"] * GIGA),
        fields["bandwidth_gb_s"] * GIGA,
        network,
        fields["host_gb_s"] * GIGA if "host_gb_s" in fields else None,
        family,
    )


def _check(path, fields, required, optional):
    legal = (*required, *optional)
    for key in fields:
        if key not in legal:
            raise UserError(f"{path}: {key} is unknown; legal: {', '.join(legal)}.")
    missing = [key for key in required if key not in fields]
    if missing:
        raise UserError(f"{path} has no {', '.join(missing)}; required: {', '.join(required)}.")
    for key, value in fields.items():
        text = key in ("name", "family")
        whole = key in ("island", "axes")
        good = isinstance(value, str) if text else _positive(value, whole)
        if not good:
            kind = "text" if text else f"a {'whole ' if whole else ''}number above 0"
            raise UserError(f"{path}: {key} = {value!r} is not legal; legal: {kind}.")


def _positive(value, whole):
    kinds = int if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < float("inf")
