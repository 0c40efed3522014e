"""An optimizer that updates each weight by itself, by a transformation of `factories`.

A weight is a layer's matrix or vector, the matrix of an expert, or a stored block.  So a factored
or matrix optimizer sees matrices, whatever is stacked, and a section has the same update under
every executor.

The state of a parameter is a `WeightState`: arrays whose first axes are those of its stack (layers,
experts, stored blocks), and whose others have names.  By these they are placed on devices, and move
to new layouts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.optim import factories
from sparse_dataflow.core.optim.matrix_leaves import VOCABULARY, weight_axes
from sparse_dataflow.core.optim.weight_state import WeightState, axis_names


class WeightStates(NamedTuple):
    """State of an optimizer that updates each weight by itself.

    Attributes:
      states: a tree like the params with a `WeightState` for each leaf.
    """

    states: Any


def init(training: TrainingConfig, params: Any) -> Any:
    """Returns the states of params, or of a section of them."""

    def init_leaf(path, leaf):
        init_weight = lambda weight: tuple(  # noqa: E731
            map(
                jnp.asarray,
                jax.tree.leaves(factories.transformation(training, 0.0, 0.0).init(weight)),
            )
        )
        names = axis_names(training, _weight_shape(path, leaf))
        return WeightState(_over_stack(init_weight, path, leaf)(leaf), names)

    return jax.tree_util.tree_map_with_path(init_leaf, params)


def _weight_shape(path, param):
    return param.shape[param.ndim - weight_axes(path) :]


def update(
    training: TrainingConfig,
    gradients: Any,
    states: Any,
    params: Any,
    rates: Any,
    decays: Any,
    vocabulary: int | None = None,
) -> tuple[Any, Any]:
    """Returns (updates, which are added to the params; states).

    Args:
      training: names the optimizer.
      states: from `init` or `update`.
      params: a tree of float32 arrays.
      rates: learning rate of each leaf, a number or float32 [].
      decays: decoupled weight decay of each leaf; 0 for none.
      vocabulary: rows of leaves in VOCABULARY without their padding; None for all.
    """

    def leaf_step(path, gradient, param, rate, decay, state):
        rows = vocabulary if path[-1].key in VOCABULARY else None
        return update_leaf(training, path, gradient, state, param, rate, decay, rows)

    structure: Any
    leaves, structure = jax.tree_util.tree_flatten_with_path(gradients)
    columns = (jax.tree.leaves(tree) for tree in (params, rates, decays))
    leaf_states = structure.flatten_up_to(states)
    updated = [
        leaf_step(path, gradient, *others)
        for (path, gradient), *others in zip(leaves, *columns, leaf_states, strict=True)
    ]
    return tuple(structure.unflatten(column) for column in zip(*updated, strict=True))


def update_leaf(
    training: TrainingConfig,
    path: tuple,
    gradient: jax.Array,
    state: WeightState,
    param: jax.Array,
    rate: Any,
    decay: float,
    rows: int | None = None,
) -> tuple[jax.Array, WeightState]:
    """Returns (update, state) of one parameter; see `update`, also for `rows`."""
    shape, placed_rows = _weight_shape(path, param), param.shape[0] if rows else 0
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
        return step, tuple(new.astype(old.dtype) for new, old in zip(arrays, state, strict=True))

    step, arrays = _over_stack(weight_step, path, param)(gradient, tuple(state), param)
    state = state.with_arrays(arrays)
    if rows:
        step, state = _with_rows(step, placed_rows, 0), _resized(state, placed_rows)
    return step, state


def evaluated(training: TrainingConfig, moments: Any, params: Any) -> Any:
    """Returns the params that are evaluated and exported: averages, of schedule-free learning.

    Args:
      training: names the optimizer.
      moments: the optimizer state.
    """
    if training.optimizer != "schedule_free":
        return params
    states = next(entry.states for entry in moments if isinstance(entry, WeightStates))
    averages = functools.partial(_averages, training)
    leaves = jax.tree.leaves(params)
    if all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return jax.tree.map(np.asarray, jax.jit(averages)(params, states))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    return jax.jit(averages, out_shardings=shardings)(params, states)


def _averages(training, params, states):
    def leaf_average(path, param, state):
        shape = _weight_shape(path, param)
        structure = jax.tree.structure(factories.state_shapes(training, shape))

        def weight_average(param, state):
            return factories.averaged(training, jax.tree.unflatten(structure, state), param)

        return _over_stack(weight_average, path, param)(param, tuple(state))

    structure: Any
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves_and_states = zip(leaves, structure.flatten_up_to(states), strict=True)
    return structure.unflatten(
        [leaf_average(path, param, state) for (path, param), state in leaves_and_states]
    )


def _over_stack(function, path, param):
    """Returns a function of one weight as one of a parameter's arrays."""
    for _ in range(param.ndim - weight_axes(path)):
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
