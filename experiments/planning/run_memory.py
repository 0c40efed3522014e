"""Memory of a published run on its fullest chip, by the conventions of its software.

`plan_memory` describes the executors of this project: a pipeline sums gradients in float32, and
XLA's buffers have several copies of an activation.  Megatron and FSDP keep less:

- Megatron: weights and gradients in bfloat16 on every replica; master and two moments in float32,
  sharded over replicas from ZeRO stage 1, and gradients from stage 2.
- MaxText: 14 bytes a parameter, sharded, because gradients have the compute dtype, or 8 with
  bfloat16 weights, whose dtype the moments inherit; and two gathered layers.
- FSDP of PyTorch: 16 bytes, or 8 with bfloat16 weights, sharded; two gathered layers, a gradient of
  one layer and its copy in the dtype of the reduction; and the embedding with its gradient, which
  stay gathered.
- Activations without recomputation: 16 d_model + 4 d_ff bytes per token and layer (34 d_model in
  arXiv 2205.05198, equation 1, without dropout masks); a gate adds 2 d_ff.
- 8-bit inputs of products are one byte each.
- One block at a time is recomputed or differentiated; its attention and its MLP are never alive
  together.
"""

from sparse_dataflow.core.training import cost
from sparse_dataflow.hardware.chips import GIB
from sparse_dataflow.planner import memory
from sparse_dataflow.planner.plan_memory import in_flight
from sparse_dataflow.planner.step_time import stage_experts, stage_parameters

from .published import Row

_STATE_BYTES = {"float32": 14, "bfloat16": 8}
"""Dtype of the weights -> bytes per parameter of MaxText's weights, moments and gradients."""

XLA_LOGITS_TOKENS = 512
"""Tokens whose logits the runs of XLA's frameworks hold at once."""

LOGIT_BYTES = {"eager": 2}
"""Stack -> bytes per logit of the loss.  llm-foundry's default fused_crossentropy overwrites the
bfloat16 logits with their gradient (mosaicml/llm-foundry, models/mpt/modeling_mpt.py).  OTHERS:
bfloat16 logits, float32 softmax, and its gradient; XLA's loss is in chunks."""
OTHERS = 10

ROOM = 7.4
"""Free memory, in gathered layers of FSDP, below which PyTorch's allocator is out of room: midway
between the fitted runs that lose time (MPT 30B at 8,192 tokens on 8 H100, 6.5 layers) and those
that do not (at 2,048 tokens, 8.3)."""
RETRY_RATE = 44e9
"""Bytes/s at which an allocator that is out of room gets memory for gathered layers: that run's."""
_RESERVED = 2.3 * GIB
"""Bytes of the driver, CUDA and NCCL: an 80 GB card offers PyTorch 79.2 GiB, of which 1.5 are its
process' other memory (errors quoted in minerva4ai-eu/minerva-benchmarks, issue 41)."""


def run_bytes(row: Row) -> float:
    """Returns the bytes of a run on its fullest chip."""
    return _state_bytes(row) + _activation_bytes(row)


def retry_seconds(row: Row) -> float:
    """Returns the seconds per step that PyTorch loses because its allocator is out of room.

    FSDP gathers layers on streams of their own, ahead of the layer that computes, so its allocator
    caches several gathered layers.  Where the memory has no room for them, an allocation fails,
    PyTorch frees its cache, waits for the chip and allocates again, in every layer and micro-batch:
    "throughput will collapse due to memory thrashing" (mosaicml/composer, pull request 1998).  The
    driver's time does not depend on the speed of the chip.
    """
    if row.stack != "eager" or row.plan.zero != 3:
        return 0.0
    layer = 2 * (cost.parameter_count(memory.single_layer(row.config)) - _embeddings(row))
    if row.chip.capacity - _RESERVED - run_bytes(row) > ROOM * layer:
        return 0.0
    return row.config.num_layers * layer * int(row.plan.accumulation) / RETRY_RATE


def _state_bytes(row: Row) -> float:
    plan, config = row.plan, row.config
    weights = float(stage_parameters(config, plan))
    if plan.stage > 1 and not config.tied_embeddings:
        # No stage has both the embedding and the output layer.
        weights -= config.vocab_size * config.d_model / int(plan.tensor)
    if plan.zero == 3 or row.stack == "eager":
        embeddings = _embeddings(row)
        single = memory.single_layer(config)
        layer = float(stage_parameters(single, plan)) - embeddings
        layer -= float(stage_experts(single, plan)) * plan.exchanges
        gathered = 2 * (weights if plan.zero == 2 else 2 * layer)
        if row.stack == "xla":
            return _STATE_BYTES[row.weights] * weights / int(plan.state_shards) + gathered
        gathered += (2 + plan.gradient_bytes) * layer + (2 if plan.zero == 2 else 4) * embeddings
        return (8 if row.weights == "bfloat16" else 16) * weights / int(
            plan.state_shards
        ) + gathered
    shards = int(plan.state_shards) if plan.zero else 1
    gradient = plan.gradient_bytes / (shards if plan.zero == 2 else 1)
    away = float(stage_experts(config, plan)) * (1 - 1 / int(plan.expert_chips)) * plan.exchanges
    return (weights - away) * (2 + gradient) + weights * 12 / shards


def _embeddings(row: Row) -> float:
    return cost.embeddings(row.config) / int(row.plan.tensor)


def _activation_bytes(row: Row) -> float:
    plan, config = row.plan, row.config
    tensor, widths = int(plan.tensor), memory.block_widths(config)
    tokens = float(plan.micro_batch) * row.sequence / int(plan.context)
    layers = float(plan.stage_layers(config) * in_flight(plan))
    inputs = 2 * config.d_model / (tensor if plan.sequence_parallel else 1)
    # Two layers are on the chip while their copies to or from the host are under way.
    stored = inputs * (2 if "inputs" in row.offload else layers)
    stored += _saved(row, widths) / tensor * (2 if "saved" in row.offload else layers)
    scores = 0 if plan.fused_attention else 4 * config.num_heads * row.sequence
    working = 8 * config.d_model + 2 * (widths.queries + widths.keys_values + widths.queries)
    working = max(working + scores, 8 * config.d_model + 4 * widths.products + 2 * config.d_ff)
    logits = 0.0
    if plan.stage == 1:
        rows = min(tokens, XLA_LOGITS_TOKENS) if row.stack == "xla" else tokens
        logits = rows * config.vocab_size / tensor * LOGIT_BYTES.get(row.stack, OTHERS)
    return float(tokens * stored + max(tokens * working / tensor, logits))


def _saved(row: Row, widths: memory.BlockWidths) -> float:
    """Returns the bytes that remat saves per token and layer beside the layer's input."""
    d, heads = row.config.d_model, widths.queries + widths.keys_values
    # Both norms, the residual sum, q, k, v and attention's output; the MLP's products and product.
    everything = 2 * (3 * d + heads + widths.queries + widths.products + row.config.d_ff)
    if row.config.quantized:
        # Inputs of products are kept as they were multiplied: norms, attention's output, product.
        everything -= 2 * d + widths.queries + row.config.d_ff
    return {
        "none": everything,
        # Selective recomputation recomputes the scores only.  MaxText's saves products.
        "dots": 2 * (heads + d + widths.products) if row.stack == "xla" else everything,
        "selective_op": everything / 2,
        "minimal": 2 * (heads + widths.queries + 2 * d + widths.products),
        "keep_attention": 2 * (heads + widths.queries + d),
        "keep_qkv_out": 2 * (heads + 2 * d),
        "keep_qkv": 2 * heads,
        "full": 0,
        "block": 0,
    }[row.plan.remat]
