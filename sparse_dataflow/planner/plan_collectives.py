"""Seconds of the collectives of a parallel plan; loads no jax.

All functions broadcast over the counts of a `ParallelPlan`.
"""

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import ROW_PARALLEL
from sparse_dataflow.core.executors.mesh_axes import key_value_copies
from sparse_dataflow.hardware.chips import Network
from sparse_dataflow.planner import collectives
from sparse_dataflow.planner.efficiency import Efficiency
from sparse_dataflow.planner.parallel_plan import RECOMPUTED, ParallelPlan

FEATURE_OVERLAP = 1 / 8
"""Largest fraction of the collectives of a block that overlaps with products on the axes "feature"
and "tensor": compiled programs for H100 and v5e schedule an eighth of the bytes while products run
(`tests/compile/overlaps.py`; docs/evidence/devices.md).  The fitted fraction comes from runs
without that axis.
"""


def tensor_seconds(config, tokens, plan, network, efficiency):
    """Returns the collective seconds of one block and micro-batch, forward and backward.

    Recomputed products gather or reduce-scatter again over "feature".  Where experts travel without
    a buffer, "tensor" cuts each expert, and gathers the rows that arrive.
    """
    recomputed = RECOMPUTED[plan.remat]
    size, arrays = collectives.layer_gathers(config, tokens, plan.tensor, plan.feature)
    # Two products gather and two reduce-scatter, forward and backward; a recomputed one again.
    reductions = 4 + ("attn_out" in recomputed) + ("mlp_out" in recomputed)
    island = plan.island or network.island
    tensor, feature = np.asarray(plan.tensor), np.asarray(plan.feature)

    def group(chips, near):
        return chips, near, network, efficiency, _torus_axes(chips, island, network)

    tensor_group = group(tensor, np.minimum(tensor, island))
    feature_group = group(feature, np.clip(island // tensor, 1, feature))
    # Half of the arrays are the MLP's.
    rows = config.active_experts if plan.experts == "dropless" else 1
    arrays_of_tokens = reductions * (1 + rows) / 2
    narrow = 1 / collectives.DTYPE_BYTES[config.compute_dtype]
    gathered = size * (narrow if plan.narrow_gathers and config.quantized else 1)
    seconds = arrays_of_tokens * (
        collectives.gather_seconds(gathered, *tensor_group)
        + collectives.gather_seconds(size, *tensor_group)
    )
    for name, array in arrays.items():
        # The input of a row-parallel product is gathered before it, so any recomputation of the
        # products before it gathers again.
        again = bool(recomputed) if name in ROW_PARALLEL else name in recomputed
        seconds = seconds + (2 + again) * collectives.gather_seconds(array, *feature_group)
    overlap = efficiency.tensor_overlap
    overlap = np.where(feature > 1, np.minimum(overlap, FEATURE_OVERLAP), overlap)
    return seconds * (1 - overlap * plan.tensor_overlaps)


CONTEXT_GATHERS = 3
"""Collectives of keys and values of all tokens in a block: they are gathered in the forward pass
and again in the backward pass, which reduce-scatters their gradients."""


def context_seconds(config, tokens, plan, network, efficiency, attention, factor):
    """Returns the seconds in which attention waits for keys of one block and micro-batch.

    Nothing hides a gather: attention waits for its keys.  A ring of n chips sends keys and values
    n - 1 times, and in the backward pass also their gradients, while attention computes with the
    keys before; what takes longer than that is waited for.

    Args:
      tokens: of a micro-batch on a chip.
      plan: parallel plan.
      network: links of the chips.
      efficiency: constants of the chip family.
      attention: seconds of attention in the forward pass.
      factor: seconds of its forward and backward pass, relative to these.
    """
    island = plan.island or network.island
    context, shared = np.asarray(plan.context), np.asarray(plan.layer_chips)
    copies = key_value_copies(config, plan.tensor)
    width = 2 * config.kv_heads * config.head_width * copies / shared
    size = tokens * context * width * collectives.DTYPE_BYTES[config.compute_dtype]
    if plan.key_exchange == "ring":
        size, part = size / context, attention / context
        inside = np.asarray(context * shared) <= island
        forward, backward = (
            collectives.send_seconds(n * size, inside, network, efficiency) for n in (1, 2)
        )
        # In a ring the next keys travel while attention reads those that are here.
        waits = np.maximum(forward - part, 0) + np.maximum(backward - (factor - 1) * part, 0)
        return (context - 1) * waits
    near = np.clip(island // shared, 1, context)
    axes = np.maximum(network.axes - _torus_axes(shared, island, network), 1)
    seconds = collectives.gather_seconds(size, context, near, network, efficiency, axes)
    return CONTEXT_GATHERS * seconds


def _torus_axes(chips, island, network):
    """Returns the number of torus axes that a group of chips spans; 0 for one chip."""
    # A torus of n chips has n^(1 / axes) along each axis, so a group of g spans log(g) / log(side)
    # of them.  The small factors absorb rounding.
    side = min(island, network.island) ** (1 / network.axes) * (1 + 1e-9)
    along = np.ceil(np.log(chips) / np.log(max(side, 2)) - 1e-9)
    return np.where(chips > 1, np.clip(along, 1, network.axes), 0)


def send_seconds(size, plan, network, efficiency):
    """Returns the exposed seconds of sends of activations and gradients between stages.

    Sends overlap with computation in interleaved schedules only: "non-interleaved schedule does not
    support overlapping p2p communication" (NVIDIA/Megatron-LM, arguments.py).
    """
    stages = np.asarray(plan.stage)
    island = plan.island or network.island
    # A neighbour in the pipeline is one block of chips away: both blocks must be in one island.
    near = np.asarray(2 * plan.state_shards * plan.layer_chips) <= island
    send = collectives.send_seconds(size, near, network, efficiency)
    hidden = efficiency.overlap if plan.schedule == "interleaved" else 0.0
    # Filling the pipeline waits for every send.
    exposed = (1 - hidden) * plan.accumulation * plan.chunks + (stages - 1)
    return np.where(stages > 1, 2 * exposed * send, 0.0)


def state_seconds(weights, own, plan, network, efficiency, computing, dtype_bytes):
    """Returns the exposed seconds of gradient and weight collectives over the axes of rows, tokens.

    Of the weights, `own` are those of experts that tokens travel to: the chips that hold the same
    experts sum their gradients.
    """
    island = plan.island or network.island
    shared, fsdp, data = (np.asarray(n) for n in (plan.layer_chips, plan.state_shards, plan.data))
    near, axes = _fsdp_links(plan, network)
    # "data" is the outermost axis, so of its chips an island has those that all inner axes leave.
    outer = np.clip(island // (shared * fsdp * plan.stage), 1, data)

    def gathered(size):
        return collectives.gather_seconds(size, fsdp, near, network, efficiency, axes)

    gradients = gathered((weights - own) * plan.gradient_bytes)
    crossing = collectives.reduce_seconds(
        weights / fsdp * plan.gradient_bytes, data, outer, network, efficiency, axes
    )
    # ZeRO 3 gathers weights in the forward and backward pass of every micro-batch; a pipeline once
    # per step.  ZeRO 1 and 2 gather the updated weights once.  Without ZeRO, gradients are
    # gathered.
    streams = (plan.zero == 3) & (np.asarray(plan.stage) == 1)
    rounds = np.where(streams, plan.accumulation, 1)
    size = np.where(streams, 2 * dtype_bytes, dtype_bytes if plan.zero else plan.gradient_bytes)
    inner = rounds * (gradients + gathered((weights - own) * size))
    # Collectives once per step overlap with the backward pass of the last micro-batch (two thirds
    # of its time), and updated weights with the forward pass of the first.
    once = (1 if plan.zero else 2 / 3) / np.asarray(plan.accumulation)
    hides = efficiency.overlap * computing * np.where(streams, 1.0, once)
    crossing_overlap = efficiency.overlap * efficiency.data_overlap
    # Chips with the same experts, of each island all with the others in other islands first.
    copies = np.maximum(fsdp / np.asarray(plan.expert_chips), 1)
    near_copies = np.clip(near // np.asarray(plan.expert_chips), 1, copies)
    inner = inner + collectives.gather_seconds(
        own / plan.expert_chips * (plan.gradient_bytes + size),
        *(copies, near_copies, network, efficiency, axes),
    )
    seconds, most = inner + crossing, efficiency.overlap * inner + crossing_overlap * crossing
    exposed = seconds - np.minimum(hides, most)
    # Software that sends each chip's part of the state by a collective of its own, one after the
    # other and without overlap.
    crossed = (weights - own) * (plan.gradient_bytes + size) / near
    crossed = crossed / (network.slow * efficiency.slow_link)
    by_owner = efficiency.by_owner * (fsdp / near - 1) * crossed
    return exposed + np.where(streams | (np.asarray(plan.zero) == 0), 0.0, by_owner)


def exchange_seconds(
    config: ModelConfig,
    sequence: int,
    plan: ParallelPlan,
    network: Network,
    efficiency: Efficiency,
):
    """Returns the seconds of the all-to-alls of one block and micro-batch; nothing hides them."""
    tokens = np.asarray(plan.micro_batch) * sequence
    tokens = tokens / plan.context if plan.experts == "dropless" else tokens
    size = collectives.exchange_bytes(config, tokens, plan)
    near, axes = _fsdp_links(plan, network)
    chips = plan.expert_chips
    near = np.minimum(near, chips)
    seconds = collectives.exchange_seconds(size, chips, near, network, efficiency, axes)
    return collectives.EXCHANGES.get(plan.remat, max(collectives.EXCHANGES.values())) * seconds


def _fsdp_links(plan, network):
    """Returns the chips of "fsdp" in one island, and the torus axes that the axis spans."""
    island = plan.island or network.island
    shared = np.asarray(plan.layer_chips)
    axes = np.maximum(network.axes - _torus_axes(shared, island, network), 1)
    return np.clip(island // shared, 1, np.asarray(plan.state_shards)), axes
