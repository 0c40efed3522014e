"""Layouts of a model as arrays, which a checkpoint holds beside the state."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_dataflow.core.config import arguments
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.axis_names import placed
from sparse_dataflow.layers.paths import dotted
from sparse_dataflow.layers.replace import block_sparse_layers


@arguments.checked
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


@arguments.checked
def set_layouts(model: nnx.Module, layouts: Mapping[str, Any]) -> None:
    """Gives the layers of a model the layouts of `sd.layouts`, so that a state of them fits.

    A layer whose layout differs gets values of zero, until the state is restored into the model.
    Make the optimizer after this call.

    Args:
      model: an nnx model with block-sparse linears, changed in place.
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
    for path, each in new.items():
        layer = layers[path]
        if each == layer.layouts():
            continue
        values, (nnz,) = layer.values[...], {layout.nnz for layout in each}
        shape = *values.shape[:-3], nnz, *values.shape[-2:]
        if isinstance(values, jax.ShapeDtypeStruct):
            layer.values.set_value(jax.ShapeDtypeStruct(shape, values.dtype))
        else:
            layer.values.set_value(placed(jnp.zeros(shape, values.dtype), values))
        layer.set_layouts(each, layer.evolving)


def _read(path, layer, masks):
    """Returns the layouts of masks, checked against a layer."""
    before = layer.layouts()
    grid = before[0].mask.shape
    if masks.ndim != 3 or masks.shape[1:] != grid or len(masks) not in (1, len(before)):
        raise UserError(
            f"{path}: the layouts have shape {masks.shape}; legal: {(len(before), *grid)}."
        )
    read = [BlockLayout.from_mask(mask.astype(bool), before[0].block) for mask in masks]
    if len({layout.nnz for layout in read}) > 1:
        raise UserError(f"{path}: the layers of a stack would store unequal blocks.")
    return read * (len(before) // len(read))
