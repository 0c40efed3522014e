"""Cuts of a training: sparser weights, fitted to the outputs before, equal on all processes."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core import collectives
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.model.stacks import ModelWeights
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.training.transitions import change_model
from sparse_dataflow.pruning import rebuild

Calibration = Callable[[int], Sequence[np.ndarray]]
"""(step) -> int32 [B, T] token batches that a cut before this step reads."""

Change = Callable[[TrainState, ModelConfig, ModelConfig], TrainState]
"""(canonical state, its model, the next model) -> the state of the next model."""


def to_blocks(
    old: ModelConfig,
    weights: ModelWeights,
    new: ModelConfig,
    batches: Sequence[np.ndarray],
    given: Mapping[str, Sequence[BlockLayout]] | None = None,
) -> tuple[ModelConfig, dict, dict[str, list[Any]]]:
    """Returns (dense model, its params, what is stored) of `rebuild.to_blocks`, equal on all
    processes."""
    result, stored = rebuild.to_blocks(old, weights, new, batches, given)
    as_mask = lambda each: each.mask if isinstance(each, BlockLayout) else each  # noqa: E731
    # Each process has other rows of the batches.
    params, masks = collectives.broadcast_arrays(
        (result.params, {name: np.stack([*map(as_mask, each)]) for name, each in stored.items()})
    )
    equal = {
        name: [BlockLayout.from_mask(mask, new.linear(name).block) for mask in np.asarray(layers)]
        if new.linear(name).weight.stores_blocks
        else list(np.asarray(layers))
        for name, layers in masks.items()
    }
    return result.model, params, equal


def fitted_change(calibration: Calibration) -> Change:
    """Returns a change of models that fits the weights of a sparser one to the outputs before.

    Moments of the weights that stay are kept, as those of `change_model`.
    """
    return functools.partial(_fitted, calibration)


def _fitted(calibration, state: TrainState, old: ModelConfig, new: ModelConfig) -> TrainState:
    if not rebuild.prunes(old, new):
        return change_model(state, old, new)
    host = jax.tree.map(collectives.to_host, (state.params, state.rest))
    dense, params, stored = to_blocks(old, ModelWeights(*host), new, calibration(int(state.step)))
    fitted = state._replace(params=jax.tree.map(jnp.array, params), moments=(), rest=())
    weights = change_model(fitted, dense, new, given=stored).params
    state = change_model(state, old, new, given=stored)
    return state._replace(params=jax.tree.map(_like, weights, state.params))


def _like(new: Any, old: Any) -> Any:
    """Returns an array with the type of another, in host memory if that is."""
    return np.asarray(new, old.dtype) if isinstance(old, np.ndarray) else new.astype(old.dtype)
