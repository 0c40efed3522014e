"""Account of a compiled training step: which part of it moves how many bytes.

A step of two and one of four layers are compiled; the difference is what two layers cost, and the
step of a deep model is estimated from it.
"""

import dataclasses
import re
from collections.abc import Mapping

from sparse_dataflow.compile import hlo
from sparse_dataflow.compile.topologies import Topology
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planner import efficiency

SHALLOW, DEEP = 2, 4
"""Layers of the compiled steps."""

SECTIONS = (
    "products",
    "attention",
    "activation and bias",
    "heads: q, k, v split and joined",
    "norms",
    "residual",
    "layer loop and weights: slices, copies, casts",
    "optimizer",
    "head and embedding",
    "other",
)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Shares of a chip's peak rates that the parts of a step reach.

    Attributes:
      passes: of the memory's bandwidth, by passes over activations.
      streams: of the same, by large streams.
      products: of the FLOP/s, by products of weights.
      attention: of the same, by attention.
      clock: cycles per second in which the compiler's estimates count; None if it has none.
    """

    passes: float
    streams: float
    products: float
    attention: float
    clock: float | None = None


CLOCKS = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
"""Kind of TPU -> cycles per second.

With the matrix units of a core (v5e, v5p: 4 of 128x128, 16 cycles per 16 rows; v6e: 2 of 256x256, 8
cycles) these reproduce the FLOP/s of the data sheets."""


def rates(topology: Topology, model: ModelConfig) -> Rates:
    """Returns the rates of a model's step.

    A GPU's are those of an H200: 2.5 and 3.8 of its 4.8 TB/s, fitted to two measured steps of the
    13B model, as are the FLOP/s.  A TPU's are the planner's: fitted to published dense steps, with
    estimated cycles of block-sparse products.
    """
    chip, sparse = topology.chip, model.sparse_projections
    if not chip.is_tpu:
        return Rates(0.52, 0.79, 0.66 if sparse else 0.74, 0.78)
    fitted = efficiency.for_family(chip.family)
    blocks = (efficiency.block_rate(chip.family, model.linear(name), fitted) for name in sparse)
    return Rates(
        fitted.bandwidth,
        fitted.bandwidth,
        fitted.matmul * min(blocks, default=1.0),
        fitted.attention,
        CLOCKS[topology.kind],
    )


_STREAMS = ("optimizer", "head and embedding", "layer loop and weights: slices, copies, casts")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a part of a step does.

    Attributes:
      launches: kernels of a step.
      bytes: read and written by them; see `hlo.Kernel`.
      cycles: estimated by the compiler of a TPU; see `hlo.Kernel`.
    """

    launches: float = 0.0
    bytes: float = 0.0
    cycles: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Traffic(*(a + b for a, b in pairs))

    def __mul__(self, factor: float) -> "Traffic":
        return Traffic(*(factor * value for value in dataclasses.astuple(self)))


Account = dict[str, Traffic]
"""Name in SECTIONS -> its traffic."""


def account(text: str) -> Account:
    """Returns the traffic of a compiled step by part.

    Args:
      text: HLO text of a step for a GPU or a TPU.

    Raises:
      ValueError: a kernel is in a loop without a known trip count.
    """
    result = dict.fromkeys(SECTIONS, Traffic())
    for kernel in hlo.kernels(text):
        # Copies to and from vector memory run beside the kernels.
        launches = kernel.target not in hlo.TRANSFERS
        result[section_of(kernel)] += Traffic(launches, kernel.bytes, kernel.cycles) * kernel.times
    return result


def section_of(kernel: hlo.Kernel) -> str:
    """Returns the part that a kernel belongs to, from its target and its path."""
    scopes = set(re.findall(r"[\w.\-]+", kernel.scope))
    last = kernel.scope.rpartition("/")[2]
    # Scopes nest, so a kernel has the names of several parts: the order of these tests decides.
    if scopes & {"head", "embed"}:
        return "head and embedding"
    if "optimizer" in scopes:
        return "optimizer"
    if re.search("fmha|splash", kernel.target) or "dot_product_attention" in kernel.scope:
        return "attention"
    if kernel.multiplies:
        return "products"
    if "residual_norm" in kernel.target:
        return "norms"
    loop = {"dynamic_slice", "dynamic_update_slice", "split", "broadcast_in_dim", "concatenate"}
    if last in loop or "layers" in scopes or "weights" in scopes or not kernel.scope:
        return "layer loop and weights: slices, copies, casts"
    for scope, section in (
        ("mlp", "activation and bias"),
        ("heads", "heads: q, k, v split and joined"),
        ("norm", "norms"),
        ("attention", "attention"),
        ("residual", "residual"),
    ):
        if scope in scopes:
            return section
    return "residual" if "add_any" in last else "other"


def scaled(shallow: Account, deep: Account, layers: int) -> Account:
    """Returns the account of a step with more layers, linear in them."""
    return {
        section: shallow[section] + (deep[section] + shallow[section] * -1) * slope
        for section in SECTIONS
        for slope in [(layers - SHALLOW) / (DEEP - SHALLOW)]
    }


def seconds(
    traffic: Account, flops: Mapping[str, float], chip: Chip, dtype: str, rates: Rates
) -> dict[str, tuple[float, str]]:
    """Estimates the seconds of each part and what bounds it.

    Args:
      flops: "products" and "attention" -> FLOPs of a step, including recomputation.
      dtype: operand dtype of the products.

    Returns:
      part -> (seconds, what takes that long: "bytes", "FLOPs" or "cycles" of the compiler).
    """
    peak, bandwidth = chip.rates(dtype)
    shares = {"products": rates.products, "attention": rates.attention}
    result = {}
    for section, moved in traffic.items():
        streams = section in _STREAMS or section in shares
        bounds = {
            "bytes": moved.bytes / (bandwidth * (rates.streams if streams else rates.passes)),
            "FLOPs": flops.get(section, 0.0) / (peak * shares.get(section, 1.0)),
            "cycles": moved.cycles / rates.clock if rates.clock else 0.0,
        }
        longest = max(bounds, key=lambda bound: bounds[bound])
        result[section] = bounds[longest], longest
    return result


def table(by_section: Mapping[str, Mapping[str, object]]) -> list[tuple[str, ...]]:
    """Returns rows of a text table, with a head and a total.

    Args:
      by_section: name in SECTIONS -> "launches", "bytes", "estimated_seconds" and "bound" of a
        step.
    """

    def row(name, bound, *sections):
        launches, moved, seconds = (
            sum(section[key] for section in sections)
            for key in ("launches", "bytes", "estimated_seconds")
        )
        return name, f"{launches:,.0f}", f"{moved / 1e9:.1f}", f"{1e3 * seconds:.1f}", bound

    rows = [row(name, each["bound"], each) for name, each in by_section.items() if each["launches"]]
    head = ("part", "launches", "GB", "estimated ms", "bound by")
    return [head, *rows, row("total", "", *by_section.values())]
