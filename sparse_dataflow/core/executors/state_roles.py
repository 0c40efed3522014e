"""The role of each array of a training state: of which parameter it is, and along which axes.

Executors place, pad and reorder the arrays by their roles, and so by names.
"""

import dataclasses
import functools
from typing import Any

import jax

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.optim.matrix_leaves import weight_axes
from sparse_dataflow.core.optim.weight_state import UNKNOWN, WEIGHT_AXES, WeightState, names_by_size
from sparse_dataflow.files.errors import UserError


@dataclasses.dataclass(frozen=True)
class Role:
    """What an array of a training state is.

    Attributes:
      parameter: dotted path of the parameter that it is, or whose state it is, such as
        "blocks.1.qkv.values" in a layer group; empty for none.
      axes: for each axis of the array, which axis of the parameter it is; None for none.
      is_named: whether every axis is the parameter's, or does not depend on its shape.
    """

    parameter: str
    axes: tuple[int | None, ...]
    is_named: bool = True

    def axis(self, dim: int) -> int | None:
        """Returns the axis of the array that is an axis of the parameter; None if it has none.

        Raises:
          UserError: an axis of the array is not known, and may be this one.
        """
        if dim not in self.axes and not self.is_named:
            raise UserError(
                f"training.optimizer keeps an array of {self.parameter} whose axes are not the "
                "weight's, and this mesh reorders or pads the weight; legal: another "
                "training.optimizer, or a mesh without the axes tensor and feature."
            )
        return self.axes.index(dim) if dim in self.axes else None


def roles(model: ModelConfig, state: object) -> Any:
    """Returns a tree like the state with the `Role` of each array.

    Args:
      state: a training state without layouts; its leaves have shapes.
    """
    shapes = parameter_shapes(state)

    def role_of(path, node):
        if isinstance(node, WeightState):
            arrays = zip(node, node.names, strict=True)
            return node.with_arrays(_role(model, path, len(a.shape), names) for a, names in arrays)
        name = parameter_name(path)
        if hasattr(path[-1], "idx") and name:  # An array of a state that was made without names.
            weight = weight_axes(model, path[:-1])
            stack = len(shapes[name]) - weight
            names = names_by_size(node.shape[stack:], shapes[name][stack:])
            return _role(model, path[:-1], len(node.shape), names)
        return Role(name, tuple(range(len(node.shape))) if name else (None,) * len(node.shape))

    is_leaf = lambda node: isinstance(node, WeightState)  # noqa: E731
    return jax.tree_util.tree_map_with_path(role_of, state, is_leaf=is_leaf)


def _role(model, path, axes, names):
    """Returns the role of a state array whose last axes have names."""
    # The first axes are the stack of layers, experts or blocks, as in the parameter.
    stack = axes - len(names)
    named = {name: stack + i for i, name in enumerate(WEIGHT_AXES[weight_axes(model, path)])}
    weight_dims = (named.get(name) for name in names)
    return Role(parameter_name(path), (*range(stack), *weight_dims), UNKNOWN not in names)


def parameter_shapes(state: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each trained parameter of a state, by its dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    return {dotted_path(path): leaf.shape for path, leaf in leaves}


def parameter_name(path: tuple) -> str:
    """Returns the dotted path of the parameter of a leaf of a state; empty for none.

    The last key of an array in a weight's own state is its number (see `optim.by_weight`).
    """
    keys = dotted_path(path).split(".")
    start = next((i for i, key in enumerate(keys) if key in ("embed", "blocks", "head")), 0)
    named = keys[start:-1] if hasattr(path[-1], "idx") else keys[start:]
    return ".".join(named) if start else ""


@functools.cache
def dotted_path(path: tuple) -> str:
    """Returns a path of `jax.tree_util` as "blocks.qkv.values"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
