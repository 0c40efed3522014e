"""Weights of least squares, which make up for blocks or features that a trained model loses.

Projections are fitted in the order of the forward pass, so that each reads what the fitted ones
before it give.  Its outputs shall be those of the dense model; a projection that adds to the
residual stream shall give the stream of the dense model, so it makes up for earlier errors too.

When blocks go, the next one is the block whose loss the remaining weights make up for best (optimal
brain surgeon; OBC, arXiv 2208.11580, and SparseGPT, arXiv 2301.00774, in blocks).
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.model import ModelConfig

from . import inputs
from .arms import ALL, Arm

DAMPING = 0.01
"""Added to the diagonal of the inputs' second moments, relative to its mean."""

Fit = Callable[[str, int, np.ndarray, np.ndarray], np.ndarray]
"""(projection, layer, float32 [tokens, in] inputs, float32 [tokens, out] wanted outputs) -> float32
[in, out] weights."""


def given(model: ModelConfig, params: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns `inputs.Observed.given` of a dense model on int32 [batch, length] tokens."""
    return jax.device_get(inputs.observed(model, params, jnp.asarray(tokens)).given)


def fitted(
    model: ModelConfig, params: Any, wanted: Mapping[str, np.ndarray], tokens: np.ndarray, fit: Fit
) -> Any:
    """Returns the params with fitted projections.

    Args:
      model: dense.
      params: of the model.
      wanted: projection -> float32 [layers, batch, length, outputs], see `inputs.Observed.given`;
        the projections to fit.
      tokens: int32 [batch, length], the text of `wanted`.
      fit: the weights of a projection.
    """
    observe = jax.jit(functools.partial(inputs.observed, model))
    layers = dict(params["blocks"])
    for layer in range(model.num_layers):
        for name in (each for each in ALL if each in wanted):
            seen = jax.device_get(observe({**params, "blocks": layers}, tokens))
            outputs = wanted[name][layer]
            if name in seen.streams:
                outputs = outputs - seen.streams[name][layer]
            weights = fit(name, layer, _rows(seen.read[name][layer]), _rows(outputs))
            kernel = jnp.asarray(layers[name]["kernel"]).at[layer].set(weights)
            layers[name] = {**layers[name], "kernel": kernel}
    return {**params, "blocks": layers}


def cut(
    model: ModelConfig, arm: Arm, params: Any, masks: Any, density: float, tokens: np.ndarray
) -> tuple[Any, Any]:
    """Returns (params, masks) with a lower stored fraction in every pruned projection.

    Args:
      model: dense.
      arm: `pruned`, `block_sides` and `equal_fan_in`.
      params: of the model; zero where the masks are.
      masks: like the params; a scalar 1 for what is dense.
      density: stored fraction of each pruned projection of each layer.
      tokens: int32 [batch, length], the text that outputs are compared on.
    """
    kept = dict(masks["blocks"])
    stored = {
        name: np.array(
            jnp.broadcast_to(kept[name]["kernel"], np.shape(params["blocks"][name]["kernel"]))
        )
        for name in arm.pruned
    }

    def fit(name, layer, read, outputs):
        before = stored[name][layer]
        weights, stored[name][layer] = least_squares(
            read, outputs, arm.block_sides, density, before, arm.equal_fan_in
        )
        return weights

    outputs = given(model, params, tokens)
    wanted = {name: outputs[name] for name in arm.pruned}
    params = fitted(model, params, wanted, tokens, fit)
    for name, mask in stored.items():
        kept[name] = {**kept[name], "kernel": jnp.asarray(mask)}
    return params, {**masks, "blocks": kept}


def dense(read: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns float32 [in, out], the weights whose outputs are nearest to the wanted ones.

    Args:
      read: float32 [tokens, in], inputs.
      wanted: float32 [tokens, out].
    """
    return np.linalg.solve(*_moments(read, wanted)).astype(np.float32)


def least_squares(
    read: np.ndarray,
    wanted: np.ndarray,
    sides: tuple[int, int],
    density: float,
    stored: np.ndarray | None = None,
    equal: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (weights, mask), float32 [in, out], of a projection with few blocks.

    Args:
      read: float32 [tokens, in], inputs.
      wanted: float32 [tokens, out], the outputs that the weights shall give.
      sides: inputs and outputs of a block.
      density: fraction of the blocks that stay, of those that cost most to remove.
      stored: float [in, out], 0 where the weights are zero already; None if nowhere.
      equal: whether equally many blocks of each output stay, within one.
    """
    block, width = sides
    moments, products = _moments(read, wanted)
    rows, columns = len(moments) // block, wanted.shape[1] // width
    gone = np.zeros((rows, columns), bool)
    if stored is not None:
        gone = stored.reshape(rows, block, columns, width).sum((1, 3)) == 0
    costs, turns = np.empty((2, rows, columns))
    for column in range(columns):
        outputs = products[:, column * width : (column + 1) * width]
        costs[:, column], turns[:, column] = _costs(moments, outputs, block, gone[:, column])
    count = round(density * costs.size)
    # Of equal fan-in, the blocks that every output keeps come last, then those that it may keep.
    share = count / columns
    last = (
        (turns >= rows - math.floor(share)) * 1 + (turns >= rows - math.ceil(share)) if equal else 0
    )
    order = np.lexsort((turns.ravel(), costs.ravel(), np.broadcast_to(last, costs.shape).ravel()))
    mask = np.zeros(costs.size, bool)
    mask[order[costs.size - count :]] = True
    mask = mask.reshape(costs.shape)
    weights = np.zeros(products.shape, np.float32)
    for column in range(columns):
        chosen = np.flatnonzero(np.repeat(mask[:, column], block))
        where = np.ix_(chosen, range(column * width, (column + 1) * width))
        weights[where] = np.linalg.solve(moments[np.ix_(chosen, chosen)], products[where])
    return weights, np.repeat(np.repeat(mask, block, 0), width, 1).astype(np.float32)


def _moments(read, wanted):
    """Returns float64 [in, in] of the inputs, damped, and [in, out] of inputs and outputs."""
    read = read.astype(np.float64)
    moments = read.T @ read
    moments += DAMPING * np.trace(moments) / len(moments) * np.eye(len(moments))
    return moments, read.T @ wanted


def _costs(moments, outputs, block, gone):
    """Returns float [rows] twice, for the blocks of a column as they go one by one, cheapest first.

    They are the squared error that each adds, at least that of the one before it; and its turn.
    """
    rows = len(moments) // block
    costs, turns, left = np.full(rows, -np.inf), np.zeros(rows), ~gone
    chosen = np.flatnonzero(np.repeat(left, block))
    inverse = np.linalg.inv(moments[np.ix_(chosen, chosen)])
    weights, last = inverse @ outputs[chosen], -np.inf
    blocks = list(np.flatnonzero(left))
    while blocks:
        count = len(blocks)
        parts = inverse.reshape(count, block, count, block)
        diagonal = np.linalg.inv(parts[range(count), :, range(count), :])
        each = weights.reshape(count, block, -1)
        errors = np.einsum("nij,nik,nkj->n", each, diagonal, each)
        first = int(errors.argmin())
        last = costs[blocks[first]] = max(last, errors[first])
        turns[blocks[first]] = rows - count
        going = slice(first * block, (first + 1) * block)
        gain = inverse[:, going] @ diagonal[first]
        weights = np.delete(weights - gain @ weights[going], np.s_[going], 0)
        inverse = inverse - gain @ inverse[going]
        inverse = np.delete(np.delete(inverse, np.s_[going], 0), np.s_[going], 1)
        blocks.pop(first)
    return costs, turns


def _rows(values):
    """Returns an array [..., features] as [tokens, features]."""
    return values.reshape(-1, values.shape[-1])
