"""Layouts of a model as arrays, which a checkpoint holds beside the state."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.axis_names import placed
from sparse_dataflow.layers.paths import dotted
from sparse_dataflow.layers.replace import block_sparse_layers


def layouts(model: nnx.Module) -> dict[str, np.ndarray]:
    """Returns which blocks the layers of a model store, to save beside its state.

    Args:
      model: an nnx model with block-sparse linears.

    Returns:
      Path of a layer -> bool [layouts, in_blocks, out_blocks]: one layout, or one for each layer of
      a stack that evolves.

    Raises:
      UserError: the model has no block-sparse linear, or one has the state of another layout.

    Examples:
        >>> layer = sd.BlockSparseLinear(64, 128, density=0.25, block=16, rngs=nnx.Rngs(0))
        >>> {path: mask.shape for path, mask in sd.layouts(nnx.Sequential(layer)).items()}
        {'layers.0': (1, 4, 8)}
    """
    return {
        dotted(path): np.stack([layout.mask for layout in layer.layouts()])
        for path, layer in block_sparse_layers(model, None).items()
    }


def set_layouts(model: nnx.Module, layouts: Mapping[str, object]) -> None:
    """Gives the layers of a model the layouts of `sd.layouts`, so that a state of them fits.

    A layer whose layout differs gets values of zero, until the state is restored into the model.
    Make the optimizer after this call.

    Args:
      model: an nnx model with block-sparse linears, changed in place; also an abstract one of
        `nnx.eval_shape`, into which the state is then restored.
      layouts: path of a layer -> bool [layouts, in_blocks, out_blocks].

    Raises:
      UserError: a path or a grid of blocks is not that of the model; nothing is changed.

    Examples:
        >>> make = lambda: nnx.Sequential(
        ...     sd.BlockSparseLinear(64, 64, density=0.5, block=16, rngs=nnx.Rngs(0)))
        >>> model, fresh = make(), make()
        >>> sd.evolve(model, None, "set", share=0.25)
        >>> saved = {"layouts": sd.layouts(model), "state": nnx.state(model)}
        >>> sd.set_layouts(fresh, saved["layouts"])
        >>> nnx.update(fresh, saved["state"])
        >>> bool(jnp.all(fresh(jnp.ones((2, 64))) == model(jnp.ones((2, 64)))))
        True
    """
    layers = {dotted(path): layer for path, layer in block_sparse_layers(model, None).items()}
    if set(layers) != set(layouts):
        raise UserError(
            f"The layouts are of {', '.join(sorted(layouts))}; legal: {', '.join(sorted(layers))}."
        )
    new = {path: _read(path, layers[path], np.asarray(masks)) for path, masks in layouts.items()}
    changes = [_prepared(layers[path], each) for path, each in new.items()]
    for apply in changes:
        apply()


def _prepared(layer, layouts):
    """Returns the function that gives a layer layouts, and values of zero if they differ."""
    values, (nnz,) = layer.values.get_value(), {layout.nnz for layout in layouts}
    abstract = isinstance(values, jax.ShapeDtypeStruct)
    # The tables of an abstract evolving layer have no values to compare.
    if (layer.static_layout or not abstract) and layouts == layer.layouts():
        return lambda: None
    shape = *values.shape[:-3], nnz, *values.shape[-2:]
    zeros = (jax.ShapeDtypeStruct if abstract else jnp.zeros)(shape, values.dtype)
    return layer.prepare_layouts(layouts, layer.evolving, placed(zeros, values))


def _read(path, layer, masks):
    """Returns the layouts of masks, checked against a layer."""
    layer.check_layout()
    *stack, _, _, block = layer.values.shape
    count, grid = math.prod(stack) if layer.evolving else 1, tuple(layer.stored_layout.grid[-2:])
    if masks.ndim != 3 or masks.shape[1:] != grid or len(masks) not in (1, count):
        raise UserError(f"{path}: the layouts have shape {masks.shape}; legal: {(count, *grid)}.")
    read = [BlockLayout.from_mask(mask.astype(bool), block) for mask in masks]
    if len({layout.nnz for layout in read}) > 1:
        raise UserError(f"{path}: the layers of a stack would store unequal blocks.")
    return read * (count // len(read))
