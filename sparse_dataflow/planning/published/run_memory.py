"""Memory of a published run on its fullest chip, by the conventions of its software.

`plan_memory` describes the executors of this project: a pipeline sums gradients in float32, and
XLA's buffers have several copies of an activation.  Megatron and FSDP keep less:

- Megatron: weights and gradients in bfloat16 on every replica; master and two moments in float32,
  sharded over replicas from ZeRO stage 1.  FSDP: 16 bytes a parameter, sharded, and two gathered
  layers.  MaxText: 14 bytes, because gradients have the compute dtype.
- Activations without recomputation: 16 d_model + 4 d_ff bytes per token and layer (34 d_model in
  arXiv 2205.05198, equation 1, without dropout masks).
- One block at a time is recomputed or differentiated; its attention and its MLP are never alive
  together.
"""

import numpy as np

from sparse_dataflow.planning import memory
from sparse_dataflow.planning.plan_memory import in_flight
from sparse_dataflow.planning.published import Row
from sparse_dataflow.planning.step_time import stage_parameters

_SAVED = {
    "none": (16, 4),
    "dots": (16, 4),
    "selective_op": (8, 2),
    "minimal": (12, 4),
    "full": (2, 0),
    "block": (2, 0),
}
"""Remat -> bytes saved per token and layer, as multiples of (d_model, d_ff).  "dots" is selective
recomputation, which recomputes the scores only; MaxText's is below."""
_OFFLOADED = ("keep_qkv", "keep_qkv_out")
LOGIT_BYTES = {"eager": 6}
"""Stack -> bytes per logit of the loss: fused in llm-foundry.  OTHERS: bfloat16 logits, float32
softmax, and its gradient; XLA's loss is in chunks."""
OTHERS = 10


def run_bytes(row: Row) -> float:
    """Returns the bytes of a run on its fullest chip."""
    return _state_bytes(row) + _activation_bytes(row)


def _state_bytes(row: Row) -> float:
    plan, config = row.plan, row.config
    weights = float(stage_parameters(config, plan))
    if plan.zero == 3 or row.stack == "eager":
        layer = float(stage_parameters(memory.single_layer(config), plan))
        layer -= memory.embeddings(config) / int(plan.tensor)
        gathered = weights if plan.zero == 2 else 2 * layer
        return (14 if row.stack == "xla" else 16) * weights / int(plan.fsdp) + 2 * gathered
    shards = int(plan.fsdp) if plan.zero else 1
    return weights * (2 + plan.gradient_bytes + 12 / shards)


def _activation_bytes(row: Row) -> float:
    plan, config = row.plan, row.config
    d, d_ff, tensor = config.d_model, config.d_ff, int(plan.tensor)
    tokens = float(plan.micro_batch) * row.sequence
    residual = 2 * d / (tensor if plan.sequence_parallel else 1)
    layers = np.ceil(config.num_layers / np.asarray(plan.stage)) * in_flight(plan)
    if plan.remat in _OFFLOADED or _host_inputs(row):
        layers, saved = 2, residual
    elif row.stack == "xla" and plan.remat == "dots":
        saved = residual + (8 * d + 2 * d_ff) / tensor
    else:
        wide, hidden = _SAVED[plan.remat]
        saved = residual + ((wide - 2) * d + hidden * d_ff) / tensor
    scores = 0 if plan.fused_attention else 4 * config.num_heads * row.sequence
    working = max(16 * d + scores, 8 * d + 6 * d_ff) / tensor
    logits = 0.0
    if plan.stage == 1:
        rows = min(tokens, memory.LOGITS_CHUNK) if row.stack == "xla" else tokens
        logits = rows * config.vocab_size / tensor * LOGIT_BYTES.get(row.stack, OTHERS)
    return float(tokens * (layers * saved) + max(tokens * working, logits))


def _host_inputs(row: Row) -> bool:
    """Whether layer inputs are in host memory: "decoder_layer_input": "offload" of MaxText."""
    return row.chip.name == "tpu-v6e" and "405B" in row.name
