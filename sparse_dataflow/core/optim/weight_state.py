"""The state that an optimizer keeps of a parameter, with the names of its axes.

An optimizer of `factories` keeps arrays of any shape for a weight: moments of its shape, numbers
for each row or column, counts.  Placement on a mesh, padding, and moves of stored blocks treat each
differently.  So an array carries the names of its axes, from the optimizer to the checkpoint.
"""

import functools
import itertools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.optim import factories

WEIGHT_AXES: dict[int, tuple[str, ...]] = {0: (), 1: ("entry",), 2: ("row", "column")}
"""Names of the axes of a number, a vector and a matrix."""

CONSTANT = "constant"
"""Name of an axis whose size does not depend on the weight's shape, as of a random key."""

UNKNOWN = "unknown"
"""Name of an axis whose size depends on the weight's shape and is that of no axis of the weight."""

Names = tuple[tuple[str, ...], ...]

_SMALL = 128
"""Side of the square that stands for larger ones, if the optimizer treats them alike."""


class WeightState(tuple):
    """The state arrays of a parameter: a pytree like a tuple.

    Attributes:
      names: of the axes of each array that come after the parameter's stack of layers, experts or
        stored blocks: those of the weight, CONSTANT or UNKNOWN.
    """

    names: Names

    def __new__(cls, arrays: Iterable[object], names: Names):
        """Returns a state of arrays, whose last axes have these names."""
        state = super().__new__(cls, arrays)
        state.names = names
        return state

    def with_arrays(self, arrays: Iterable[object]) -> "WeightState":
        """Returns a state of other arrays with the same axes."""
        return WeightState(arrays, self.names)

    def map(self, entries: Callable, counts: Callable) -> "WeightState":
        """Returns the state with `entries` of the arrays that have an axis of the weight, such
        as moments, and `counts` of the others, such as counts."""
        functions = (entries if set(names) - {CONSTANT} else counts for names in self.names)
        return self.with_arrays(f(array) for f, array in zip(functions, self, strict=True))


jax.tree_util.register_pytree_with_keys(
    WeightState,
    lambda state: ([(jax.tree_util.SequenceKey(i), a) for i, a in enumerate(state)], state.names),
    lambda names, arrays: WeightState(arrays, names),
)


@functools.cache
def axis_names(training: TrainingConfig, shape: tuple[int, ...]) -> Names:
    """Returns the names of the axes of each state array of one matrix or vector of this shape.

    The optimizer is asked for the states of weights of slightly other sizes: an axis that changes
    as one of the weight's does is that axis.  Whether an optimizer factors a matrix may depend on
    its sizes, and on which is larger, so weights that have states of other forms do not count.

    Args:
      training: names the optimizer.
      shape: of the weight; at most two axes.
    """
    readings = _readings(training, shape)
    if len(readings) == 1:
        return readings[0]
    # A square, whose larger side the optimizer chooses: only an update tells which one.
    if max(shape) > _SMALL and _readings(training, (_SMALL, _SMALL)) == readings:
        shape = (_SMALL, _SMALL)
    with jax.ensure_compile_time_eval():
        state = _state_of_equal_columns(training, shape)
    return next((names for names in readings if _agrees(names, state)), readings[0])


def _readings(training, shape):
    """Returns all names of the axes that explain the states of weights of other sizes."""
    before = _shapes(training, shape)
    # All sizes grow, or all shrink, where the optimizer lets them: a product changes then as well.
    steps = list(itertools.permutations((1, 2), len(shape)))
    steps += [tuple(-step for step in other) for other in steps]
    readings = _same_form(training, shape, before, steps)
    if not readings:
        crossed = itertools.permutations((1, -1, 2, -2), len(shape))
        readings = _same_form(training, shape, before, (s for s in crossed if sum(s)))
    complete = [names for names in readings if UNKNOWN not in itertools.chain(*names)]
    nameless = tuple((UNKNOWN,) * len(array) for array in before)
    return list(dict.fromkeys(complete or readings)) or [nameless]


def _same_form(training, shape, before, steps):
    """Returns the names for each change of a weight's sizes that no threshold is in the way of."""
    readings = []
    for step in steps:
        sizes = tuple(map(sum, zip(shape, step)))
        after = _shapes(training, sizes) if min(sizes, default=1) > 0 else []
        if list(map(len, after)) != list(map(len, before)):
            continue
        # Sizes that change as the weight's row or column did have its name.
        moves = dict(zip(zip(shape, sizes), WEIGHT_AXES[len(shape)]))
        readings.append(
            tuple(
                tuple(CONSTANT if a == b else moves.get((a, b), UNKNOWN) for a, b in zip(*arrays))
                for arrays in zip(before, after)
            )
        )
    return readings


def _shapes(training, shape):
    return [leaf.shape for leaf in jax.tree.leaves(factories.state_shapes(training, shape))]


def _state_of_equal_columns(training, shape):
    """Returns the state arrays, in numpy, after a gradient whose columns are equal."""
    # Rows differ and columns do not, so state that is by column is constant.
    gradient = jnp.broadcast_to(1.0 + jnp.arange(shape[0])[:, None], shape)
    optimizer = factories.transformation(training, 1e-3, 0.0)
    _, state = optimizer.update(gradient, optimizer.init(gradient), gradient)
    return list(map(np.asarray, jax.tree.leaves(state)))


def _agrees(names, state):
    """Returns whether arrays are constant along each axis that is named a column."""
    return all(
        np.allclose(array, array.take([0], axis), rtol=1e-3, atol=0)
        for array, array_names in zip(state, names, strict=True)
        for axis, name in enumerate(array_names)
        if name == "column"
    )


def partial_axes(training: TrainingConfig, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """Returns the axes of a state array that has some of a weight's axes, but not its entries.

    None if each array has a number for each entry, or says something of the whole weight.
    """
    whole = WEIGHT_AXES[len(shape)]
    others = (n for n in axis_names(training, shape) if n != whole and set(n) - {CONSTANT})
    return next(others, None)


def names_by_size(shape: tuple[int, ...], weight: tuple[int, ...]) -> tuple[str, ...]:
    """Returns the names of the axes of an array that came without, if the sizes leave one reading.

    Raises:
      ValueError: there are several.
    """
    axes = WEIGHT_AXES[len(weight)]
    equal = [[name for name, n in zip(axes, weight) if n == size] or [CONSTANT] for size in shape]

    def in_order(names):
        places = [axes.index(name) for name in names if name != CONSTANT]
        return places == sorted(set(places))

    readings = list(filter(in_order, itertools.product(*equal)))
    if len(readings) != 1:
        raise ValueError(f"name the axes of the state {shape} of a weight {weight}: a WeightState")
    return readings[0]
