"""Replaces the linears of any nnx model by block-sparse ones, and back; where arrays of it lie."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sparse_dataflow.core.layouts.evolution import largest_blocks
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.layouts.patterns import PATTERNS, make_layout
from sparse_dataflow.core.model.blocks import grid_norms
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.axis_names import folded, over_auto_axes, unfolded
from sparse_dataflow.layers.block_arrays import cut_blocks, join_blocks, summed
from sparse_dataflow.layers.block_sparse_linear import BlockSparseLinear, filled_up
from sparse_dataflow.layers.dense_parameters import say_replaced
from sparse_dataflow.layers.general import (
    BlockSparseEinsum,
    BlockSparseGeneral,
    Contraction,
    module_like,
)
from sparse_dataflow.layers.paths import dotted, names_of, without_values
from sparse_dataflow.layers.registered import (
    BlockSparseRegistered,
    is_linear,
    is_registered,
    read_linear,
)
from sparse_dataflow.layers.replaceable import (
    Model,
    check_replaceable,
    mapped,
    none_selected,
    readers_of,
)

Where = Callable[[str, Any], bool]
"""(path such as "layers.0.mlp", module) -> whether it is selected."""

MAGNITUDE = "magnitude"
"""The pattern of the largest blocks of the weights."""


def sparsify(
    model: Model,
    pattern: str = "random",
    *,
    density: float | Mapping[str, float] = 0.125,
    block: int = 64,
    where: Where | None = None,
    evolving: bool = False,
) -> Model:
    """Returns the model with its `nnx.Linear`s replaced by `sd.BlockSparseLinear`s.

    The model itself does not change, and shares no array with the result.  An abstract model of
    `nnx.eval_shape` gives an abstract one.  Types, metadata and
    settings of the linears are kept.  `nnx.LinearGeneral`, as in `nnx.MultiHeadAttention`, an
    `nnx.Einsum` that is a product with one matrix, and classes of `sd.register_linear` are replaced
    too, and keep their axes.  A linear whose kernel has leading axes, as `nnx.vmap` makes for a
    scan over layers, becomes a stack of layers with one layout, or with one layout each if
    `evolving`.  Mesh axes of a kernel become those of its stored blocks.

    A line of the log names what became sparse and what stayed dense.

    Args:
      model: any nnx model.
      pattern: "magnitude" keeps the largest blocks of trained weights, with equal fan-in and
        fan-out.  Any pattern of `sd.make_layout` is for weights to be trained from scratch: they
        are scaled by 1 / sqrt(density), which keeps the variance of the outputs.
      density: fraction of the blocks stored, of all layers or by path; with 1 the model computes
        the same function.
      block: side of a square block, in features.
      where: (path, linear) -> whether to replace it; None for every linear.
      evolving: whether `sd.evolve` may change the layouts without recompiling.

    Raises:
      UserError: no linear is selected, or one of them has no such layout or cannot be replaced;
        names the legal values.

    Examples:
        >>> model = nnx.Sequential(nnx.Linear(64, 128, rngs=nnx.Rngs(0)),
        ...                        nnx.Linear(128, 10, rngs=nnx.Rngs(1)))
        >>> sparse = sd.sparsify(model, density=0.25, block=16,
        ...                      where=lambda path, linear: linear.out_features > 10)
        >>> [type(layer).__name__ for layer in sparse.layers]
        ['BlockSparseLinear', 'Linear']
    """
    if pattern not in (MAGNITUDE, *PATTERNS):
        raise UserError(
            f"Pattern {pattern!r} is unknown; legal: {', '.join([MAGNITUDE, *sorted(PATTERNS)])}."
        )
    if _is_abstract(model):
        options: Any = dict(density=density, block=block, where=where, evolving=evolving)
        return nnx.eval_shape(lambda model: sparsify(model, pattern, **options), model)
    names: list[str] = []
    selected: list[str] = []
    # The number of a layer is the offset of its pattern, so that neighbours mix other features.
    # It goes on where an earlier call ended.
    first = sum(isinstance(node, BlockSparseLinear) for _, node in nnx.iter_modules(model))
    readers = readers_of(model)

    def replace(path, node):
        if not is_linear(node):
            return node
        names.append(dotted(path))
        if where is not None and not where(names[-1], node):
            return node
        selected.append(names[-1])
        try:
            check_replaceable(node, readers)
            number = first + len(selected) - 1
            settings = pattern, _density_of(density, names[-1]), block, evolving, number
            return with_matrix(node, lambda linear: _sparse(linear, *settings))
        except UserError as error:
            raise UserError(f"{names[-1]}: {error} Or leave it out with `where`.") from None

    sparse = mapped(replace, model)
    if not selected:
        raise none_selected(model, names)
    say_replaced(sparse, selected)
    return sparse


def densify(model: Model) -> Model:
    """Returns the model with its block-sparse linears replaced by the dense ones of flax.

    It computes the same function: blocks that are not stored are zeros of the kernel.

    Args:
      model: any nnx model; it stays as it is.

    Raises:
      UserError: the model has no block-sparse linear.

    Examples:
        >>> layer = sd.BlockSparseLinear(64, 128, density=0.25, block=16, rngs=nnx.Rngs(0))
        >>> sd.densify(layer).kernel.shape
        (64, 128)
    """
    block_sparse_layers(model, None)
    if _is_abstract(model):
        return nnx.eval_shape(densify, model)

    def replace(path, node):  # A node follows its children.
        return _dense(node) if isinstance(node, BlockSparseLinear) else with_dense_matrix(node)

    return mapped(replace, model)


def partition_specs(model: nnx.Module, mesh: Mesh, axis: str) -> nnx.State:
    """Returns how the state of a model is sharded over a mesh: a `PartitionSpec` for each array.

    Stored blocks are sharded over `axis` by block, and other parameters along the first of their
    axes that the mesh axis divides.  Arrays that it does not divide, and everything except
    parameters, are replicated.

    Args:
      model: any nnx model, also an abstract one of `nnx.eval_shape`.
      mesh: the devices.
      axis: name of a mesh axis.

    Returns:
      The tree of `nnx.state(model)` with a spec at each leaf.  Give it to `jax.device_put`, or to
      `jit`, over a mesh whose axes are `Auto`, as those of `jax.sharding.Mesh` are.

    Raises:
      UserError: the mesh has no such axis.

    Examples:
        >>> layer = sd.BlockSparseLinear(64, 128, density=0.25, block=16, rngs=nnx.Rngs(0))
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("fsdp",))
        >>> specs = sd.partition_specs(layer, mesh, "fsdp")
        >>> place = lambda spec, array: jax.device_put(array, jax.NamedSharding(mesh, spec))
        >>> nnx.update(layer, jax.tree.map(place, specs, nnx.state(layer)))
        >>> layer.values.sharding.spec[0]
        'fsdp'
    """
    if not isinstance(mesh.shape, Mapping):
        raise UserError(f"mesh has the shape {mesh.shape}; legal: a jax.sharding.Mesh.")
    if axis not in mesh.shape:
        raise UserError(f"The mesh has no axis {axis!r}; legal: {', '.join(mesh.shape)}.")
    size = mesh.shape[axis]

    # The first axis that divides.  Of stored blocks that is never a side of a block: the search
    # begins at the axis of blocks, and all devices keep whole blocks.
    def spec(first, shape):
        for position in range(first, len(shape)):
            if shape[position] % size == 0:
                return P(*(None,) * position, axis)
        return P()

    params, others = nnx.split_state(nnx.state(model), nnx.Param, ...)
    stacks = {
        dotted((*path, "values")): layer.values.ndim - 3
        for path, layer in nnx.iter_modules(model)
        if isinstance(layer, BlockSparseLinear)
    }

    def param_spec(path, leaf):
        return spec(stacks.get(dotted(names_of(path)), 0), leaf.shape)

    return nnx.merge_state(
        jax.tree_util.tree_map_with_path(param_spec, params), jax.tree.map(lambda _: P(), others)
    )


def block_sparse_layers(model: nnx.Module, where: Where | None) -> dict[tuple, BlockSparseLinear]:
    """Returns path -> layer of the selected block-sparse linears of a model.

    Raises:
      UserError: none is selected.
    """
    layers = {
        path: layer
        for path, layer in nnx.iter_modules(model)
        if isinstance(layer, BlockSparseLinear)
    }
    selected = {p: layer for p, layer in layers.items() if not where or where(dotted(p), layer)}
    if not selected:
        raise UserError(
            f"`where` selects no sd.BlockSparseLinear; legal: {', '.join(map(dotted, layers))}."
            if layers
            else "The model has no sd.BlockSparseLinear; `sd.sparsify` makes them."
        )
    return selected


def with_matrix(node: Any, change: Callable[[nnx.Linear], nnx.Module]) -> nnx.Module:
    """Returns a linear of any class with a changed matrix.

    Args:
      node: a linear; see `is_linear`.
      change: (its matrix as an nnx.Linear) -> the module in its place.
    """
    if is_registered(node):
        contraction, linear, attributes = read_linear(node)
        return BlockSparseRegistered(change(linear), contraction, node, attributes)
    if isinstance(node, nnx.Linear):
        return change(node)
    contraction = Contraction.of(node)
    kind = BlockSparseEinsum if isinstance(node, nnx.Einsum) else BlockSparseGeneral
    return kind(change(contraction.linear(node)), contraction, node)


def kernel_of(node: Any, matrix: object) -> Any:
    """Returns an array of the matrix of a linear of any class in the axes of its kernel."""
    if isinstance(node, nnx.Linear):
        return matrix
    is_known = not is_registered(node)
    return (Contraction.of(node) if is_known else read_linear(node)[0]).to_kernel(matrix)


def with_dense_matrix(node: nnx.Module) -> nnx.Module:
    """Returns the module of its own class whose matrix is an nnx.Linear; others as they are."""
    if isinstance(node, BlockSparseRegistered):
        return node.dense()
    if isinstance(node, BlockSparseGeneral):
        return node.contraction.module(node.linear)
    return node


def balanced_degree(sides: tuple[int, int], block: int, density: float) -> int:
    """Returns the degree of a balanced layout (see `patterns`); UserError names legal values."""
    layout = make_layout("cyclic", *sides, block, density)
    return int(layout.fan_in[0]) * math.gcd(*layout.mask.shape) // layout.in_blocks


def _is_abstract(model):
    """Returns whether a model has shapes in place of arrays, as of `nnx.eval_shape`."""
    leaves = jax.tree.leaves(nnx.state(model))
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def _density_of(density, path):
    """Returns the density of a layer."""
    if not isinstance(density, Mapping):
        return density
    if path not in density:
        raise UserError(f"`density` has no value for it; it has: {', '.join(sorted(density))}.")
    return density[path]


def _sparse(linear, pattern, density, block, evolving, number):
    """Returns the block-sparse layer of an nnx.Linear, the `number`-th of its model."""
    kernel = over_auto_axes(linear.kernel[...])
    sides = linear.in_features, linear.out_features
    full = filled_up(sides, block, density)
    dense = kernel.reshape(-1, *sides)
    if pattern == MAGNITUDE:
        if without_values(kernel):
            raise UserError(
                "'magnitude' reads weights, which have no values in an abstract model or inside "
                f"`jit`; legal there: {', '.join(sorted(PATTERNS))}."
            )
        degree = balanced_degree(full, block, density)
        missing = [(0, most - side) for side, most in zip(sides, full)]
        norms = np.asarray(grid_norms(jnp.pad(dense, [(0, 0), *missing]), block))
        # A static stack has one layout, which all its layers choose together.
        norms = norms if evolving else summed(norms)
        layouts = [largest_blocks(layer, block, degree) for layer in norms]
        scale = 1.0
    else:
        layout = make_layout(pattern, *full, block, density, number)
        # A pattern drops blocks as large as those that stay: the scale restores the variance.
        layouts, scale = [layout], 1 / math.sqrt(layout.density)
    return block_sparse(linear, layouts, dense, scale, evolving)


def block_sparse(
    linear: nnx.Linear,
    layouts: list[BlockLayout],
    dense: jax.Array,
    scale: float = 1.0,
    evolving: bool = False,
) -> BlockSparseLinear:
    """Returns the block-sparse layer of an nnx.Linear.

    Args:
      linear: gives sides, settings, mesh axes and bias.
      layouts: one for all layers of a stack, or one each.
      dense: [layers, in, out], the kernels.
      scale: multiplies the kernels.
      evolving: whether `sd.evolve` may change the layouts.
    """
    kernel, sides = over_auto_axes(linear.kernel[...]), (linear.in_features, linear.out_features)
    stack = kernel.shape[:-2]
    values = cut_blocks(dense, layouts) * scale
    layer = module_like(BlockSparseLinear, *sides, like=linear, layout=layouts[0])
    values = values.astype(kernel.dtype).reshape(*stack, *values.shape[1:])
    lead = len(stack)
    axes = [*[(axis,) for axis in range(lead)], (lead, lead + 1), (), ()]
    layer.values = folded(linear.kernel, values, axes)
    layer.bias, layer.use_bias = linear.bias, linear.use_bias
    layer.set_layouts(layouts, evolving)
    return layer


def _dense(layer):
    """Returns the nnx.Linear of a block-sparse layer."""
    values, layouts = over_auto_axes(layer.values[...]), layer.layouts()
    stack, stored = values.shape[:-3], values.reshape(-1, *values.shape[-3:])
    kernel = join_blocks(stored, layouts, (layer.in_features, layer.out_features))
    linear = module_like(nnx.Linear, layer.in_features, layer.out_features, like=layer)
    linear.kernel = unfolded(layer.values, kernel.reshape(*stack, *kernel.shape[1:]))
    linear.bias, linear.use_bias = layer.bias, layer.use_bias
    return linear
