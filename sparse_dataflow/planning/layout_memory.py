"""Bytes on the fullest chip of a layout, by category; broadcasts over the layout's counts.

The categories are those of `memory.training_bytes`, which this equals for one chip.  What "fsdp"
deals out follows the ZeRO stage (arXiv 1910.02054, section 5): moments from 1, gradients from 2,
weights from 3; of what its count does not divide, nothing.  Counts of a pipeline's buffers are
those of `execution/pipeline.py`, whatever the schedule; `experiments.compile_plan` shows them
beside the compiler's, and tests hold them to its figures.
"""

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np

from sparse_dataflow.models.groups import layer_groups, with_densest_layers
from sparse_dataflow.models.sizes import PROJECTIONS, ModelConfig
from sparse_dataflow.planning import memory
from sparse_dataflow.planning.cost import stored_fractions
from sparse_dataflow.planning.memory import MemoryPlan
from sparse_dataflow.planning.run_layout import RunLayout
from sparse_dataflow.planning.step_time import stage_parameters

LOGITS_CHUNK = 512
NORM_COPIES = {"full": 6, "dots": 0, "none": 5}
"""Remat -> float32 arrays of the model's width that a layer of a pipeline keeps of its norms and
of its attention; see `pipeline_bytes`."""


def layout_bytes(
    config: ModelConfig,
    sequence: int,
    layout: RunLayout,
    stored_density: Mapping[str, float] | None = None,
) -> MemoryPlan:
    """The plan of training on the chip that holds most; numbers are arrays where the counts are.

    Args:
      config: the model; the layout's remat counts, of which only "none", "dots" and "full" are this
        project's own.  Others are taken for "full".
      sequence: tokens a sequence.
      layout: on a relay, the parts that stay in host memory are not counted, and two blocks are.
      stored_density: see `cost.stored_fractions`.
    """
    remat = layout.remat if layout.remat in ("none", "dots") else "full"
    config = dataclasses.replace(config, remat=remat)
    weights = stage_parameters(config, layout, stored_density)
    block_weights = stage_parameters(memory.one_layer(config), layout, stored_density)
    compute = memory.DTYPE_BYTES[config.compute_dtype]
    tokens = np.asarray(layout.micro_batch) * sequence
    parts = {stage: _kept(config, layout, stage, stored_density) for stage in (1, 2, 3)}
    staged, dealt = np.asarray(layout.stage) > 1, np.asarray(layout.fsdp) > 1
    held = memory.activation_bytes(config, sequence, layout.fused_attention)
    layers = np.ceil(config.num_layers / np.asarray(layout.stage))
    border = 1 / layout.tensor if layout.sequence_parallel else 1.0
    kept = held.boundary * border + (held.kept - held.boundary) / layout.tensor
    working = held.working / layout.tensor + held.ends * border
    whole = memory.training_bytes(config, 1, sequence, stored_density=stored_density)
    # A stage sums the gradients of all its weights in float32, and deals them out at the end.
    gradient = memory.gradient_bytes(np.asarray(layout.accumulation), layout.state_dtype)
    staged_gradients = memory.MASTER_BYTES * (1 + np.where(dealt, parts[2], 0))
    # What a device computes with: a stage gathers its weights once a step, and keeps them; else a
    # copy in the compute dtype of what it keeps, and a layer at a time what it gathers.
    block = block_weights - embedding(config) / layout.tensor
    alone = weights if remat == "none" else block_weights
    gathered = weights * parts[3] + block
    copies = np.where(dealt & (layout.zero == 3), gathered, alone)
    copies = np.where(staged, weights if layout.zero == 3 else block_weights, copies)
    sent = dealt & (layout.zero == 3)
    # Gradients of the embedding and of one projection before they are summed and dealt out.
    undealt = embedding(config) / layout.tensor + _widest(config, stored_density) / layout.tensor
    undealt = np.where(dealt & ~staged & (layout.zero >= 2), memory.MASTER_BYTES * undealt, 0)
    plan = MemoryPlan(
        parameters=weights * memory.MASTER_BYTES * parts[3],
        working_copy=np.where(sent | (compute != memory.MASTER_BYTES), copies * compute, 0),
        gradients=weights * np.where(staged, staged_gradients, parts[2] * gradient),
        moments=weights * memory.moment_bytes(layout.state_dtype) * parts[1],
        layout_tables=whole.layout_tables * layers / config.num_layers / layout.tensor,
        activations=tokens
        * np.where(staged, pipeline_bytes(config, layout), kept * layers * in_flight(layout)),
        working_set=tokens * working + undealt,
        logits=2.0 * np.minimum(tokens, LOGITS_CHUNK) * config.vocab_size * 4 / layout.tensor,
    )
    if layout.executor != "relay":
        return plan
    return dataclasses.replace(
        plan,
        parameters=2 * block_weights * compute,
        working_copy=0.0 * weights,
        gradients=2 * block_weights * memory.MASTER_BYTES,
        moments=0.0 * weights,
    )


def embedding(config: ModelConfig) -> int:
    """Parameters of the embedding and of learned positions."""
    positions = config.max_len if config.positions == "learned" else 0
    return (config.vocab_size + positions) * config.d_model


def _widest(config, stored_density):
    """Stored weights of the projection that has most, of one layer."""
    fractions = stored_fractions(with_densest_layers(config), stored_density)
    return max(fractions[n] * np.prod(config.projection_shape(n)) for n in PROJECTIONS)


def _kept(config, layout, stage, stored_density):
    """Which part of the weights, or of what follows them, a chip keeps where ZeRO deals them out
    from `stage` on: all of a projection that "fsdp" does not divide (execution/sharding.py)."""
    if layout.zero < stage:
        return 1.0
    fsdp, tensor = np.asarray(layout.fsdp), np.asarray(layout.tensor)
    total = embedding(config)
    kept = np.where(config.d_model % fsdp == 0, embedding(config) / fsdp, embedding(config))
    for group, name in itertools.product(layer_groups(config), PROJECTIONS):
        spec, (inside, outside) = config.linear(name), config.projection_shape(name)
        stored = inside * outside * stored_fractions(group.model, stored_density)[name]
        if spec.kind == "block_sparse":
            blocks = round(stored / spec.block**2)
            divides = (blocks % (fsdp * tensor) == 0) | (spec.block % fsdp == 0)
        elif name in ("qkv", "mlp_in"):
            divides = (inside % fsdp == 0) | (outside % (fsdp * tensor) == 0)
        else:
            divides = outside % fsdp == 0
        weights = len(group.layers) * stored
        kept = kept + np.where(divides, weights / fsdp, weights)
        total += weights
    return kept / total


def pipeline_bytes(config: ModelConfig, layout: RunLayout):
    """Bytes a token of all buffers of one stage's activations.

    Of each block in flight what its forward pass keeps, and of those between their backward pass
    and that of their weights what `layer_actions` hands on: with d the model's width, each as
    counted in the buffers of a traced pipeline,

    - remat "full" keeps the input; its recomputation both norms' outputs for all of the sequence,
      q, k, v, attention's output twice, GELU's input and output, and six float32 arrays of d;
      "none" keeps all of these at once, "dots" the projections' outputs;
    - the backward pass hands on the norms' outputs, GELU's, the gradients of the four products'
      results and two float32 arrays of d.
    """
    compute = memory.DTYPE_BYTES[config.compute_dtype]
    tensor = np.asarray(layout.tensor)
    gathered = config.d_model * compute
    cut = gathered / tensor if layout.sequence_parallel else gathered
    norm = config.d_model * memory.MASTER_BYTES * (1 / tensor if layout.sequence_parallel else 1.0)
    head, hidden = gathered / tensor, config.d_ff * compute / tensor
    whole = 2 * gathered + 2 * hidden + 5 * head + NORM_COPIES[config.remat] * norm
    handed = 2 * gathered + hidden + 3 * head + 4 * cut + 2 * norm
    saved, again = cut, 0.0 * cut
    if config.remat == "full":
        again = whole
    elif config.remat == "dots":
        saved = 2 * cut + 3 * head + hidden
        handed = handed + cut + 4 * norm
    else:
        saved = whole + 2 * cut
    layers = np.ceil(config.num_layers / np.asarray(layout.stage))
    deferred = np.where(
        layout.schedule == "zero_bubble", np.minimum(layout.stage, layout.accumulation), 1
    )
    waiting = np.asarray(layout.accumulation) if layout.schedule == "gpipe" else 1
    kept = layers * in_flight(layout) * saved + layers / layout.chunks * deferred * (again + handed)
    return kept + (3 + waiting) * cut


def in_flight(layout: RunLayout):
    """Micro-batches whose activations the first stage keeps at once (arXiv 2104.04473, 2.2).

    Interleaved stages hold 1 + (p - 1) / (p v) times as many as 1F1B; the relay holds all.
    """
    stages, count = np.asarray(layout.stage), np.asarray(layout.accumulation)
    if layout.executor == "relay":
        return count
    if layout.schedule == "gpipe":
        held = count
    elif layout.schedule == "interleaved":
        held = np.minimum(stages + (stages - 1) / layout.chunks, count)
    else:
        held = np.minimum(stages, count)
    return np.where(stages > 1, held, 1)
