"""Account of a compiled training step: which part of it moves how many bytes.

A step of two and one of four layers are compiled; the difference is what two layers cost, and the
step of a deep model is estimated from it.
"""

import dataclasses
import re
from collections.abc import Mapping

from sparse_dataflow.compile import hlo

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

PASS_RATE, STREAM_RATE = 0.52, 0.79
"""Share of the memory's peak bandwidth that passes over activations and large streams reach.

Of an H200's 4.8 TB/s: 2.5 and 3.8 TB/s, fitted to two measured steps of the 13B model."""

GROUP_RATE, DENSE_RATE, ATTENTION_RATE = 0.66, 0.74, 0.78
"""Share of the peak FLOP/s that products of groups, dense products and attention reach; from the
same two steps."""

_STREAMS = ("optimizer", "head and embedding", "layer loop and weights: slices, copies, casts")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a part of a step does.

    Attributes:
      launches: kernels of a step.
      bytes: read and written by them; see `hlo.Kernel`.
    """

    launches: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.launches + other.launches, self.bytes + other.bytes)

    def __mul__(self, factor: float) -> "Traffic":
        return Traffic(factor * self.launches, factor * self.bytes)


Account = dict[str, Traffic]
"""Name in SECTIONS -> its traffic."""


def account(text: str) -> Account:
    """Returns the traffic of a compiled step by part.

    Args:
      text: HLO text of a step for a GPU.

    Raises:
      ValueError: a kernel is in a loop without a known trip count.
    """
    result = dict.fromkeys(SECTIONS, Traffic())
    for kernel in hlo.kernels(text):
        traffic = Traffic(kernel.times, kernel.times * kernel.bytes)
        result[section_of(kernel)] += traffic
    return result


def section_of(kernel: hlo.Kernel) -> str:
    """Returns the part that a kernel belongs to, from its target and its path."""
    scopes = set(re.findall(r"[\w.\-]+", kernel.scope))
    last = kernel.scope.rpartition("/")[2]
    if scopes & {"head", "embed"}:
        return "head and embedding"
    if "optimizer" in scopes:
        return "optimizer"
    if "fmha" in kernel.target or "dot_product_attention" in kernel.scope:
        return "attention"
    if kernel.multiplies:
        return "products"
    if kernel.target.startswith("triton:residual_norm"):
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
    traffic: Account, flops: Mapping[str, float], peak: float, bandwidth: float, grouped: bool
) -> dict[str, float]:
    """Estimates the seconds of each part; products and attention take the longer of both bounds.

    Args:
      flops: "products" and "attention" -> FLOPs of a step, including recomputation.
      peak: FLOP/s of the chip.
      bandwidth: bytes/s of its memory.
      grouped: whether the products are of groups of blocks.
    """
    rates = {"products": GROUP_RATE if grouped else DENSE_RATE, "attention": ATTENTION_RATE}
    result = {}
    for section, moved in traffic.items():
        rate = STREAM_RATE if section in _STREAMS or section in rates else PASS_RATE
        time = moved.bytes / (rate * bandwidth)
        result[section] = max(time, flops.get(section, 0.0) / (rates.get(section, 1.0) * peak))
    return result


def table(by_section: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    """Returns rows of a text table, with a head and a total.

    Args:
      by_section: name in SECTIONS -> "launches", "bytes" and "estimated_seconds" of a step.
    """

    def row(name, *sections):
        launches, moved, seconds = (
            sum(section[key] for section in sections)
            for key in ("launches", "bytes", "estimated_seconds")
        )
        return name, f"{launches:,.0f}", f"{moved / 1e9:.1f}", f"{1e3 * seconds:.1f}"

    rows = [row(name, each) for name, each in by_section.items() if each["launches"]]
    head = ("part", "launches", "GB", "estimated ms")
    return [head, *rows, row("total", *by_section.values())]
