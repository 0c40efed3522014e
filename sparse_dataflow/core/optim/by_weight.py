"""An optimizer that updates each weight by itself, by a transformation of `factories`.

A weight is a layer's matrix or vector, the matrix of an expert, or a stored block.  So a factored
or matrix optimizer sees matrices, whatever is stacked, and a section has the same update under
every executor.

The state of a parameter is a `WeightState`: arrays whose first axes are those of its stack (layers,
experts, stored blocks), and whose others have names.  By these they are placed on devices, and move
to new layouts.
"""

import functools
import itertools
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_dataflow.core.config.layer_groups import group_index_of_path, split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.model.partition import ArrayTree
from sparse_dataflow.core.optim import factories
from sparse_dataflow.core.optim.matrix_leaves import VOCABULARY, weight_axes
from sparse_dataflow.core.optim.weight_state import WeightState, axis_names


class WeightStates(NamedTuple):
    """State of an optimizer that updates each weight by itself.

    Attributes:
      states: a tree like the params with a `WeightState` for each leaf.
    """

    states: ArrayTree


def init(model: ModelConfig, training: TrainingConfig, params: dict, first_layer: int = 0) -> dict:
    """Returns the states of params, or of some of their sections.

    A random key is folded with the place of its weight: each weight has its own noise, and the same
    one under every executor.

    Args:
      first_layer: number of the first layer of the params.
    """
    groups = split_groups(params["blocks"]) if "blocks" in params else ()
    layers = [len(leaves[0]) if (leaves := jax.tree.leaves(group)) else 0 for group in groups]
    starts = list(itertools.accumulate(layers, initial=first_layer))

    def init_weight(weight, *place, name):
        arrays = jax.tree.leaves(factories.transformation(training, 0.0, 0.0).init(weight))
        return tuple(_folded(jnp.asarray(array), name, *place) for array in arrays)

    def init_leaf(path, leaf):
        axes = weight_axes(model, path)
        stack = leaf.shape[: leaf.ndim - axes]
        # [axes of the stack, *stack]: for each weight, its index along every axis.
        place = np.indices(stack, np.uint32)
        if path[0].key == "blocks":
            # Layers are numbered over the model, so a section alone gets the keys of the whole.
            place[0] += np.uint32(starts[group_index_of_path(path)])
        # Python's own hash of a text differs between processes; a CRC does not.
        name = ".".join(str(key.key) for key in path if hasattr(key, "key"))
        new = functools.partial(init_weight, name=zlib.crc32(name.encode()))
        names = axis_names(training, _weight_shape(axes, leaf))
        return WeightState(_over_stack(new, axes, leaf)(leaf, *place), names)

    return jax.tree_util.tree_map_with_path(init_leaf, params)


_KEYS = {(2,): "threefry2x32", (4,): "rbg"}
"""Shape of a random key's data, uint32 -> its kind."""


def _folded(array, *place):
    """Returns an array of a new state; the data of a random key folded with the weight's place."""
    if array.dtype != jnp.uint32 or array.shape not in _KEYS:
        return array
    key = jax.random.wrap_key_data(array, impl=_KEYS[array.shape])
    return jax.random.key_data(functools.reduce(jax.random.fold_in, place, key))


def with_new_keys(array: np.ndarray | jax.Array, is_new: np.ndarray) -> np.ndarray | jax.Array:
    """Returns an array of a state; where it holds random keys, those of new weights folded with
    their places.

    Args:
      array: with the axes of `is_new` first.
      is_new: bool, of a stack of weights.
    """
    if array.dtype != np.uint32 or array.shape[is_new.ndim :] not in _KEYS:
        return array
    folded = _folded
    for _ in is_new.shape:
        folded = jax.vmap(folded)
    place = np.indices(is_new.shape, np.uint32)
    keys = jnp.where(is_new[..., None], folded(jnp.asarray(array), *place), array)
    return np.asarray(keys) if isinstance(array, np.ndarray) else keys


def _weight_shape(axes, param):
    return param.shape[param.ndim - axes :]


def update(
    model: ModelConfig,
    training: TrainingConfig,
    gradients: dict,
    states: ArrayTree,
    params: dict,
    rates: ArrayTree,
    decays: ArrayTree,
) -> tuple[ArrayTree, ArrayTree]:
    """Returns (updates, which are added to the params; states).

    Args:
      model: its vocabulary has the rows of leaves in VOCABULARY, without their padding.
      training: names the optimizer.
      states: from `init` or `update`.
      params: a tree of float32 arrays.
      rates: learning rate of each leaf, a number or float32 [].
      decays: decoupled weight decay of each leaf; 0 for none.
    """

    def leaf_step(path, gradient, param, rate, decay, state):
        rows = model.vocab_size if path[-1].key in VOCABULARY else None
        axes = weight_axes(model, path)
        return update_leaf(training, axes, gradient, state, param, rate, decay, rows)

    structure: jax.tree_util.PyTreeDef
    leaves, structure = jax.tree_util.tree_flatten_with_path(gradients)
    columns = (jax.tree.leaves(tree) for tree in (params, rates, decays))
    # A state is a tree of its own under each parameter, so it is cut where the parameters end.
    leaf_states = structure.flatten_up_to(states)
    updated = [
        leaf_step(path, gradient, *others)
        for (path, gradient), *others in zip(leaves, *columns, leaf_states, strict=True)
    ]
    return tuple(structure.unflatten(column) for column in zip(*updated, strict=True))


def update_leaf(
    training: TrainingConfig,
    axes: int,
    gradient: jax.Array,
    state: WeightState,
    param: jax.Array,
    rate: object,
    decay: float,
    rows: int | None = None,
) -> tuple[jax.Array, WeightState]:
    """Returns (update, state) of one parameter.

    Args:
      training: see `update`, also for the others.
      axes: `weight_axes` of the parameter.
      rows: rows of the parameter without padding; None for all.
    """
    shape, placed_rows = _weight_shape(axes, param), param.shape[0] if rows else 0
    if rows:  # Padding is zeros, which a mean over the rows must not count.
        shape = (rows, *shape[1:])
        gradient, param = (_with_rows(array, rows, 0) for array in (gradient, param))
        state = _resized(state, rows)
    structure = jax.tree.structure(factories.state_shapes(training, shape))

    def weight_step(gradient, state, param):
        before = jax.tree.unflatten(structure, state)
        step, after = factories.transformation(training, rate, decay).update(
            gradient, before, param
        )
        arrays = map(jnp.asarray, jax.tree.leaves(after))
        # A state that changed its dtypes would compile the step anew.
        return step, tuple(new.astype(old.dtype) for new, old in zip(arrays, state, strict=True))

    step, arrays = _over_stack(weight_step, axes, param)(gradient, tuple(state), param)
    state = state.with_arrays(arrays)
    if rows:
        step, state = _with_rows(step, placed_rows, 0), _resized(state, placed_rows)
    return step, state


def evaluated(model: ModelConfig, training: TrainingConfig, moments: tuple, params: dict) -> dict:
    """Returns the params that are evaluated and exported: averages, of schedule-free learning.

    Args:
      training: names the optimizer.
      moments: the optimizer state.
    """
    if training.optimizer != "schedule_free":
        return params
    states = next(entry.states for entry in moments if isinstance(entry, WeightStates))
    averages = functools.partial(_averages, model, training)
    leaves = jax.tree.leaves(params)
    # States in host memory stay there.
    if all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return jax.tree.map(np.asarray, jax.jit(averages)(params, states))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    return jax.jit(averages, out_shardings=shardings)(params, states)


def _averages(model, training, params, states):
    def leaf_average(path, param, state):
        axes = weight_axes(model, path)
        shape = _weight_shape(axes, param)
        structure = jax.tree.structure(factories.state_shapes(training, shape))

        def weight_average(param, state):
            return factories.averaged(training, jax.tree.unflatten(structure, state), param)

        return _over_stack(weight_average, axes, param)(param, tuple(state))

    structure: jax.tree_util.PyTreeDef
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves_and_states = zip(leaves, structure.flatten_up_to(states), strict=True)
    return structure.unflatten(
        [leaf_average(path, param, state) for (path, param), state in leaves_and_states]
    )


def _over_stack(function, axes, param):
    """Returns a function of one weight as one of a parameter's arrays."""
    for _ in range(param.ndim - axes):
        function = jax.vmap(function)
    return function


def _resized(state, rows):
    """Returns the state of a vocabulary of so many rows; see `_with_rows`."""
    return state.with_arrays(
        _with_rows(array, rows, names.index("row")) if "row" in names else array
        for array, names in zip(state, state.names, strict=True)
    )


def _with_rows(array, rows, axis):
    """Returns an array with so many rows: without its last ones, or with rows of zeros."""
    more = rows - array.shape[axis]
    if more == 0:
        return array
    if more < 0:
        return lax.slice_in_dim(array, 0, rows, axis=axis)
    return jnp.pad(array, [(0, more if i == axis else 0) for i in range(array.ndim)])
