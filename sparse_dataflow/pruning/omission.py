"""Leaving hidden features of the MLPs out of a phase, and putting them back.

Sparsity-accelerated training (arXiv 2406.01392): features are chosen by their activations on the
batches to come, anew before each phase, and the others keep their values until they are put back.
Their moments are dropped, and are zero when they come back, as those of a new block are (see
`training.transitions`).
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.collectives import to_host
from sparse_dataflow.core.config.layer_groups import (
    join_groups,
    layer_groups,
    layer_model,
    split_groups,
)
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP, ROW_PARALLEL
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.block_gradients import Portions, portions
from sparse_dataflow.core.model import gpt, partition, stacks
from sparse_dataflow.core.model.left_out import LEFT_OUT, POSITIONS
from sparse_dataflow.core.optim.optimizers import TrainState, map_moments
from sparse_dataflow.core.training.transitions import Change
from sparse_dataflow.pruning.inputs import observed_block

(HIDDEN,) = (name for name in MLP if name in ROW_PARALLEL)
"""The projection whose inputs are the hidden features."""


def feature_change(evolution: EvolutionConfig, training: TrainingConfig) -> Change:
    """Returns a change of models that puts back what the old model leaves out, and then leaves out
    the least important features of the new one.

    It measures importance on the batches; see `EvolutionConfig.features` and `sequences`.
    """
    division = portions(training, evolution.sequences)
    return functools.partial(_change_features, evolution.features, division)


def _change_features(
    rule, division, state: TrainState, old: ModelConfig, new: ModelConfig, batches
):
    if old.left_out:
        state = put_back(state, old)
    if not new.left_out:
        return state
    model = new.with_all_features
    if rule == "uniform":
        importance = np.ones((model.num_layers, model.d_ff))
    else:
        importance = magnitudes(model, state.merged, batches, division)
    # A resumed run draws the same features: draws follow from the state's key and step.
    key = jax.random.key_data(jax.random.fold_in(state.key, state.step))
    seed = np.asarray(jax.device_get(key)).ravel().tolist()
    positions = [
        least(layer, new.left_out, rule != "top", np.random.default_rng([*seed, number]))
        for number, layer in enumerate(importance)
    ]
    return leave_out(state, new, np.stack(positions))


def least(
    importance: np.ndarray, count: int, sampled: bool, rng: np.random.Generator
) -> np.ndarray:
    """Returns the sorted positions of `count` features to leave out, int32 [count].

    Args:
      importance: float [features], at least 0.
      sampled: whether the others are drawn one after another with probabilities in proportion to
        their importance; else they are the most important ones.
    """
    # With Gumbel noise added, the order of logarithms is a draw without replacement.
    rank = np.log(np.maximum(importance, np.finfo(np.float64).tiny))
    if sampled:
        rank = rank + rng.gumbel(size=rank.shape)
    return np.sort(np.argsort(rank, kind="stable")[:count]).astype(np.int32)


def magnitudes(
    model: ModelConfig, params: dict, batches: Iterable[Batch], division: Portions
) -> np.ndarray:
    """Returns the mean absolute activation of each hidden feature, float64 [layers, d_ff].

    Only one layer at a time is on the device where the weights are in host memory.

    Args:
      params: canonical, with their layouts.
      batches: as put by the executor.
      division: the sequences that are measured.
    """
    total = np.zeros((model.num_layers, model.d_ff))
    embed = jax.tree.map(jnp.asarray, params["embed"])
    for portion in division.divide(batches):
        x = gpt.embed(model, embed, portion.tokens)
        for number, layer in enumerate(stacks.weights(model, params)):
            layer = jax.tree.map(jnp.asarray, layer)
            x, mean = _apply(layer_model(model, number), layer, x)
            total[number] += to_host(mean)
    return total / division.calls


@functools.partial(jax.jit, static_argnames="model")
def _apply(model, weights, x):
    """Applies a block; returns (output, mean absolute hidden features [d_ff])."""

    def mean(name, x, linear):
        return jnp.mean(jnp.abs(x.astype(jnp.float32)), axis=(0, 1)), linear

    x, means = observed_block(model, weights, x, mean)
    return x, means[HIDDEN]


def leave_out(state: TrainState, model: ModelConfig, positions: np.ndarray) -> TrainState:
    """Returns a state of the whole model as one of a model that leaves features out.

    Args:
      state: canonical; must not be used again.
      model: config with the features left out.
      positions: of these in the whole MLP, sorted int32 [layers, left_out].
    """
    spans = [slice(group.layers.start, group.layers.stop) for group in layer_groups(model)]
    others = [_others(model, positions[span]) for span in spans]

    def narrowed(tree):
        groups = zip(split_groups(tree["blocks"]), others, strict=True)
        blocks = [
            _map_features(group, lambda _, x, axis, i=i: _features_at(x, i, axis))
            for group, i in groups
        ]
        return {**tree, "blocks": join_groups(blocks)}

    sections = [
        _section(group, positions[span])
        for group, span in zip(split_groups(state.params["blocks"]), spans, strict=True)
    ]
    beside = {"blocks": join_groups([{LEFT_OUT: section} for section in sections])}
    return state._replace(
        params=narrowed(state.params),
        moments=map_moments(narrowed, state.moments),
        rest=partition.merged(state.rest, beside),
    )


def put_back(state: TrainState, model: ModelConfig) -> TrainState:
    """Returns a state of the whole model; inverts `leave_out` but for moments, which are zero.

    Args:
      state: canonical; must not be used again.
      model: config with the features left out.
    """
    sections = _sections(state.rest)

    def with_zeros(tree):
        return _joined(tree, model, sections, has_values=False)

    return state._replace(
        params=whole_params(model, state.params, state.rest),
        moments=map_moments(with_zeros, state.moments),
        rest=partition.without_left_out(state.rest),
    )


def whole_params(model: ModelConfig, params: object, rest: object) -> dict:
    """Returns the parameters of the whole model, from those of a phase and what it leaves out."""
    return _joined(params, model, _sections(rest), has_values=True)


def _sections(rest):
    return [group[LEFT_OUT] for group in split_groups(rest["blocks"])]


def _section(group, positions):
    """Returns the section "left_out" of a group of layers."""
    in_mlp = {name: module for name, module in group.items() if name in MLP}
    section: dict[str, dict] = {}

    def put(names, array, axis):
        section.setdefault(names[0], {})[names[1]] = _features_at(array, positions, axis)

    _map_features(in_mlp, put)
    on_host = isinstance(jax.tree.leaves(group)[0], np.ndarray)
    return {**section, POSITIONS: positions if on_host else jnp.asarray(positions)}


def _others(model, positions):
    """Returns the sorted indices of the features that take part, int32 [layers, d_ff]."""
    features = np.arange(model.d_ff + model.left_out, dtype=np.int32)
    return np.stack([np.setdiff1d(features, each) for each in positions])


def _joined(tree, model, sections, has_values):
    """Returns a tree like the params with the features of sections, or zeros, in their places."""
    blocks = []
    for group, section in zip(split_groups(tree["blocks"]), sections, strict=True):
        positions = to_host(section[POSITIONS])
        joined = np.concatenate([_others(model, positions), positions], axis=1)
        # `joined` lists the features as they are concatenated; its inverse puts each in its place.
        places = np.argsort(joined, axis=1).astype(np.int32)

        def whole(names, array, axis, section=section, places=places):
            xp = np if isinstance(array, np.ndarray) else jnp
            if has_values:
                other = section[names[0]][names[1]]
            else:
                shape = list(array.shape)
                shape[axis] = model.left_out
                other = xp.zeros(shape, array.dtype)
            return _features_at(xp.concatenate([array, other], axis), places, axis)

        blocks.append(_map_features(group, whole))
    return {**tree, "blocks": join_groups(blocks)}


def _map_features(group, function):
    """Returns a group of layers with `function` of each array along the hidden features.

    Args:
      function: ((projection, name), array, its axis of the features) -> array.
    """

    def mapped(projection, name, array):
        # The bias of mlp_out is of output features.
        if projection not in MLP or (projection == HIDDEN and name == "bias"):
            return array
        # Hidden features are the inputs of mlp_out, and the outputs of the others.
        return function((projection, name), array, -2 if projection == HIDDEN else -1)

    return {
        projection: {name: mapped(projection, name, array) for name, array in module.items()}
        for projection, module in group.items()
    }


def _features_at(array, indices, axis):
    """Returns the features of each layer at `indices`, int32 [layers, features]."""
    if isinstance(array, np.ndarray):
        pairs = zip(array, indices, strict=True)
        return np.stack([np.take(layer, index, axis) for layer, index in pairs])
    return _take(array, indices, axis)


@functools.partial(jax.jit, static_argnames="axis")
def _take(array, indices, axis):
    return jax.vmap(lambda layer, index: jnp.take(layer, index, axis))(array, indices)
