"""Step time estimate by term: rooflines of sections, collectives, pipeline bubble, overlap.

All functions broadcast over the counts of a `ParallelPlan`, so a search prices many plans at once.
Bytes and FLOPs are per chip.  A product takes the longer of its compute time and its memory time
(roofline model: Williams, Waterman and Patterson 2009).  Importing this module loads no jax.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

from sparse_dataflow.core.config.layer_groups import with_densest_layers
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import KEY_VALUE, MLP, PROJECTIONS, ROW_PARALLEL
from sparse_dataflow.core.executors.mesh_axes import key_value_copies
from sparse_dataflow.core.training.cost import (
    orthogonalization_flops,
    parameter_count,
    stored_fractions,
    visible_keys,
)
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware.chips import Chip, Network
from sparse_dataflow.planner import collectives, plan_collectives
from sparse_dataflow.planner.efficiency import Efficiency, block_rate
from sparse_dataflow.planner.memory import (
    ADAM_MOMENTS,
    DTYPE_BYTES,
    block_and_rest,
    block_widths,
    bytes_of_states,
    matrix_count,
)
from sparse_dataflow.planner.parallel_plan import (
    BUBBLES,
    RECOMPUTED,
    ParallelPlan,
)


def computed_rows(config: ModelConfig, tokens, plan: ParallelPlan):
    """Returns the rows that a chip multiplies in experts, and the experts whose weights it reads.

    Where tokens travel, the padding of the buffer counts: a CPU alone skips it.  Without buffers
    the routed rows count, with equal loads.

    Args:
      config: a model with experts.
      tokens: tokens of a micro-batch on a chip.
    """
    if not plan.exchanges:
        return tokens * config.active_experts, config.stored_copies(MLP[0])
    rows = collectives.travelling_rows(config, tokens, plan) + tokens * config.shared_expert
    return rows, config.experts / np.asarray(plan.expert_chips) + config.shared_expert


def stage_experts(config: ModelConfig, plan: ParallelPlan):
    """Returns the part of `step_time.stage_parameters` in experts that a router chooses."""
    if not config.experts:
        return 0
    routed = matrix_count(config, MLP) * config.experts / config.stored_copies(MLP[0])
    return plan.stage_layers(config) * routed / config.num_layers / plan.layer_chips


# Fused? -> elements per token that element-wise operations of a block's forward pass read and
# write, as multiples of (d_model, d_ff).  Fused: one pass each for two norms, two residual sums
# with bias, and GELU.  Unfused: three passes per norm, one per bias, sum, and each of GELU's nine
# operations.
ELEMENTS = {True: (10, 2), False: (28, 18)}
# Elements that an RMSNorm of six operations in float32 (convert, square, mean, scale, convert back,
# multiply by the weight: 36 bytes for an input of 2) reads and writes beyond those of one kernel.
APART_NORM_ELEMENTS = 18 - 2
# Products that stay in the compute dtype where others have 8 bits.
UNQUANTIZED = ("head", "router")
# Elements per routed row of d_model that sorting the rows of experts reads and writes.
ROW_ELEMENTS = 4
# Bytes per score of unfused attention, forward: write, softmax, dropout with its mask, read.
SCORE_BYTES = 13
# Backward / forward time of fused attention: five products to two (arXiv 2205.14135).
ATTENTION_BACKWARD = 2.5
# Slow-down of unfused attention's products where the width of a head is no multiple of 8, because
# tensor cores want operands that are aligned to 16 bytes (NVIDIA, Matrix Multiplication Background
# User's Guide).  From the one fitted run of this kind, with heads of 108.
UNALIGNED = 10.0
# Four passes over the float32 logits, forward and backward.
LOGIT_BYTES = 4 * 4
# State dtype -> bytes per parameter of AdamW: reads master, gradient and two moments; writes
# master, moments and the working copy.
OPTIMIZER_BYTES = {"float32": 30, "bfloat16": 20}
# Bytes per weight of Newton-Schulz in float32: each of five steps has three products with two reads
# and a write of arrays of at most the matrix's size.
ORTHOGONALIZATION_BYTES = 5 * 3 * 3 * 4


@dataclasses.dataclass(frozen=True)
class Section:
    """Forward pass of one section over one micro-batch on one chip.

    Attributes:
      flops: FLOPs of matrix products.
      bytes: memory traffic.
      seconds: roofline time.
    """

    flops: np.ndarray | float
    bytes: np.ndarray | float
    seconds: np.ndarray | float

    @property
    def intensity(self):
        """FLOPs per byte."""
        return self.flops / self.bytes


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Estimated seconds of an optimizer step, by term.

    Attributes:
      terms: name -> seconds, with sum `total`; arrays if the plan has arrays.
      sections: name -> `Section` of one block, and "head"; "norms" includes the residual sums.
    """

    terms: Mapping[str, np.ndarray | float]
    sections: Mapping[str, Section]

    @property
    def total(self):
        """Seconds per step."""
        return sum(self.terms.values())

    @property
    def groups(self) -> dict[str, np.ndarray | float]:
        """Name in GROUPS -> seconds."""
        return {
            group: sum(self.terms[t] for t in terms if t in self.terms)
            for group, terms in GROUPS.items()
        }

    @property
    def limit(self) -> str:
        """Group that limits one plan: "products" above 70%, else the largest other group."""
        groups = dict(self.groups)
        if groups["products"] > 0.7 * self.total:
            return "products"
        return max((g for g in groups if g != "products"), key=lambda g: float(groups[g]))

    def explain(self) -> str:
        """Returns text tables of the sections and terms of one plan."""
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
    "products": (*PROJECTIONS, "router", "attention", "head", "recompute"),
    "memory passes": ("element-wise", "optimizer", "passes"),
    "collectives in layers": ("tensor", "context", "exchange"),
    "pipeline": ("bubble", "sends"),
    "collectives of state": ("state",),
    "waits": ("waits",),
}


def with_passes(sections: Mapping[str, Section]) -> dict[str, Section]:
    """Returns each product plus its element-wise passes, to show fusion in operational intensity.

    Each projection gets an equal share of the norms and residual sums, and mlp_in also GELU.
    """
    names = [name for name in PROJECTIONS if name in sections]
    result = {}
    for name in names:
        product, added = sections[name], [(sections["norms"], 1 / len(names))]
        added += [(sections["gelu"], 1.0)] if name == "mlp_in" else []
        size = product.bytes + sum(share * other.bytes for other, share in added)
        seconds = product.seconds + sum(share * other.seconds for other, share in added)
        result[name] = Section(product.flops, size, seconds)
    return result | {"attention": sections["attention"]}


def step_time(
    config: ModelConfig,
    sequence: int,
    plan: ParallelPlan,
    chip: Chip,
    efficiency: Efficiency,
    rates: Mapping[str, float] | None = None,
) -> StepTime:
    """Estimates the seconds of one optimizer step, by term.

    Args:
      config: the model; its remat is ignored.
      sequence: tokens per sequence.
      plan: parallel plan; not checked for divisibility or memory (see `search.violations`).
      chip: must have rates, bandwidth and, for several chips, a network.
      efficiency: constants of the chip family.
      rates: name -> measured FLOP/s of a section, forward and backward together, which replaces the
        roofline; or measured bytes/s of "norms", "gelu" and "optimizer", which includes Muon's
        products.

    Raises:
      UserError: the chip has no known rates or links.
    """
    rates = rates or {}
    network = _network(chip, plan)
    sequence = config.row(sequence)
    sections = _sections(config, sequence, plan, chip, efficiency, rates)
    block = _block_seconds(config, sequence, plan, sections, network, efficiency)
    layer, layers = sum(block.values()), plan.stage_layers(config)
    terms = {name: seconds * (layers * plan.accumulation) for name, seconds in block.items()}
    head = _head_seconds(config, plan, 3 * sections["head"].seconds, layer)
    terms["head"] = head * plan.accumulation
    # A stage idles for (stages - 1) times the work of a micro-batch, times the share of its
    # schedule, and chunks divide that.
    bubble = BUBBLES[plan.schedule] * (np.asarray(plan.stage) - 1) / plan.chunks
    terms["bubble"] = bubble * (layers * layer)
    dtype_bytes = DTYPE_BYTES[config.compute_dtype]
    boundary = np.asarray(plan.micro_batch) * sequence * config.d_model * dtype_bytes
    terms["sends"] = plan_collectives.send_seconds(
        boundary / (plan.layer_chips * plan.context), plan, network, efficiency
    )
    # Only computation hides collectives of the state.
    computing = sum(terms.values()) - terms["bubble"] - terms["sends"]
    weights = stage_parameters(config, plan)
    own = stage_experts(config, plan) if plan.exchanges else 0
    terms["state"] = plan_collectives.state_seconds(
        weights, own, plan, network, efficiency, computing, dtype_bytes
    )
    shards = plan.state_shards if plan.zero else 1
    _, bandwidth = chip.rates(config.compute_dtype)
    rate = rates.get("optimizer", bandwidth * efficiency.bandwidth)
    terms["optimizer"] = optimizer_bytes(config, plan) / shards / rate
    if plan.optimizer == "muon" and "optimizer" not in rates:
        seconds = _orthogonalization_seconds(config, plan, chip, efficiency)
        terms["optimizer"] = terms["optimizer"] + seconds / shards
    # Chips wait for the slowest one: a step grows by a share with each doubling of the islands.
    islands = np.maximum(np.asarray(plan.chips) / (plan.island or network.island), 1)
    terms["waits"] = efficiency.waits * np.log2(islands) * sum(terms.values())
    return StepTime(terms, sections)


def _network(chip, plan):
    """Returns the links of a chip; any links for one chip without them.

    Raises:
      UserError: the plan has several chips, whose links are unknown.
    """
    if chip.network is None and np.any(np.asarray(plan.chips) > 1):
        raise UserError(f"{chip.name} has no known links; legal: one chip, or a table [network].")
    return chip.network or Network(1, 1.0, 1.0)


def _block_seconds(config, sequence, plan, sections, network, efficiency):
    """Returns term -> seconds of one block and micro-batch, forward and backward."""
    # Forward, the gradient of inputs and that of weights are three products of equal FLOPs.
    block = {name: 3 * sections[name].seconds for name in config.projections}
    factor = 1 + (ATTENTION_BACKWARD if plan.fused_attention else 2)
    block["attention"] = factor * sections["attention"].seconds
    if config.experts:
        block["router"] = 3 * sections["router"].seconds
    recomputed = RECOMPUTED[plan.remat]
    if plan.remat == "keep" and not plan.fused_attention:
        recomputed = (*recomputed, "attention")  # Its scores.
    again = (sections[name].seconds for name in recomputed if name in sections)
    block["recompute"] = sum(again, 0.0)
    # Forward, the gradients of inputs and of weights, and the forward pass that is repeated.
    passes = 4 if "mlp_in" in recomputed else 3
    # Norms and GELU are recomputed with the products that read them, and where only products stay.
    elementwise = 4 if plan.remat == "keep" else passes
    block["element-wise"] = elementwise * (sections["norms"].seconds + sections["gelu"].seconds)
    tokens = np.asarray(plan.micro_batch) * sequence / plan.context
    block["tensor"] = plan_collectives.tensor_seconds(config, tokens, plan, network, efficiency)
    block["context"] = plan_collectives.context_seconds(
        config, tokens, plan, network, efficiency, sections["attention"].seconds, factor
    )
    if plan.exchanges:
        block["exchange"] = plan_collectives.exchange_seconds(
            config, sequence, plan, network, efficiency
        )
    block["passes"] = passes * efficiency.overhead(plan.chips)
    return block


def _head_seconds(config, plan, head, layer):
    """Returns the seconds by which the head makes the slowest stage slower, in a micro-batch.

    Where the stages do not divide the layers, the stage of the head has one layer less than others
    (arXiv 2401.10241, section 5; arXiv 2407.21783, section 3.3.2).
    """
    uneven = config.num_layers % (np.asarray(plan.stage) * plan.chunks) != 0
    return np.where(uneven, np.maximum(head - layer, 0.0), head)


def stage_parameters(config: ModelConfig, plan: ParallelPlan):
    """Returns the parameters on one chip of the fullest stage, before sharding over "fsdp"."""
    block, ends = _block_and_ends(config)
    block = block + _copied_weights(config, plan)
    return (plan.stage_layers(config) * block + ends) / plan.layer_chips


@functools.lru_cache(maxsize=1024)
def _block_and_ends(config: ModelConfig) -> tuple[float, float]:
    """Returns the mean parameters of a block, and those of embeddings and the final norm."""
    _, ends = block_and_rest(with_densest_layers(config))
    return (parameter_count(config) - ends) / config.num_layers, ends


def stage_matrices(config: ModelConfig, plan: ParallelPlan):
    """Returns the part of `stage_parameters` that Muon updates."""
    per_layer = matrix_count(config) / config.num_layers + _copied_weights(config, plan)
    return plan.stage_layers(config) * per_layer / plan.layer_chips


def _copied_weights(config, plan):
    """Returns the weights of a layer that "tensor" replicates, over its chips, beyond one copy.

    They are the keys and values of few heads, and the factor of each low-rank weight whose sides
    are not cut.
    """
    tensor = np.asarray(plan.tensor)
    copied = matrix_count(config, KEY_VALUE) / config.num_layers
    factors = {name: _uncut_by_tensor(config, name) for name in config.projections}
    key_value_size = sum(size for name, size in factors.items() if name in KEY_VALUE)
    other_sizes = sum(factors.values()) - key_value_size
    key_value = np.where(key_value_copies(config, tensor) > 1, copied, key_value_size)
    return (tensor - 1) * (key_value + other_sizes)


def _uncut_by_tensor(config, name):
    """Returns the numbers of a layer's weight in arrays that "tensor" does not shard."""
    spec = config.linear(name)
    shapes, leaves = spec.weight.shapes(spec, config.projection_shape(name)), spec.weight.leaves()
    is_cut = {
        n: any("tensor" in axes for axes in leaves[n].cuts(name in ROW_PARALLEL)) for n in shapes
    }
    return sum(math.prod(shape) for n, shape in shapes.items() if not is_cut[n])


def optimizer_bytes(config: ModelConfig, plan: ParallelPlan):
    """Returns the memory traffic of an update on one chip, before sharding over "fsdp"."""
    size = stage_parameters(config, plan) * OPTIMIZER_BYTES[plan.state_dtype]
    if plan.optimizer == "muon":  # Reads and writes no second moment.
        size = size - stage_matrices(config, plan) * 2 * DTYPE_BYTES[plan.state_dtype]
    elif plan.optimizer != "adamw":  # Each reads and writes its state.
        adam = ADAM_MOMENTS * DTYPE_BYTES[plan.state_dtype]
        more = bytes_of_states(config, plan.optimizer) - adam
        size = size + stage_parameters(config, plan) * 2 * more
    return size


def _orthogonalization_seconds(config, plan, chip, efficiency):
    """Returns the seconds of Muon's Newton-Schulz on one chip, before sharding over "fsdp".

    A chip orthogonalises the blocks that it holds.  Dense matrices that are sharded cost
    collectives as well, which are not in the estimate.
    """
    peak, bandwidth = chip.rates("float32")
    size = matrix_count(config) * ORTHOGONALIZATION_BYTES
    seconds = np.maximum(
        orthogonalization_flops(config) / (peak * efficiency.matmul),
        size / (bandwidth * efficiency.bandwidth),
    )
    return seconds * plan.stage_layers(config) / config.num_layers / plan.layer_chips


def _sections(config, sequence, plan, chip, efficiency, rates):
    """Returns name -> `Section` of every section; arguments as in `step_time`."""
    dtype_bytes = DTYPE_BYTES[config.compute_dtype]
    peak, bandwidth = chip.rates(config.compute_dtype)
    # An emulated product runs at the rate of the dtype that its operands are converted to.
    projection_peak, wide_peak = chip.peak(config.precision) or peak, peak
    memory = bandwidth * efficiency.bandwidth
    tokens = np.asarray(plan.micro_batch, np.float64) * sequence / plan.context
    shared = np.asarray(plan.layer_chips, np.float64)
    fractions = stored_fractions(config)

    def product(name, fan_in, fan_out, density=1.0, rank=0, peak=peak, rows=tokens, copies=1):
        weights = fan_in * fan_out * density + rank * (fan_in + fan_out)
        flops = 2 * rows * weights
        between = 0 if density else 2 * rank  # What two factors write and read.
        size = dtype_bytes * (rows * (fan_in + fan_out + between) + copies * weights)
        # The narrowest side of a product sets how full the matrix units are; experts share the rows
        # among their copies.
        width = np.minimum(np.minimum(fan_in, fan_out), rows / copies)
        width = width if density else np.minimum(width, rank)
        narrow, casts = efficiency.half_width, 0.0
        if config.quantized and name not in UNQUANTIZED:
            narrow = narrow * np.maximum(projection_peak / wide_peak, 1)
            weight = copies * fan_in * fan_out * density / plan.weight_casts
            casts = plan.cast_bytes * (rows * (fan_in + fan_out) + weight) / 3
        if name in rates:
            return Section(flops, size + casts, flops / rates[name])
        # A product of the width `half_width` has half of the rate of a very wide one.
        rate = peak * efficiency.matmul * width / (width + narrow)
        # The roofline; casts are passes of their own, which no product hides.
        seconds = np.maximum(flops / rate, size / memory) + casts / memory
        return Section(flops, size + casts, seconds)

    sections = {}
    for name in config.projections:
        if name == "attn_out":
            sections["attention"] = _attention(
                config, sequence, tokens, shared, plan, peak, memory, efficiency, rates
            )
        spec, rows, copies = config.linear(name), tokens, 1
        if config.experts and name in MLP:
            rows, copies = computed_rows(config, tokens, plan)
        density, rank = fractions[name], spec.rank
        if width := config.inner_width(name):
            density, rank = 0.0, width
        rate = block_rate(chip.family, spec, efficiency) * projection_peak
        fan_in, fan_out = _local_shape(config, plan, name)
        sections[name] = product(name, fan_in, fan_out, density, rank, rate, rows, copies)
    if config.experts:
        sections["router"] = product("router", config.d_model, config.experts)
    for name, elements in zip(("norms", "gelu"), _elements(config, plan, efficiency.traffic)):
        size = dtype_bytes * tokens * elements
        sections[name] = Section(0.0 * size, size, size / rates.get(name, memory))
    logits = tokens * config.vocab_size / shared * LOGIT_BYTES * efficiency.traffic
    head = product("head", config.d_model, config.vocab_size / shared)
    # Measured rates of the head include the passes over the logits; a section is one of three
    # products of a step.
    passing = 0.0 if "head" in rates else logits / memory / 3
    sections["head"] = Section(head.flops, head.bytes + logits, head.seconds + passing)
    return sections


def _local_shape(config, plan, name):
    """Returns the input and output features of a projection on one chip."""
    fan_in, fan_out = config.projection_shape(name)
    tensor, feature = (np.asarray(n, np.float64) for n in (plan.tensor, plan.feature))
    if name in ROW_PARALLEL:
        return fan_in / tensor, fan_out / feature
    copies = key_value_copies(config, plan.tensor) if name in KEY_VALUE else 1
    return fan_in / feature, fan_out * copies / tensor


def _elements(config, plan, traffic):
    """Returns the elements per token that norms and GELU read and write on one chip."""
    d_share = plan.layer_chips if plan.sequence_parallel else plan.feature
    d_elements, ff_elements = ELEMENTS[plan.fused]
    routed = config.active_experts - config.shared_expert if config.experts else 0
    norms = (d_elements / d_share + ROW_ELEMENTS * routed) * traffic
    if plan.fused and not plan.fused_norms:
        # Counted bytes, which are not relative to fused kernels.
        norms = norms + 2 * APART_NORM_ELEMENTS / d_share
    # A gate is one more operand of the activation: two reads and a write.
    gelu = ff_elements * (1.5 if config.gated_mlp else 1) * traffic
    hidden = config.active_experts * config.d_ff
    return norms * config.d_model, gelu * hidden / plan.layer_chips


def _attention(config, sequence, tokens, shared, plan, peak, memory, efficiency, rates):
    # XLA computes the scores of all pairs, or of the blocks of a layout.
    skips_pairs = plan.fused_attention or config.blocks
    keys = visible_keys(config, sequence) if skips_pairs else sequence
    widths = block_widths(config, key_value_copies(config, plan.tensor))
    queries, keys_values = widths.queries, widths.keys_values
    flops = 2 * 2.0 * tokens * keys * queries / shared
    size = (2 * queries + keys_values * np.asarray(plan.context)) * tokens / shared
    size = size * DTYPE_BYTES[config.compute_dtype]
    if not plan.fused_attention:
        size = size + SCORE_BYTES * tokens * keys * config.num_heads / shared
    if "attention" in rates:
        return Section(flops, size, flops / rates["attention"])
    seconds = flops / (peak * efficiency.attention)
    if plan.fused_attention:
        fused = np.maximum(seconds, size / memory)
        if plan.tpu:
            return Section(flops, size, fused)
        # With "context" XLA computes the visible scores in chunks, as cuDNN's queries have the
        # positions of its keys.
        scores = SCORE_BYTES * tokens * keys * config.num_heads / shared
        in_chunks = (np.asarray(plan.context) > 1) & (plan.key_exchange == "own")
        size = size + np.where(in_chunks, scores, 0)
        chunked = seconds + size / memory
        return Section(flops, size, np.where(in_chunks, chunked, fused))
    if config.head_width % 8:
        seconds = seconds * UNALIGNED
    # The score matrix is written before it is read, so products and passes do not overlap.
    return Section(flops, size, seconds + size / memory)
