"""Densities by projection: more where a cut costs the whole model more, at equal kept weights.

Each projection is pruned alone, in several layers at once, at a few densities.  The divergence of
the next token's distribution from that of the dense model is its cost.  Densities are those of the
least summed cost.
"""

import functools
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.layer_groups import layer_model
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.stacks import ModelWeights
from sparse_dataflow.pruning.layer_by_layer import applied, dense_float32, pruned_layers
from sparse_dataflow.pruning.projection import Target, prune

LAYERS = 8
"""Layers in which a projection is pruned for its cost."""
TOKENS = 4096
"""Tokens of the first batch that the divergence is measured on, at most."""
LEAST = 1e-9
"""Least divergence in nats, so that it has a logarithm."""


def by_projection(
    model: ModelConfig,
    weights: ModelWeights,
    batches: Sequence[np.ndarray],
    density: float,
    legal: Mapping[str, Sequence[float]],
    target: Callable[[str, float], Target],
) -> dict[str, float]:
    """Returns projection -> density, with at most `density` of the weights of all of them.

    Args:
      model: of the weights.
      weights: on the host.
      batches: int32 [B, T] token ids.
      density: of all of these projections together.
      legal: projection -> the densities that it may have, ascending up to 1.
      target: (projection, density) -> what is left of it; for its cost, in one round.
    """
    wanted = density / 2, density, (1 + density) / 2
    points = {
        (name, min(values[:-1], key=lambda each: abs(each - point)))
        for name, values in legal.items()
        for point in wanted
    }
    targets = {point: target(*point) for point in sorted(points)}
    costs = divergences(model, weights, batches, targets)
    measured = {name: {d: costs[name, d] for n, d in targets if n == name} for name in legal}
    sizes = {name: float(np.prod(model.projection_shape(name))) for name in legal}
    curves = {name: curve(measured[name], legal[name]) for name in legal}
    return shared_out(curves, legal, sizes, density)


def divergences(
    model: ModelConfig,
    weights: ModelWeights,
    batches: Sequence[np.ndarray],
    targets: Mapping[tuple[str, float], Target],
) -> dict[tuple[str, float], float]:
    """Returns (projection, density) -> KL(dense || pruned) in nats a token, see `LAYERS`."""
    config = dense_float32(model)
    count = min(LAYERS, model.num_layers)
    chosen = set(np.linspace(0, model.num_layers - 1, count).round().astype(int).tolist())
    linears: dict[tuple[str, float], Any] = {}

    def fitted(site):
        for (name, density), target in targets.items():
            if name == site.name and site.layer in chosen:
                result = prune(site.fit, site.held_out, site.kernel, target)
                linears[name, density] = site.linear(result.kernel)
        return site.kernel

    tokens = batches[0][: max(1, TOKENS // batches[0].shape[1])]
    params = jax.tree.map(jnp.asarray, {name: weights.merged[name] for name in ("embed", "head")})
    dense = np.asarray(gpt.embed(config, params["embed"], jnp.asarray(tokens)))
    streams = dict.fromkeys(targets, dense)
    names = tuple(dict.fromkeys(name for name, _ in targets))
    for number, layer in enumerate(pruned_layers(model, weights, batches, names, fitted)):
        apply = functools.partial(applied, layer_model(config, number))
        dense = apply(layer, dense)
        for key, stream in streams.items():
            pruned = {**layer, key[0]: linears[key]} if number in chosen else layer
            streams[key] = apply(pruned, stream)
    return {key: _divergence(config, params, dense, stream) for key, stream in streams.items()}


def _divergence(config, params, dense, pruned):
    """Returns the mean over tokens, one sequence after the other."""
    return float(
        np.mean([_row(config, params, *map(jnp.asarray, row)) for row in zip(dense, pruned)])
    )


@functools.partial(jax.jit, static_argnames="config")
def _row(config, params, dense, pruned):
    old, new = (
        jax.nn.log_softmax(gpt.logits(config, params, stream[None])) for stream in (dense, pruned)
    )
    return (jnp.exp(old) * (old - new)).sum(-1).mean()


def curve(measured: Mapping[float, float], legal: Sequence[float]) -> np.ndarray:
    """Returns the cost at each legal density: 0 at 1, exponential between the measured ones."""
    points = np.array(sorted(measured))
    logs = np.log(np.maximum([measured[point] for point in points], LEAST))
    logs = np.minimum.accumulate(logs)
    at = np.asarray(legal)
    if len(points) == 1:  # Of no known slope.
        return np.exp(logs[0]) * (1 - at) / (1 - points[0])
    place = np.clip(np.searchsorted(points, at), 1, len(points) - 1)
    slopes = np.diff(logs) / np.diff(points)
    costs = np.exp(logs[place - 1] + slopes[place - 1] * (at - points[place - 1]))
    return costs - costs[-1]


def shared_out(
    costs: Mapping[str, np.ndarray],
    legal: Mapping[str, Sequence[float]],
    sizes: Mapping[str, float],
    density: float,
) -> dict[str, float]:
    """Returns name -> the legal density, for the least summed cost at most `density` of all sizes.

    Each step removes what costs least a weight, from all of them on.  What the last step removed
    too much is given back where it gains most.
    """
    at = {name: len(values) - 1 for name, values in legal.items()}
    kept, goal = sum(sizes.values()), density * sum(sizes.values()) * (1 + 1e-9)

    def step(name, start, end):
        weights = sizes[name] * abs(legal[name][start] - legal[name][end])
        return (costs[name][end] - costs[name][start]) / weights, weights

    heap = [(step(name, at[name], at[name] - 1)[0], name) for name in at if at[name]]
    heapq.heapify(heap)
    while kept > goal and heap:
        _, name = heapq.heappop(heap)
        kept -= step(name, at[name], at[name] - 1)[1]
        at[name] -= 1
        if at[name]:
            heapq.heappush(heap, (step(name, at[name], at[name] - 1)[0], name))
    while True:
        ups = [
            (*step(name, place, place + 1), name)
            for name, place in at.items()
            if place + 1 < len(legal[name])
        ]
        fitting = [each for each in ups if kept + each[1] <= goal]
        if not fitting:
            return {name: float(legal[name][place]) for name, place in at.items()}
        _, weights, name = min(fitting)
        kept, at[name] = kept + weights, at[name] + 1
