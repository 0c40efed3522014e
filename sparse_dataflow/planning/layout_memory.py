"""Bytes on the fullest chip of a layout, by category; broadcasts over the layout's counts.

The categories are those of `memory.training_bytes`, which this equals for one chip.  What "fsdp"
deals out follows the ZeRO stage (arXiv 1910.02054, section 5): moments from 1, gradients from 2,
weights from 3.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from sparse_dataflow.models.sizes import ModelConfig
from sparse_dataflow.planning import memory
from sparse_dataflow.planning.memory import MemoryPlan
from sparse_dataflow.planning.run_layout import RunLayout
from sparse_dataflow.planning.step_time import stage_parameters

LOGITS_CHUNK = 512


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
    one_layer = dataclasses.replace(config, num_layers=1)
    block_weights = stage_parameters(one_layer, layout, stored_density)
    compute = memory.COMPUTE_BYTES[config.compute_dtype]
    tokens = np.asarray(layout.micro_batch) * sequence
    shard = {stage: layout.fsdp if layout.zero >= stage else 1 for stage in (1, 2, 3)}
    accumulated = np.where(np.asarray(layout.accumulation) > 1, 2, 1)
    # A pipeline's stage gathers its weights once a step and keeps them.
    gathered = (layout.zero == 3) & (np.asarray(layout.stage) > 1)
    copied = np.where(gathered | (remat == "none" and layout.zero < 3), weights, block_weights)
    copy_bytes = np.where(gathered | (compute != memory.MASTER_BYTES), compute, 0)
    held = memory.activation_bytes(config, sequence, layout.fused_attention)
    layers = np.ceil(config.num_layers / np.asarray(layout.stage))
    border = 1 / layout.tensor if layout.sequence_parallel else 1.0
    kept = held.boundary * border + (held.kept - held.boundary) / layout.tensor
    working = held.working / layout.tensor + held.ends * border
    whole = memory.training_bytes(config, 1, sequence, stored_density=stored_density)
    plan = MemoryPlan(
        parameters=weights * memory.MASTER_BYTES / shard[3],
        working_copy=copied * copy_bytes,
        gradients=weights * memory.MASTER_BYTES * accumulated / shard[2],
        moments=weights * memory.MASTER_BYTES * memory.ADAM_MOMENTS / shard[1],
        layout_tables=whole.layout_tables * layers / config.num_layers / layout.tensor,
        activations=tokens * (kept * layers * in_flight(layout) + working),
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
