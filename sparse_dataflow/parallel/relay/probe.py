"""Block norms of the dense gradient, one block at a time on the device; see `block_gradients`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.models import gpt
from sparse_dataflow.models.groups import group_index, layer_groups
from sparse_dataflow.models.linear import Probe
from sparse_dataflow.parallel.relay import programs
from sparse_dataflow.parallel.relay.host_state import one_layer


class ProbePrograms(NamedTuple):
    """As `programs.Programs`; `backward`: (params, tables, x, dy) -> (dx, {projection:
    float32 [in_blocks, out_blocks]})."""

    embed: Callable
    forward: Callable
    head: Callable
    backward: Callable


def block_gradient_norms(
    model: ModelConfig, fetch: Callable, tables: dict, tokens: np.ndarray
) -> dict[str, np.ndarray]:
    """Norms of the dense gradient's blocks of the mean loss over these tokens.

    Args:
      model: its config.
      fetch: (section, host arrays...) -> tuple of the section's parameters and of these, on the
        device.
      tables: numpy, stacked over layers.
      tokens: int32 [rows, sequence + 1].

    Returns:
      {block-sparse projection: float32 [layers, in_blocks, out_blocks]}.
    """
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    runs = [
        _compiled(dataclasses.replace(group.model, num_layers=1), (1, rows, length))
        for group in layer_groups(model)
    ]
    run, of_block = runs[0], lambda layer: runs[group_index(model, layer)]
    inputs, targets = tokens[None, :, :-1], tokens[None, :, 1:]
    weights = np.full(targets.shape, 1 / targets.size, np.float32)
    layers = range(model.num_layers)
    of = lambda layer: jax.tree.map(np.asarray, one_layer(tables, layer))  # noqa: E731
    (embed,) = fetch("embed")
    stash = [run.embed(embed, inputs)]
    for layer in layers:
        stash.append(of_block(layer).forward(*fetch(layer, of(layer)), stash[-1]))
    (head,) = fetch("head")
    _, dx, _ = run.head(head, embed["tokens"], stash.pop(), targets, weights)
    found = []
    for layer in reversed(layers):
        dx, norms = of_block(layer).backward(*fetch(layer, of(layer)), stash.pop(), dx)
        found.append(jax.device_get(norms))
    return {name: np.stack([norms[name] for norms in found[::-1]]) for name in found[0]}


@functools.cache
def _compiled(model, shape):
    made = programs.functions(model)
    tables = programs.layer_tables(model)
    given = programs.arguments(model, tables, shape)
    zeros = {
        name: np.zeros((table.out_index.shape[0], table.in_index.shape[0]), np.float32)
        for name, table in tables.items()
    }

    def backward(params, tables, x, dy):
        def block(x, norms):
            probes = {name: Probe(tables[name], norms[name]) for name in tables}
            return gpt.block(model, params, probes, x)

        _, pull = jax.vjp(block, x[0], jax.tree.map(jnp.asarray, zeros))
        dx, norms = pull(dy[0])
        return dx[None], norms

    functions = ProbePrograms(made.embed, made.forward, made.head, backward)
    return ProbePrograms(
        *(
            jax.jit(function).lower(*getattr(given, name)).compile()
            for name, function in functions._asdict().items()
        )
    )
