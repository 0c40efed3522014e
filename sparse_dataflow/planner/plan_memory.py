"""Memory estimate of a parallel plan on its fullest chip, by category; broadcasts over counts.

"fsdp" and "context" shard what the ZeRO stage says (arXiv 1910.02054, section 5): moments from
stage 1, gradients from 2, weights from 3.  Arrays that
the axes do not divide stay replicated, and so do biases and norms.  The buffers of a pipeline are
those of `pipeline/pipeline.py` for every schedule; `experiments.compile_plan` compares
them with the compiler's.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from sparse_dataflow.core.config import remat
from sparse_dataflow.core.config.layer_groups import layer_groups, with_densest_layers
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import KEY_VALUE, MLP, ROW_PARALLEL
from sparse_dataflow.core.config.remat import chunk_tokens
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.mesh_axes import key_value_copies
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.cost import stored_fractions
from sparse_dataflow.planner import memory, step_time
from sparse_dataflow.planner.memory import MemoryEstimate
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.planner.step_time import stage_matrices, stage_parameters

Bytes = float | np.ndarray

ERROR = (-0.15, 0.05)
"""Relative range of the compiler's bytes about the estimate, on the plans of
`experiments/results/compile_plan`; a test compares them."""


def plan_bytes(config: ModelConfig, sequence: int, plan: ParallelPlan) -> MemoryEstimate:
    """Estimates the memory of the fullest chip; the results broadcast over the plan's counts.

    Args:
      config: the model; its remat is ignored.
      sequence: tokens per sequence.
      plan: parallel plan; remat "dots" of published runs counts as "keep", others as "full".
    """
    # Memory has three classes of policies; a published one counts as the class that saves about as
    # much.
    policy = {"none": "none", "keep": "keep", "dots": "keep"}.get(plan.remat, "full")
    config = dataclasses.replace(config, remat=policy)
    weights, matrices = stage_parameters(config, plan), stage_matrices(config, plan)
    sequence = config.row(sequence)
    tokens = np.asarray(plan.micro_batch) * sequence / plan.context
    shares = {stage: _shard_share(config, plan, stage) for stage in (1, 2, 3)}
    cut, whole = _stage_vectors(config, plan)
    # Stage of ZeRO -> parameters, or state of their shape, on one chip.
    held = {stage: (weights - cut) * share + whole for stage, share in shares.items()}
    staged, sharded = np.asarray(plan.stage) > 1, np.asarray(plan.state_shards) > 1
    layers = plan.stage_layers(config)
    rows = step_time.computed_rows(config, tokens, plan)[0] / tokens if config.experts else None
    saved, working = _block_bytes(config, sequence, plan, rows)
    # A pipeline has the buffers of its program, which allocates them by slots.
    saved = np.where(staged, pipeline_bytes(config, plan, rows), saved * layers * in_flight(plan))
    activations = tokens * (saved + gathered_residual(config, plan))
    activations = activations + _gathered_weights(config, plan, weights)
    local = config.vocab_size / np.asarray(plan.layer_chips)
    chunk = np.minimum(tokens, chunk_tokens(local))
    logits = chunk * local * memory.MASTER_BYTES
    # A stage sums the gradients of all its weights in float32, and reduce-scatters them at the end.
    gradient = memory.gradient_bytes(np.asarray(plan.accumulation), plan.state_dtype)
    staged_gradients = memory.MASTER_BYTES * (weights + np.where(sharded, held[2], 0))
    # ZeRO 3: gradients of the embedding and of one projection before they are reduce-scattered.
    full = (cost.embeddings(config) + _largest_projection(config, plan)) / plan.layer_chips
    full = np.where(sharded & ~staged & (plan.zero == 3), memory.MASTER_BYTES * full, 0)
    # Below ZeRO 3 every chip holds all weights: the updated ones are gathered before they replace
    # the old ones.  ZeRO 2 reduce-scatters the gradients of a whole micro-batch, not of a layer.
    gathered = np.where(sharded & ~staged, memory.MASTER_BYTES * weights, 0)
    gathered = gathered * (0, 1, 2, 0)[plan.zero]
    updates = memory.update_bytes(matrices, plan.optimizer) * shares[1]
    moments = memory.moment_bytes(
        config, held[1], matrices * shares[1], plan.state_dtype, plan.optimizer
    )
    return MemoryEstimate(
        parameters=memory.MASTER_BYTES * held[3],
        working_copy=_working_copy(config, plan, weights, shares[3]),
        gradients=np.where(staged, staged_gradients, gradient * held[2]),
        moments=moments,
        layout_tables=memory.table_bytes(config) * layers / config.num_layers / plan.tensor,
        activations=activations,
        working_set=np.maximum(tokens * working + full, updates - activations - logits) + gathered,
        logits=logits,
    )


def run_bytes(
    config: ModelConfig,
    sequence: int,
    plan: ParallelPlan,
    adapters: bool = False,
    kinds: Sequence[str] = (),
) -> MemoryEstimate:
    """Estimates `plan_bytes` of a training of adapters, or of blocks of several kinds of remat.

    Args:
      config: as in `plan_bytes`, also for `sequence` and `plan`.
      adapters: whether everything but low-rank terms is frozen.
      kinds: kind of remat of each block, of which it is the mean; `plan.remat` where it is empty.
        An offloaded block saves nothing on the device.
    """
    if kinds:
        means: dict = collections.defaultdict(float)
        # Estimates are linear in the number of blocks of a kind, so a mixed model is the weighted
        # mean of uniform ones.
        for kind, count in collections.Counter(kinds).items():
            one = dataclasses.replace(plan, remat="keep" if kind == "offload" else kind)
            sizes = run_bytes(config, sequence, one, adapters).categories
            if kind == "offload":
                sizes["activations"] = 0
            for name, size in sizes.items():
                means[name] = means[name] + count / len(kinds) * size
        return MemoryEstimate(**means)
    estimate = plan_bytes(config, sequence, plan)
    if not adapters:
        return estimate
    share = _shard_share(config, plan, 3) / plan.layer_chips
    trained = memory.term_count(config)
    gradient = memory.gradient_bytes(np.asarray(plan.accumulation), plan.state_dtype)
    compute = memory.DTYPE_BYTES[config.compute_dtype]
    gathers = (np.asarray(plan.state_shards) > 1) & (plan.zero == 3)
    # The frozen weights have the compute dtype already, but for those in int8.  A chip copies what
    # it gathers of them, and the adapters.
    gathered = estimate.working_copy - cost.parameter_count(config) * share * compute
    copied = config
    if plan.remat != "none":
        copied = memory.single_layer(dataclasses.replace(config, remat=plan.remat))
    narrow = memory.term_count(copied) * (compute != memory.MASTER_BYTES)
    return dataclasses.replace(
        estimate,
        parameters=trained * memory.MASTER_BYTES + memory.frozen_bytes(config) * share,
        working_copy=np.where(gathers, gathered, narrow * compute)
        + memory.int8_count(copied) * share * compute,
        gradients=trained * gradient,
        moments=memory.moment_bytes(config, trained, 0, plan.state_dtype, plan.optimizer),
    )


def training_bytes(
    config: ModelConfig, training: TrainingConfig, fused_attention: bool = False
) -> MemoryEstimate:
    """Estimates the memory of training on one device that holds the whole model, in whole bytes.

    Args:
      config: the model, with its remat.
      fused_attention: whether attention scores stay on chip (flash attention).
    """
    plan = ParallelPlan(
        micro_batch=training.batch // training.micro_batches,
        accumulation=training.micro_batches,
        fused_attention=fused_attention,
        state_dtype=training.state_dtype,
        optimizer=training.optimizer,
    )
    kinds = remat.kinds(config.remat, config.num_layers)
    sizes = run_bytes(config, training.sequence, plan, training.freezes, kinds)
    return MemoryEstimate(**{name: round(float(n)) for name, n in sizes.categories.items()})


def alternating_bytes(variants: Sequence[Sequence[MemoryEstimate]]):
    """Returns the bytes of several models whose steps alternate, of each its largest phase.

    Masters, moments and tables of all models stay resident.  The other memory is that of the
    largest step.
    """
    resident: Bytes = 0.0
    transient: Bytes = 0.0
    for phases in variants:
        states = [e.parameters + e.moments + e.layout_tables for e in phases]
        total: Bytes = phases[0].total
        state: Bytes = states[0]
        # Phases follow one another on the same chips: what counts is the phase with the largest
        # total.
        for each, own in zip(phases[1:], states[1:]):
            larger = np.asarray(each.total > total)
            total, state = np.where(larger, each.total, total), np.where(larger, own, state)
        resident, transient = resident + state, np.maximum(transient, total - state)
    return np.asarray(resident + transient)


def _stage_vectors(config, plan):
    """Returns the biases, norms and gates of a stage over its layer chips, and those of one chip.

    Biases of column-parallel projections are cut over "tensor"; nothing else cuts a vector.
    """
    column = [name for name in config.projections if name not in ROW_PARALLEL]
    wide = sum(
        config.projection_shape(name)[1] * config.stored_copies(name)
        for name in column
        if name in config.biases
    )
    matrices = cost.embeddings(config) + memory.matrix_count(config) + memory.term_count(config)
    vectors = (cost.parameter_count(config) - matrices) / config.num_layers
    layers = plan.stage_layers(config)
    one = layers * (vectors - wide + wide / np.asarray(plan.tensor))
    return layers * vectors / plan.layer_chips, one


def gathered_residual(config: ModelConfig, plan: ParallelPlan):
    """Returns the bytes per token of the last block's output, whole on every chip for the head."""
    whole = config.d_model * memory.DTYPE_BYTES[config.compute_dtype]
    several = (np.asarray(plan.chips) > 1) & (np.asarray(plan.stage) == 1)
    return np.where(several, whole, 0.0)


def _block_bytes(config, sequence, plan, expert_rows):
    """Returns the bytes per token that a block saves for its backward pass, and of temporaries."""
    compute = memory.DTYPE_BYTES[config.compute_dtype]
    copies = key_value_copies(config, plan.tensor)
    per_token = memory.activation_bytes(config, sequence, plan.fused_attention, copies, expert_rows)
    boundary_share = 1 / (plan.layer_chips if plan.sequence_parallel else plan.feature)
    saved = per_token.boundary * boundary_share
    saved = saved + (per_token.saved - per_token.boundary) / plan.layer_chips
    working = per_token.working / plan.layer_chips + per_token.ends * boundary_share
    whole_inputs = _whole_inputs(config, plan)
    # Keys and values of all tokens, and their gradients.
    context = np.asarray(plan.context)
    keys_values = memory.block_widths(config, copies).keys_values * compute / plan.layer_chips
    working = working + np.where(context > 1, 2 * context * keys_values, 0)
    if config.mask_documents and plan.fused_attention and not plan.tpu:
        masked = context == 1  # With "context", XLA's chunks need no mask.
        working = working + np.where(masked, sequence * compute, 0)  # cuDNN's, of all heads.
    if config.remat == "none":
        saved = saved + whole_inputs
    if config.remat != "full" and plan.tpu and memory.has_one_op_mlp(config):
        saved = saved - compute * config.d_ff / plan.layer_chips
    return saved, working + whole_inputs


def _whole_inputs(config, plan):
    """Returns the bytes per token of the inputs of attn_out and mlp_out that "feature" gathers."""
    width = config.num_heads * config.head_width + config.d_ff
    size = memory.DTYPE_BYTES[config.compute_dtype] * width / np.asarray(plan.tensor)
    return np.where(np.asarray(plan.feature) > 1, size, 0)


def _gathered_weights(config, plan, weights):
    """Returns the bytes of gathered weights that remat "none" saves for the backward pass."""
    gathers = (np.asarray(plan.state_shards) > 1) & (plan.zero == 3)
    gathers = gathers & (np.asarray(plan.stage) == 1)
    if config.remat != "none":
        return 0.0
    exchanged = step_time.stage_experts(config, plan) * plan.exchanges
    blocks = weights - cost.embeddings(config) / plan.layer_chips - exchanged
    return np.where(gathers, blocks * memory.DTYPE_BYTES[config.compute_dtype], 0.0)


def _working_copy(config, plan, weights, share):
    """Returns the bytes of the weights that a chip computes with, of which it stores a `share`.

    A stage gathers its weights once per step and keeps them.  Otherwise it is a copy of the local
    shard in the compute dtype, plus one gathered layer.  Experts that tokens reach stay sharded.
    """
    staged = np.asarray(plan.stage) > 1
    gathers = (np.asarray(plan.state_shards) > 1) & (plan.zero == 3)
    single = stage_parameters(memory.single_layer(config), plan)
    own = (1 - 1 / np.asarray(plan.fsdp)) * step_time.stage_experts(config, plan) * plan.exchanges
    block = single - cost.embeddings(config) / plan.layer_chips - own / plan.stage_layers(config)
    local = weights if config.remat == "none" else single
    # The head needs the whole embedding, at a time at which no block is gathered.
    layer = np.maximum(block, cost.embeddings(config) / plan.layer_chips)
    copies = np.where(gathers, weights * share + layer, local)
    copies = np.where(staged, weights - own if plan.zero == 3 else single, copies)
    compute = memory.DTYPE_BYTES[config.compute_dtype]
    return np.where(gathers | (compute != memory.MASTER_BYTES), copies * compute, 0)


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
    (core/executors/sharding.py).
    """
    if plan.zero < stage:
        return 1.0
    fsdp, tensor, feature = (np.asarray(n) for n in (plan.state_shards, plan.tensor, plan.feature))
    # Number of weights, and whether "fsdp" with "context" divides them.
    parts = [(cost.embeddings(config), config.d_model % fsdp == 0)]
    for group, name in itertools.product(layer_groups(config), config.projections):
        spec = group.model.linear(name)
        copied = (name in KEY_VALUE) & (key_value_copies(config, tensor) > 1)
        shards = {"fsdp": fsdp, "tensor": np.where(copied, 1, tensor), "feature": feature}
        for leaf, shape in spec.weight.shapes(spec, config.projection_shape(name)).items():
            cuts = spec.weight.leaves()[leaf].cuts(name in ROW_PARALLEL)
            divides = _divides(shape, cuts, shards)
            weights = len(group.layers) * math.prod(shape)
            if config.experts and name in MLP:  # The axis shards experts, or the weight of each.
                parts.append((config.experts * weights, divides | (config.experts % fsdp == 0)))
                weights = config.shared_expert * weights
            parts.append((weights, divides))
    total = sum(size for size, _ in parts)
    return sum(np.where(divides, size / fsdp, size) for size, divides in parts) / total


def _divides(shape, cuts, shards):
    """Returns whether "fsdp" shards an array: its own dimension, or else one of the next ones.

    Args:
      shape: of an array of a layer.
      cuts: mesh axes of each dimension; see `weights.kind.Leaf`.
      shards: mesh axis -> devices, as numbers or arrays of plans.
    """
    first = next((i for i, axes in enumerate(cuts) if "fsdp" in axes), len(shape))
    divides: bool | np.ndarray = False
    for i in range(first, len(shape)):
        axes = {*(cuts[i] if i < len(cuts) else ()), "fsdp"}
        divides = divides | (shape[i] % math.prod(shards[axis] for axis in axes) == 0)
    return divides


def pipeline_bytes(config: ModelConfig, plan: ParallelPlan, expert_rows=None):
    """Returns the bytes per token of all activation buffers of one stage.

    These are the arrays that the forward pass saves for each block in flight, and the arrays that
    `layer_actions` passes from the backward pass of the input to that of the weights.  As counted
    in the buffers of a traced pipeline, with d = d_model and an MLP without a gate:

    - Remat "full" saves the input.  Its recomputation saves both norm outputs for the whole
      sequence, q, k, v, attention's output twice, GELU's input and output, and six float32 arrays
      of width d.  "none" saves these but the float32 arrays in the forward pass, "keep" the
      projection outputs.
    - The backward pass passes on the norm outputs, GELU's output, the gradients of the outputs of
      the four products, and two float32 arrays of width d.

    `expert_rows` is that of `memory.block_widths`.  "feature" cuts all features, and gathers the
    inputs of attn_out and mlp_out; "context" gathers keys and values.
    """
    compute = memory.DTYPE_BYTES[config.compute_dtype]
    tensor, context = np.asarray(plan.tensor), np.asarray(plan.context)
    local = config.d_model / np.asarray(plan.feature)
    gathered = local * compute
    residual = gathered / tensor if plan.sequence_parallel else gathered
    norm = local * memory.MASTER_BYTES * (1 / tensor if plan.sequence_parallel else 1.0)
    widths = memory.block_widths(config, key_value_copies(config, plan.tensor), expert_rows)
    queries, keys_values, normed, products, hidden = (
        n * compute / plan.layer_chips for n in widths
    )
    heads = queries + keys_values
    block_buffers = 2 * gathered + hidden + heads + normed + 2 * queries
    block_buffers = block_buffers + _whole_inputs(config, plan)
    block_buffers = block_buffers + np.where(context > 1, context * keys_values, 0)
    passed_on = 2 * gathered + products + heads + 4 * residual + 2 * norm
    # `saved` waits from the forward to the backward pass of a micro-batch, of which many are in
    # flight.  `recomputed` and `passed_on` exist for the few in their backward pass.
    saved, recomputed = residual, 0.0 * residual
    if config.remat == "full":
        recomputed = block_buffers + 6 * norm
    elif config.remat == "keep":
        saved = 2 * residual + heads + products + queries
        passed_on = passed_on + residual
    else:
        saved = block_buffers + 2 * residual
    layers = plan.stage_layers(config)
    # zero_bubble postpones weight gradients, and keeps their operands until then.
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
