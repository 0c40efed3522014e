"""Memory estimate of a parallel plan on its fullest chip, by category; broadcasts over counts.

For one chip it equals `memory.training_bytes`.  "fsdp" shards what the ZeRO stage says (arXiv
1910.02054, section 5): moments from stage 1, gradients from 2, weights from 3.  Arrays that the
axis does not divide stay replicated.  The buffers of a pipeline are those of
`parallel/pipeline/pipeline.py` for every schedule; `experiments.compile_plan` compares them with
the compiler's.
"""

import dataclasses
import itertools

import numpy as np

from sparse_dataflow.config.layer_groups import layer_groups, with_densest_layers
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.projections import KEY_VALUE, MLP, ROW_PARALLEL
from sparse_dataflow.planning import experts, memory
from sparse_dataflow.planning.cost import stored_fractions
from sparse_dataflow.planning.memory import MemoryEstimate
from sparse_dataflow.planning.parallel_plan import ParallelPlan, key_value_copies
from sparse_dataflow.planning.step_time import stage_matrices, stage_parameters

NORM_COPIES = {"full": 6, "dots": 0, "none": 5}
"""Remat -> float32 arrays of width d_model that a pipelined layer saves of its norms and attention;
see `pipeline_bytes`."""


def plan_bytes(config: ModelConfig, sequence: int, plan: ParallelPlan) -> MemoryEstimate:
    """Estimates the memory of the fullest chip; the results broadcast over the plan's counts.

    Args:
      config: the model; its remat is ignored.
      sequence: tokens per sequence.
      plan: parallel plan; remat policies other than "none" and "dots" count as "full".
    """
    remat = plan.remat if plan.remat in ("none", "dots") else "full"
    config = dataclasses.replace(config, remat=remat)
    weights, matrices = stage_parameters(config, plan), stage_matrices(config, plan)
    block_weights = stage_parameters(memory.single_layer(config), plan)
    compute = memory.DTYPE_BYTES[config.compute_dtype]
    tokens = np.asarray(plan.micro_batch) * sequence
    shares = {stage: _shard_share(config, plan, stage) for stage in (1, 2, 3)}
    staged, sharded = np.asarray(plan.stage) > 1, np.asarray(plan.fsdp) > 1
    copies = key_value_copies(config, plan.tensor)
    rows = experts.computed_rows(config, tokens, plan)[0] / tokens if config.experts else None
    per_token = memory.activation_bytes(config, sequence, plan.fused_attention, copies, rows)
    layers = np.ceil(config.num_layers / np.asarray(plan.stage))
    boundary_share = 1 / (plan.layer_chips if plan.sequence_parallel else plan.feature)
    saved = per_token.boundary * boundary_share
    saved = saved + (per_token.saved - per_token.boundary) / plan.layer_chips
    # Inputs of attn_out and mlp_out, which "feature" gathers.
    whole_inputs = compute * (config.num_heads * config.head_width + config.d_ff) / plan.tensor
    whole_inputs = np.where(np.asarray(plan.feature) > 1, whole_inputs, 0)
    saved = saved + whole_inputs * (remat == "none")
    if remat == "none" and compute < memory.MASTER_BYTES:
        # As in programs for several TPUs: GELU's input and a norm are saved in float32.
        kept = memory.MASTER_BYTES * (config.d_model + config.d_ff) / plan.layer_chips
        saved = saved + np.where(np.asarray(plan.chips) > 1, kept, 0)
    working = per_token.working / plan.layer_chips + per_token.ends * boundary_share
    working = working + whole_inputs
    # A stage sums the gradients of all its weights in float32, and reduce-scatters them at the end.
    gradient = memory.gradient_bytes(np.asarray(plan.accumulation), plan.state_dtype)
    staged_gradients = memory.MASTER_BYTES * (1 + np.where(sharded, shares[2], 0))
    # Working copy: a stage gathers its weights once per step and keeps them.  Otherwise it is a
    # copy of the local shard in the compute dtype, plus one gathered layer.
    block = block_weights - memory.embeddings(config) / plan.layer_chips
    # Experts that tokens travel to stay sharded.
    own = (1 - 1 / np.asarray(plan.fsdp)) * experts.stage_experts(config, plan) * plan.exchanges
    block = block - own / layers
    unsharded = weights if remat == "none" else block_weights
    gathered = weights * shares[3] + block
    copies = np.where(sharded & (plan.zero == 3), gathered, unsharded)
    copies = np.where(staged, weights - own if plan.zero == 3 else block_weights, copies)
    gathers_weights = sharded & (plan.zero == 3)
    # Gradients of the embedding and of one projection before they are reduce-scattered.
    full = (memory.embeddings(config) + _largest_projection(config, plan)) / plan.layer_chips
    full = np.where(sharded & ~staged & (plan.zero == 3), memory.MASTER_BYTES * full, 0)
    # Below ZeRO 3 every chip holds all weights: the updated ones are gathered before they replace
    # the old ones.  ZeRO 2 reduce-scatters the gradients of a whole micro-batch, not of a layer.
    whole = np.where(sharded & ~staged & (plan.zero < 3), memory.MASTER_BYTES * weights, 0)
    whole = whole * (2 if plan.zero == 2 else 1) * (plan.zero > 0)
    activations = tokens * np.where(
        staged, pipeline_bytes(config, plan, rows), saved * layers * in_flight(plan)
    )
    logits = (
        2.0 * np.minimum(tokens, memory.LOGITS_CHUNK) * config.vocab_size * 4 / plan.layer_chips
    )
    updates = memory.update_bytes(matrices, plan.optimizer) * shares[1]
    return MemoryEstimate(
        parameters=weights * memory.MASTER_BYTES * shares[3],
        working_copy=np.where(
            gathers_weights | (compute != memory.MASTER_BYTES), copies * compute, 0
        ),
        gradients=weights * np.where(staged, staged_gradients, shares[2] * gradient),
        moments=shares[1]
        * memory.moment_bytes(weights, matrices, plan.state_dtype, plan.optimizer),
        layout_tables=memory.table_bytes(config) * layers / config.num_layers / plan.tensor,
        activations=activations,
        working_set=np.maximum(tokens * working + full, updates - activations - logits) + whole,
        logits=logits,
    )


def _largest_projection(config, plan):
    """Returns the largest number of weights of one projection in one layer that a chip gathers."""
    fractions = stored_fractions(with_densest_layers(config))
    return max(
        fractions[name]
        * np.prod(config.projection_shape(name))
        * (1 if plan.exchanges else config.stored_copies(name))
        for name in config.projections
    )


def _shard_share(config, plan, stage):
    """Returns the share of the weights, or of state of their shape, on one chip under "fsdp".

    It is 1 below ZeRO stage `stage`.  Projections that "fsdp" does not divide are replicated
    (parallel/sharding.py).
    """
    if plan.zero < stage:
        return 1.0
    fsdp, tensor, feature = (np.asarray(n) for n in (plan.fsdp, plan.tensor, plan.feature))
    total = memory.embeddings(config)
    local = np.where(config.d_model % fsdp == 0, total / fsdp, total)
    for group, name in itertools.product(layer_groups(config), config.projections):
        spec, (inside, outside) = config.linear(name), config.projection_shape(name)
        copied = (name in KEY_VALUE) & (key_value_copies(config, tensor) > 1)
        cut = fsdp * np.where(copied, 1, tensor)
        stored = inside * outside * stored_fractions(group.model)[name]
        if spec.kind == "block_sparse":
            blocks = round(stored / spec.block**2)
            divides = (blocks % cut == 0) | (spec.block % fsdp == 0)
        elif name not in ROW_PARALLEL:
            divides = (inside % (fsdp * feature) == 0) | (outside % cut == 0)
        else:
            divides = outside % (fsdp * feature) == 0
        weights = len(group.layers) * stored
        if rank := config.factor_rank(name):
            # "fsdp" cuts the long sides; the first factor along the rank where it cannot.
            row = name in ROW_PARALLEL
            first = (inside % (cut if row else fsdp) == 0) | (rank % fsdp == 0)
            second = outside % (fsdp if row else cut) == 0
            for side, divides in ((inside, first), (outside, second)):
                size = len(group.layers) * rank * side
                local, total = local + np.where(divides, size / fsdp, size), total + size
            continue
        if config.experts and name in MLP:  # The axis shards experts, or else the weight of each.
            routed, weights = config.experts * weights, config.shared_expert * weights
            even = divides | (config.experts % fsdp == 0)
            local, total = local + np.where(even, routed / fsdp, routed), total + routed
        local = local + np.where(divides, weights / fsdp, weights)
        total += weights
    return local / total


def pipeline_bytes(config: ModelConfig, plan: ParallelPlan, expert_rows=None):
    """Returns the bytes per token of all activation buffers of one stage.

    These are the arrays that the forward pass saves for each block in flight, and the arrays that
    `layer_actions` passes from the backward pass of the input to that of the weights.  As counted
    in the buffers of a traced pipeline, with d = d_model and an MLP without a gate:

    - Remat "full" saves the input.  Its recomputation saves both norm outputs for the whole
      sequence, q, k, v, attention's output twice, GELU's input and output, and six float32 arrays
      of width d.  "none" saves all of these in the forward pass, "dots" the projection outputs.
    - The backward pass passes on the norm outputs, GELU's output, the gradients of the outputs of
      the four products, and two float32 arrays of width d.

    `expert_rows` is that of `memory.block_widths`.
    """
    compute = memory.DTYPE_BYTES[config.compute_dtype]
    tensor = np.asarray(plan.tensor)
    gathered = config.d_model * compute
    residual = gathered / tensor if plan.sequence_parallel else gathered
    norm = config.d_model * memory.MASTER_BYTES * (1 / tensor if plan.sequence_parallel else 1.0)
    widths = memory.block_widths(config, key_value_copies(config, plan.tensor), expert_rows)
    queries, keys_values, normed, products, hidden = (n * compute / tensor for n in widths)
    heads = queries + keys_values
    block_buffers = 2 * gathered + hidden + heads + normed + 2 * queries
    block_buffers = block_buffers + NORM_COPIES[config.remat] * norm
    passed_on = 2 * gathered + products + heads + 4 * residual + 2 * norm
    saved, recomputed = residual, 0.0 * residual
    if config.remat == "full":
        recomputed = block_buffers
    elif config.remat == "dots":
        saved = 2 * residual + heads + products
        passed_on = passed_on + residual + 4 * norm
    else:
        saved = block_buffers + 2 * residual
    layers = np.ceil(config.num_layers / np.asarray(plan.stage))
    deferred = np.where(
        plan.schedule == "zero_bubble", np.minimum(plan.stage, plan.accumulation), 1
    )
    waiting = np.asarray(plan.accumulation) if plan.schedule == "gpipe" else 1
    buffers = layers * in_flight(plan) * saved
    buffers = buffers + layers / plan.chunks * deferred * (recomputed + passed_on)
    return buffers + (3 + waiting) * residual


def in_flight(plan: ParallelPlan):
    """Returns the number of micro-batches in flight on the first stage (arXiv 2104.04473, 2.2).

    Interleaved stages have 1 + (p - 1) / (p v) times as many as 1F1B.
    """
    stages, count = np.asarray(plan.stage), np.asarray(plan.accumulation)
    if plan.schedule == "gpipe":
        result = count
    elif plan.schedule == "interleaved":
        result = np.minimum(stages + (stages - 1) / plan.chunks, count)
    else:
        result = np.minimum(stages, count)
    return np.where(stages > 1, result, 1)
