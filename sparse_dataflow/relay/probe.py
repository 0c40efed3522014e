"""Block gradient norms with one block at a time on the device; see `block_gradients`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.layer_groups import layer_model_index, layer_models
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.executors.block_gradients import (
    norms_of_masks,
    opened_masks,
)
from sparse_dataflow.core.executors.whole import micro_batches
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.projection import layer_weights, with_probes
from sparse_dataflow.core.model.stacks import layouts_by_name
from sparse_dataflow.relay import relay_programs as programs


class ProbePrograms(NamedTuple):
    """Compiled programs, as `programs.Programs`.

    `backward` is (weights, x, dy, batch) -> (dx, {projection: float32 [in_blocks, out_blocks]}).
    """

    embed: Callable
    forward: Callable
    head: Callable
    backward: Callable


def block_gradient_norms(
    model: ModelConfig, fetch: Callable, batch: Batch
) -> dict[str, np.ndarray]:
    """Returns the block norms of the dense gradient of the loss of a batch.

    Args:
      fetch: section -> its `ParameterServer.section` on the device.
      batch: on the host.

    Returns:
      {block-sparse or masked projection: float32 [layers, in_blocks, out_blocks]}.
    """
    programs_by_kind = [
        _compiled(dataclasses.replace(each, num_layers=1), (1, *batch.tokens.shape))
        for each in layer_models(model)
    ]
    block_programs = lambda layer: programs_by_kind[layer_model_index(model, layer)]  # noqa: E731
    batch = micro_batches(model, batch.weighted(), 1)
    layers = range(model.num_layers)
    embed = fetch("embed")
    # Inputs of all layers are kept, and layers run again for their gradients: one is on the device.
    stash = [programs_by_kind[0].embed(embed, batch.tokens)]
    for layer in layers:
        x, _ = block_programs(layer).forward(fetch(layer), stash[-1], batch.for_blocks())
        stash.append(x)
    head = fetch("head")
    tied = programs.tied_output(model, embed)
    _, dx, _ = programs_by_kind[0].head(head, tied, stash.pop(), batch)
    norms = []
    for layer in reversed(layers):
        arguments = fetch(layer), stash.pop(), dx, batch.for_blocks()
        dx, block_norms = block_programs(layer).backward(*arguments)
        norms.append(jax.device_get(block_norms))
    return {name: np.stack([block[name] for block in norms[::-1]]) for name in norms[0]}


@functools.cache
def _compiled(model, shape):
    functions = programs.functions(model)
    arguments = programs.arguments(model, shape)
    layouts = layouts_by_name(arguments.forward[0][1])
    zeros = {name: np.zeros(layout.grid, np.float32) for name, layout in layouts.items()}

    def backward(weights, x, dy, batch):
        params, opened = weights[0], opened_masks(weights[1])

        def block(x, norms, masked):
            layer = layer_weights(model, merged({**params, **masked}, opened))
            linears = with_probes(layer, norms)
            return gpt.block(model, linears, x, batch.map_rows(lambda rows: rows[0]))[0]

        # Under masks of ones, the gradients of these kernels are those of dense weights.
        masked = {name: params[name] for name in model.masked_projections}
        _, pull = jax.vjp(block, x[0], jax.tree.map(jnp.asarray, zeros), masked)
        dx, norms, gradients = pull(dy[0])
        return dx[None], norms | norms_of_masks(model, gradients)

    probes = ProbePrograms(functions.embed, functions.forward, functions.head, backward)
    return ProbePrograms(
        *(
            jax.jit(function).lower(*getattr(arguments, name)).compile()
            for name, function in probes._asdict().items()
        )
    )
