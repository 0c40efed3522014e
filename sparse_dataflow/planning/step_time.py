"""Seconds of a training step by term: rooflines of the sections, collectives, bubble, overlap.

Everything broadcasts over the counts of a `RunLayout`, so a search prices thousands at once.  Bytes
and FLOPs are those of one chip.  Products are bound by the matrix units or by memory, whichever
takes longer (Williams, Waterman and Patterson 2009).  Importing this module loads no jax.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from sparse_dataflow.errors import UserError
from sparse_dataflow.models.groups import with_densest_layers
from sparse_dataflow.models.sizes import PROJECTIONS, ModelConfig
from sparse_dataflow.planning import collectives
from sparse_dataflow.planning.chips import Chip, Network
from sparse_dataflow.planning.cost import stored_fractions
from sparse_dataflow.planning.efficiency import Efficiency
from sparse_dataflow.planning.memory import DTYPE_BYTES, parameter_count
from sparse_dataflow.planning.run_layout import BUBBLES, RECOMPUTED, RunLayout

# Elements that one token's element-wise operations read and write in a block's forward pass, as
# multiples of (d_model, d_ff).  Fused: two norms and two residual sums with their bias, in one pass
# each, and GELU.  Unfused: a norm is three passes, each bias, each sum and all of GELU's nine
# operations one of its own.
ELEMENTS = {True: (10, 2), False: (28, 18)}
# Bytes a score that unfused attention moves forward: written, softmax, dropout with its mask, read.
SCORE_BYTES = 13
# Forward seconds of fused attention -> backward: five products instead of two (arXiv 2205.14135).
ATTENTION_BACKWARD = 2.5
# Passes over the float32 logits, forward and backward.
LOGIT_BYTES = 4 * 4
# Dtype of moments and gradients -> bytes a parameter: AdamW reads master, gradient and two moments,
# writes three and the working copy.
OPTIMIZER_BYTES = {"float32": 30, "bfloat16": 20}
# Relay: weights in for the forward and the backward, gradients out, at 16 bits (arXiv 2002.05645).
RELAY_BYTES = 6
HOST_MEMORY_BANDWIDTH = 200e9
"""Bytes/s of a server's memory for the relay's host-side update: eight DDR4-3200 channels."""


@dataclasses.dataclass(frozen=True)
class Section:
    """One section's forward pass over one micro-batch on one chip.

    Attributes:
      flops: of the matrix units.
      bytes: between memory and chip.
      seconds: by the roofline.
    """

    flops: np.ndarray | float
    bytes: np.ndarray | float
    seconds: np.ndarray | float

    @property
    def intensity(self):
        """FLOPs a byte."""
        return self.flops / self.bytes


@dataclasses.dataclass(frozen=True)
class StepTime:
    """What a step's seconds are made of.

    Attributes:
      terms: name -> seconds, which add up to `total`; arrays where the layout's counts are.
      sections: name -> `Section` of one block, and "head"; "norms" are with the residual sums.
    """

    terms: Mapping[str, np.ndarray | float]
    sections: Mapping[str, Section]

    @property
    def total(self):
        """Seconds of a step."""
        return sum(self.terms.values())

    @property
    def groups(self) -> dict[str, np.ndarray | float]:
        """The terms in groups: what can limit a layout."""
        return {group: sum(self.terms[t] for t in terms) for group, terms in GROUPS.items()}

    @property
    def limit(self) -> str:
        """The largest group but "products", or "products" where it holds over 70%; one layout."""
        groups = dict(self.groups)
        if groups["products"] > 0.7 * self.total:
            return "products"
        return max((g for g in groups if g != "products"), key=lambda g: float(groups[g]))

    def explain(self) -> str:
        """Both tables as text; of one layout."""
        head = f"{'section, forward':<18}{'GFLOP':>11}{'MB':>10}{'FLOP/byte':>11}{'ms':>10}"
        lines = [head]
        for name, s in self.sections.items():
            lines.append(
                f"{name:<18}{s.flops / 1e9:>11.2f}{s.bytes / 1e6:>10.1f}"
                f"{s.intensity:>11.1f}{1e3 * s.seconds:>10.3f}"
            )
        lines += ["", f"{'term of a step':<18}{'ms':>11}{'share':>10}"]
        for name, seconds in self.terms.items():
            if seconds:
                lines.append(f"{name:<18}{1e3 * seconds:>11.2f}{seconds / self.total:>10.1%}")
        lines.append(f"{'total':<18}{1e3 * self.total:>11.2f}{1:>10.1%}")
        return "\n".join(lines)


GROUPS = {
    "products": (*PROJECTIONS, "attention", "head", "recompute"),
    "memory passes": ("element-wise", "optimizer", "passes"),
    "collectives in layers": ("tensor",),
    "pipeline": ("bubble", "sends"),
    "collectives of state": ("state", "host"),
    "waits": ("waits",),
}


def with_passes(sections: Mapping[str, Section]) -> dict[str, Section]:
    """Each product with the element-wise passes around it: a quarter of the norms and sums each,
    GELU with mlp_in.  This is where fusion shows in a product's operational intensity."""
    found = {}
    for name in (*PROJECTIONS, "attention"):
        s = sections[name]
        if name != "attention":
            added = [(sections["norms"], 1 / 4)]
            added += [(sections["gelu"], 1.0)] if name == "mlp_in" else []
            size = s.bytes + sum(share * other.bytes for other, share in added)
            seconds = s.seconds + sum(share * other.seconds for other, share in added)
            s = Section(s.flops, size, seconds)
        found[name] = s
    return found


def step_time(
    config: ModelConfig,
    sequence: int,
    layout: RunLayout,
    chip: Chip,
    efficiency: Efficiency,
    *,
    stored_density: Mapping[str, float] | None = None,
    rates: Mapping[str, float] | None = None,
) -> StepTime:
    """The terms of one optimizer step.

    Args:
      config: the model; its own remat is ignored, the layout's counts.
      sequence: tokens a sequence.
      layout: how it runs; legality (divisibility, memory) is the search's business.
      chip: with rates, bandwidth and, where the layout uses several, a network.
      efficiency: the chip family's constants.
      stored_density: see `cost.stored_fractions`.
      rates: name -> measured FLOP/s of a section in place of the roofline's, forward and backward
        together; or bytes/s of "norms", "gelu" and "optimizer", which have none.

    Raises:
      UserError: a chip without the rates or links that are needed.
    """
    _, bandwidth = chip.rates(config.compute_dtype)
    network = chip.network
    if network is None:
        if np.any(np.asarray(layout.chips) > 1):
            raise UserError(f"{chip.name} has no known links; legal: one chip, or a [network].")
        network = Network(1, 1.0, 1.0)
    rates = rates or {}
    sections = _sections(config, sequence, layout, chip, efficiency, stored_density, rates)
    block = {name: 3 * sections[name].seconds for name in PROJECTIONS}
    factor = 1 + (ATTENTION_BACKWARD if layout.fused_attention else 2)
    block["attention"] = factor * sections["attention"].seconds
    again = RECOMPUTED[layout.remat]
    block["recompute"] = sum((sections[name].seconds for name in again), 0.0)
    # Norms and GELU run again with the products that they feed.
    passes = sections["norms"].seconds + sections["gelu"].seconds
    block["element-wise"] = (4 if "mlp_in" in again else 3) * passes
    block["tensor"] = _tensor_seconds(config, sequence, layout, network, efficiency)
    block["passes"] = 3 * efficiency.pass_seconds
    layers = np.ceil(config.num_layers / np.asarray(layout.stage))
    count = layers * layout.accumulation
    terms = {name: seconds * count for name, seconds in block.items()}
    terms["head"] = 3 * sections["head"].seconds * layout.accumulation
    one_pass = layers * sum(block.values())
    bubble = BUBBLES[layout.schedule] * (np.asarray(layout.stage) - 1) / layout.chunks
    terms["bubble"] = bubble * one_pass
    terms["sends"] = _send_seconds(config, sequence, layout, network, efficiency)
    computing = sum(terms.values()) - terms["bubble"] - terms["sends"]
    weights = stage_parameters(config, layout, stored_density)
    terms["state"] = _state_seconds(
        weights, layout, network, efficiency, computing, DTYPE_BYTES[config.compute_dtype]
    )
    shards = layout.fsdp if layout.zero else 1
    if layout.executor == "relay":
        terms["optimizer"] = 0.0 * computing
        terms["host"] = _relay_seconds(weights, chip, efficiency, computing)
    else:
        rate = rates.get("optimizer", bandwidth * efficiency.bandwidth)
        terms["optimizer"] = weights / shards * OPTIMIZER_BYTES[layout.state_dtype] / rate
        terms["host"] = 0.0 * computing
    islands = np.maximum(np.asarray(layout.chips) / (layout.island or network.island), 1)
    terms["waits"] = efficiency.waits * np.log2(islands) * sum(terms.values())
    return StepTime(terms, sections)


def stage_parameters(config: ModelConfig, layout: RunLayout, stored_density=None):
    """Parameters of one chip of the fullest stage where nothing is dealt out over "fsdp"."""
    alike = with_densest_layers(config)
    one, two = (
        parameter_count(dataclasses.replace(alike, num_layers=n), stored_density) for n in (1, 2)
    )
    ends = 2 * one - two
    block = (parameter_count(config, stored_density) - ends) / config.num_layers
    return (np.ceil(config.num_layers / np.asarray(layout.stage)) * block + ends) / layout.tensor


def _sections(config, sequence, layout, chip, efficiency, stored_density, rates):
    dtype_bytes = DTYPE_BYTES[config.compute_dtype]
    peak, bandwidth = chip.rates(config.compute_dtype)
    memory = bandwidth * efficiency.bandwidth
    tokens = np.asarray(layout.micro_batch, np.float64) * sequence
    tensor = np.asarray(layout.tensor, np.float64)
    fractions = stored_fractions(config, stored_density)

    def product(name, fan_in, fan_out, density=1.0, block=0, rank=0, extra=0.0):
        weights = fan_in * fan_out * density + rank * (fan_in + fan_out)
        flops = 2 * tokens * weights
        size = dtype_bytes * (tokens * (fan_in + fan_out) + weights) + extra
        width = np.minimum(np.minimum(fan_in, fan_out), tokens)
        rate = peak * efficiency.matmul * width / (width + efficiency.half_width)
        if block:
            rate = rate * block / (block + efficiency.half_block)
        if name in rates:
            return Section(flops, size, flops / rates[name])
        return Section(flops, size, np.maximum(flops / rate, size / memory))

    sections = {}
    for name in PROJECTIONS:
        fan_in, fan_out = config.projection_shape(name)
        spec = config.linear(name)
        if name in ("qkv", "mlp_in"):
            fan_out = fan_out / tensor
        else:
            fan_in = fan_in / tensor
        block = spec.block if spec.kind == "block_sparse" else 0
        sections[name] = product(name, fan_in, fan_out, fractions[name], block, spec.rank)
        if name == "qkv":
            sections["attention"] = _attention(
                config, sequence, tokens, tensor, layout, peak, memory, efficiency, rates
            )
    d_share = tensor if layout.sequence_parallel else 1.0
    d_elements, ff_elements = ELEMENTS[layout.fused]
    for name, elements in (
        ("norms", d_elements * config.d_model / d_share),
        ("gelu", ff_elements * config.d_ff / tensor),
    ):
        size = dtype_bytes * tokens * elements
        sections[name] = Section(0.0 * size, size, size / rates.get(name, memory))
    logits = tokens * config.vocab_size / tensor * LOGIT_BYTES
    head = product("head", config.d_model, config.vocab_size / tensor)
    passing = 0.0 if "head" in rates else logits / memory / 3
    sections["head"] = Section(head.flops, head.bytes + logits, head.seconds + passing)
    return sections


def _attention(config, sequence, tokens, tensor, layout, peak, memory, efficiency, rates):
    keys = sequence / 2 if layout.fused_attention else sequence
    flops = 2 * 2.0 * tokens * keys * config.d_model / tensor
    size = 4 * tokens * config.d_model / tensor * DTYPE_BYTES[config.compute_dtype]
    if not layout.fused_attention:
        size = size + SCORE_BYTES * tokens * sequence * config.num_heads / tensor
    if "attention" in rates:
        return Section(flops, size, flops / rates["attention"])
    seconds = flops / (peak * efficiency.attention)
    if layout.fused_attention:
        return Section(flops, size, np.maximum(seconds, size / memory))
    # The score matrix is written before it is read: products and passes take turns.
    return Section(flops, size, seconds + size / memory)


def _tensor_seconds(config, sequence, layout, network, efficiency):
    """Of one block and micro-batch, forward and backward."""
    again = RECOMPUTED[layout.remat]
    reductions = 4 + ("attn_out" in again) + ("mlp_out" in again)
    size = np.asarray(layout.micro_batch) * sequence * config.d_model
    size = size * DTYPE_BYTES[config.compute_dtype]
    island = layout.island or network.island
    tensor = np.asarray(layout.tensor)
    axes = _tensor_axes(tensor, island, network)
    near = np.minimum(tensor, island)
    seconds = collectives.reduce_seconds(size, tensor, near, network, efficiency, axes)
    return reductions * seconds * (1 - efficiency.tensor_overlap)


def _tensor_axes(tensor, island, network):
    """Axes of a torus of equal sides that a group of `tensor` chips lies along; 0 for one chip."""
    side = min(island, network.island) ** (1 / network.axes) * (1 + 1e-9)
    along = np.ceil(np.log(tensor) / np.log(max(side, 2)) - 1e-9)
    return np.where(tensor > 1, np.clip(along, 1, network.axes), 0)


def _send_seconds(config, sequence, layout, network, efficiency):
    """Of all activations and gradients between stages that no computation hides."""
    stages = np.asarray(layout.stage)
    size = np.asarray(layout.micro_batch) * sequence * config.d_model / layout.tensor
    size = size * DTYPE_BYTES[config.compute_dtype]
    island = layout.island or network.island
    near = np.asarray(2 * layout.fsdp * layout.tensor) <= island
    one = collectives.send_seconds(size, near, network, efficiency)
    exposed = (1 - efficiency.overlap) * layout.accumulation * layout.chunks + (stages - 1)
    return np.where(stages > 1, 2 * exposed * one, 0.0)


def _state_seconds(weights, layout, network, efficiency, computing, dtype_bytes):
    """Of gradients' and weights' collectives over "fsdp" and "data" that nothing hides."""
    island = layout.island or network.island
    tensor, fsdp, data = (np.asarray(n) for n in (layout.tensor, layout.fsdp, layout.data))
    axes = np.maximum(network.axes - _tensor_axes(tensor, island, network), 1)
    near = np.clip(island // tensor, 1, fsdp)
    outer = np.clip(island // (tensor * fsdp * layout.stage), 1, data)

    def gathered(size):
        return collectives.gather_seconds(size, fsdp, near, network, efficiency, axes)

    gradients = gathered(weights * layout.gradient_bytes)
    crossing = collectives.reduce_seconds(
        weights / fsdp * layout.gradient_bytes, data, outer, network, efficiency, axes
    )
    # Forward and backward of every micro-batch gather weights with ZeRO 3, in a pipeline once a
    # step; below it the updated ones are gathered once, and without ZeRO the gradients are instead.
    streams = (layout.zero == 3) & (np.asarray(layout.stage) == 1)
    rounds = np.where(streams, layout.accumulation, 1)
    size = np.where(streams, 2 * dtype_bytes, dtype_bytes if layout.zero else layout.gradient_bytes)
    inner = rounds * (gradients + gathered(weights * size))
    # What comes once hides behind the last micro-batch's backward pass, two thirds of its time, and
    # updated weights behind the first one's forward pass.
    once = (1 if layout.zero else 2 / 3) / np.asarray(layout.accumulation)
    hides = computing * np.where(streams, 1.0, once)
    return _exposed(inner + crossing, hides, efficiency)


def _exposed(seconds, hides, efficiency):
    """What is left of transfers of `seconds` beside a computation of `hides` seconds."""
    left = seconds - efficiency.overlap * hides
    return np.maximum(left, (1 - efficiency.overlap) * seconds)


def _relay_seconds(weights, chip, efficiency, computing):
    """Of host transfers and the host's update that computing a layer does not hide."""
    if chip.host_bandwidth is None:
        raise UserError(f"{chip.name} has no known rate to its host; the relay needs one.")
    moved = weights * RELAY_BYTES / (chip.host_bandwidth * efficiency.fast_link)
    update = weights * OPTIMIZER_BYTES["float32"] / HOST_MEMORY_BANDWIDTH
    return _exposed(np.maximum(moved, update), computing, efficiency)
