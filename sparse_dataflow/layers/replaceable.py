"""Which modules of a model can be replaced, and the model with others in their place."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.dense_parameters import dense_classes
from sparse_dataflow.layers.general import shapes_of
from sparse_dataflow.layers.paths import dotted
from sparse_dataflow.layers.registered import FLAX_LINEARS, is_registered, registration

Model = TypeVar("Model", bound=nnx.Module)

_READ_A_CHILD = (nnx.WeightNorm, nnx.SpectralNorm)
"""Modules that read the kernels of a child in its state, where stored blocks are no kernel."""

_KINDS = "nnx.Linear, nnx.LinearGeneral, nnx.Einsum and classes of sd.register_linear"


def mapped(replace: Callable[[tuple, Any], object], model: Model) -> Model:
    """Returns a model whose modules are replaced, which shares no array with the old one.

    So training it, and donating its buffers, leaves `model` as it is.  Containers that cannot
    change, such as tuples, are made anew.

    Args:
      replace: (path, module) -> the module in its place; children come before parents.
      model: any nnx model.

    Raises:
      UserError: a replaced module is in a tuple and at another place too.
    """
    kinds = nnx.Pytree | nnx.Variable | list | dict
    fixed = {path for path, node in nnx.iter_graph(model) if not isinstance(node, kinds)}
    waiting: dict[
        int, tuple[object, object]
    ] = {}  # Id of a member of a tuple -> it, its replacement.

    def visit(path, node):
        new = replace(path, node) if isinstance(node, nnx.Module) else node
        if path in fixed:
            is_child = lambda child: child is not node  # noqa: E731
            if any(id(child) in waiting for child in jax.tree.leaves(node, is_leaf=is_child)):
                member = lambda child: waiting.get(id(child), (child, child))[1]  # noqa: E731
                new = jax.tree.map(member, node, is_leaf=is_child)
        if path and path[:-1] in fixed and new is not node:
            waiting[id(node)] = node, new
            return node
        return new

    new = nnx.recursive_map(visit, model)
    replaced = {id(node) for node, _ in waiting.values()}
    if both := [dotted(path) for path, node in nnx.iter_modules(new) if id(node) in replaced]:
        raise UserError(f"{both[0]} is in a tuple and at another place too; legal: lists.")
    return _unshared(new, model)


def _unshared(new, model):
    """Returns a model with copies of the arrays of `model` that it has."""
    old = {id(leaf) for leaf in jax.tree.leaves(nnx.state(model))}

    def copy(leaf):
        return jnp.copy(leaf) if id(leaf) in old and isinstance(leaf, jax.Array) else leaf

    graph, state = nnx.split(new)
    return nnx.merge(graph, jax.tree.map(copy, state))


def readers_of(model: nnx.Module) -> dict[int, list[str]]:
    """Returns id of a variable -> words for the modules that have it or read it from a child."""
    readers: dict[int, list[str]] = {}
    for path, module in nnx.iter_modules(model):
        for value in vars(module).values():
            if isinstance(value, nnx.Variable):
                readers.setdefault(id(value), []).append(dotted(path))
        if isinstance(module, _READ_A_CHILD):
            words = f"{dotted(path) or 'the model'} ({type(module).__name__}, which reads it)"
            for _, variable in nnx.to_flat_state(nnx.state(module.layer_instance)):
                if variable.ndim > 1:
                    readers.setdefault(id(variable), []).append(words)
    return readers


def check_replaceable(node: Any, readers: Mapping[int, list[str]]) -> None:
    """Raises UserError if a linear has something that its block-sparse layer would not have."""
    if not is_registered(node):
        if type(node) not in FLAX_LINEARS:
            raise UserError(
                f"{type(node).__name__} is a class of its own; legal: {_KINDS}, by "
                f"{registration(type(node))}."
            )
        sizes: Any = ("ab,bc->ac", (1, 1)) if type(node) is nnx.Einsum else (1, 1)
        # Which attributes a linear has depends on the version of flax, so a new one says it.
        plain = nnx.eval_shape(lambda: type(node)(*sizes, rngs=nnx.Rngs(0)))
        if own := sorted(set(vars(node)) - set(vars(plain))):
            raise UserError(f"It has attributes of its own: {', '.join(own)}; legal: none.")
        _check_stack(node)
    for name, value in vars(node).items():
        others = readers.get(id(value), [])
        if len(others) > 1:
            raise UserError(
                f"Its {name} is a parameter of {' and '.join(sorted(others))} too; legal: of it "
                "alone."
            )


def _check_stack(node):
    """Raises UserError if the axes of a linear of flax are not [*stack, inputs, outputs]."""
    kernel, new = shapes_of(node)
    shape = tuple(node.kernel.shape)
    stack = shape[: len(shape) - len(kernel)]
    bias = None if node.bias is None else tuple(node.bias.shape)
    if shape != (*stack, *kernel) or bias not in (None, (*stack, *new)):
        raise UserError(
            f"Its kernel has shape {shape}{f' and its bias {bias}' if bias else ''}, and one layer "
            f"of it has {kernel}{f' and {new}' if bias else ''}; legal: layers that are stacked "
            "along the first axis of each."
        )


def none_selected(model: nnx.Module, names: list[str]) -> UserError:
    """Returns the error of a `where` that selects none of a model's linears."""
    if names:
        words = f"`where` selects no linear of the model; legal: {', '.join(names)}."
    else:
        words = f"The model has no linear; legal: {_KINDS}."
    if classes := dense_classes(model):
        kind, path = classes[0]
        words += f" {path} is a {kind.__name__}; if that is a linear: {registration(kind)}."
    return UserError(words)
