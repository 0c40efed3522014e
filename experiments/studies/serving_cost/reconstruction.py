"""Cuts whose remaining weights make up for the weights that go.

A projection that loses blocks shall keep its outputs.  Its remaining weights are those of least
squares over a few inputs, and the block goes next whose loss they make up for best (optimal brain
surgeon; OBC, arXiv 2208.11580, and SparseGPT, arXiv 2301.00774, in blocks).  Projections are cut in
the order of the forward pass, and each reads what the cut ones before it give.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.model import ModelConfig

from . import inputs
from .arms import ALL, Arm

DAMPING = 0.01
"""Added to the diagonal of the inputs' second moments, relative to its mean."""


def cut(
    model: ModelConfig, arm: Arm, params: Any, masks: Any, density: float, tokens: np.ndarray
) -> tuple[Any, Any]:
    """Returns (params, masks) with a lower stored fraction in every pruned projection.

    Args:
      model: dense.
      arm: `pruned` and `block`.
      params: of the model; zero where the masks are.
      masks: like the params; a scalar 1 for what is dense.
      density: stored fraction of each pruned projection of each layer.
      tokens: int32 [batch, length], the text that the outputs are compared on.
    """
    read = jax.jit(functools.partial(inputs.of_projections, model))
    wanted = jax.device_get(read(params, tokens))
    layers, kept = dict(params["blocks"]), dict(masks["blocks"])
    kernels = {name: np.array(layers[name]["kernel"]) for name in arm.pruned}
    features = {name: np.ones(kernel.shape, np.float32) for name, kernel in kernels.items()}
    for layer in range(model.num_layers):
        for name in (each for each in ALL if each in arm.pruned):
            given = jax.device_get(read({**params, "blocks": layers}, tokens)[name][layer])
            kernel, mask = least_squares(
                _rows(given), _rows(wanted[name][layer]) @ kernels[name][layer], arm.block, density,
                np.asarray(kept[name]["kernel"])[layer] if np.ndim(kept[name]["kernel"]) else None,
            )  # fmt: skip
            kernels[name][layer], features[name][layer] = kernel, mask
            layers[name] = {**layers[name], "kernel": jnp.asarray(kernels[name])}
    for name in arm.pruned:
        kept[name] = {**kept[name], "kernel": jnp.asarray(features[name])}
    return {**params, "blocks": layers}, {**masks, "blocks": kept}


def least_squares(
    given: np.ndarray,
    wanted: np.ndarray,
    block: int,
    density: float,
    stored: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (weights, mask), float32 [in, out], of a projection with few blocks.

    Args:
      given: float32 [tokens, in], inputs.
      wanted: float32 [tokens, out], the outputs that the weights shall give.
      block: side of a block.
      density: fraction of the blocks that stay, of those that cost least to keep.
      stored: float [in, out], 0 where the weights are zero already; None if nowhere.
    """
    given, wanted = given.astype(np.float64), wanted.astype(np.float64)
    moments = given.T @ given
    moments += DAMPING * np.trace(moments) / len(moments) * np.eye(len(moments))
    products = given.T @ wanted
    rows, columns = len(moments) // block, wanted.shape[1] // block
    gone = np.zeros((rows, columns), bool)
    if stored is not None:
        gone = stored.reshape(rows, block, columns, block).sum((1, 3)) == 0
    costs, turns = np.empty((2, rows, columns))
    for column in range(columns):
        outputs = products[:, column * block : (column + 1) * block]
        costs[:, column], turns[:, column] = _costs(moments, outputs, block, gone[:, column])
    count = round(density * costs.size)
    order = np.lexsort((turns.ravel(), costs.ravel()))
    mask = np.zeros(costs.size, bool)
    mask[order[costs.size - count :]] = True
    mask = mask.reshape(costs.shape)
    weights = np.zeros(products.shape, np.float32)
    for column in range(columns):
        chosen = np.flatnonzero(np.repeat(mask[:, column], block))
        where = np.ix_(chosen, range(column * block, (column + 1) * block))
        weights[where] = np.linalg.solve(moments[np.ix_(chosen, chosen)], products[where])
    return weights, np.repeat(np.repeat(mask, block, 0), block, 1).astype(np.float32)


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
