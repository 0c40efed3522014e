"""Changes the stored blocks of any nnx model while it trains, with its optimizer state."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_dataflow.core.config.sparsity import EXCHANGED_BLOCKS
from sparse_dataflow.core.layouts.evolution import METHODS, block_sources, largest_blocks
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.model.blocks import stored_norms
from sparse_dataflow.core.weights.gradient_norms import zeros_of_norms
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.block_arrays import exchanger, moved, summed
from sparse_dataflow.layers.block_sparse_linear import BlockSparseLinear, DenseGradient
from sparse_dataflow.layers.layout_state import MARK, layout_name
from sparse_dataflow.layers.optimizer_states import CarriedState
from sparse_dataflow.layers.paths import dotted, without_values
from sparse_dataflow.layers.replace import Where, balanced_degree, block_sparse_layers

GRADUAL, STATIC = "gradual", "static"


class Change(NamedTuple):
    """New layouts of a layer.

    Attributes:
      path: the path of the layer in its model.
      layouts: its new layouts.
      sources: int32 [layers, new nnz], the slot of each new block in the old values; -1 if new.
    """

    path: tuple
    layer: BlockSparseLinear
    layouts: list[BlockLayout]
    sources: np.ndarray


def evolve(
    model: nnx.Module,
    optimizer: object = None,
    method: str = "set",
    *,
    share: float = EXCHANGED_BLOCKS,
    density: float = 0.0,
    loss: Callable | None = None,
    batch: Sequence[object] = (),
    seed: int = 0,
    where: Where | None = None,
) -> Any:
    """Changes the stored blocks of a model in place, and returns its optimizer's state.

    A block that stays keeps its weights and moments bit by bit; a new block starts at zero.  Layers
    that are `evolving` change without recompiling, and handles that share their variables, as of
    `nnx.view`, see the change.  Others are compiled again, and their older handles raise an error.

    - "set" replaces the smallest blocks by random ones (arXiv 1707.04780).
    - "rigl" replaces small blocks by absent ones of large gradient (arXiv 1911.11134); it needs
      `loss`.
    - "gradual" keeps the largest blocks at a lower `density`.  A schedule from dense begins with
      `sd.sparsify(model, density=1)`.
    - "static" changes no block: it makes evolving layouts static, so programs are specialised to
      them.

    The fan-in of every output block stays constant under "set" and "rigl".

    Args:
      model: an nnx model with block-sparse linears.
      optimizer: `nnx.Optimizer`, which is changed in place too, or the optax state of
        `nnx.state(model, nnx.Param)`; a list or dict of several; None if there is none.
      method: "set", "rigl", "gradual", "static" or a registered method that exchanges blocks.
      share: fraction of the stored blocks of a layer to exchange, at least one of them.
      density: fraction of the blocks that "gradual" leaves stored.
      loss: (model, *batch) -> scalar.  "rigl" runs its gradient once, and compiles it once for each
        function, so give the same function every time.
      batch: arguments of `loss` after the model.
      seed: seed of random choices; give another one at every update, such as the step.
      where: (path, layer) -> whether to change it; None for every block-sparse linear.

    Returns:
      The `optimizer`, with moments of the new blocks.

    Raises:
      UserError: the method, its arguments or the state do not fit the model; nothing is changed.

    Examples:
        >>> model = sd.BlockSparseLinear(64, 64, density=0.5, block=16, evolving=True,
        ...                              rngs=nnx.Rngs(0))
        >>> tx = optax.adam(1e-3)
        >>> state = tx.init(nnx.state(model, nnx.Param))
        >>> before = model.layout
        >>> state = sd.evolve(model, state, "set", share=0.25, seed=1)
        >>> model.layout == before, model.layout.density
        (False, 0.5)
    """
    if seed < 0:
        raise UserError(f"seed={seed} is not legal: it must be 0 or more.")
    layers = block_sparse_layers(model, where)
    choose = _chooser(method, model, layers, share, density, loss, batch, seed)
    changes = {path: _change(path, layer, choose) for path, layer in layers.items()}
    for path, change in changes.items():
        if method == STATIC and len(set(change.layouts)) > 1:
            raise UserError(
                f"{dotted(path)}: the layers of the stack have different layouts; legal for "
                "'static': one layout for all."
            )
    names = {
        path: (MARK if layer.evolving else layout_name(layer.layout), layout_name(layouts[0]))
        for path, (_, layer, layouts, _) in changes.items()
        if method == STATIC or not layer.evolving
    }
    state = CarriedState(model, optimizer, changes, names)
    # All changes are computed before the first is applied: an error leaves the model as it was.
    prepared = [_prepared(change, method) for change in changes.values()]
    for apply in prepared:
        apply()
    return state.apply()


def _chooser(method, model, layers, share, density, loss, batch, seed):
    """Returns (path, index in the stack, layout, norms [nnz]) -> new layout."""
    exchanging = [name for name, each in METHODS.items() if each.update is not None]
    if method not in (GRADUAL, STATIC, *exchanging):
        legal = ", ".join(sorted([GRADUAL, STATIC, *exchanging]))
        raise UserError(f"Method {method!r} is unknown; legal: {legal}.")
    if method == STATIC:
        return lambda path, index, layout, norms: layout
    if method == GRADUAL:
        return functools.partial(_largest, layers, density)
    exchange, gradients = exchanger(method, share), None
    if METHODS[method].reads_gradients:
        if loss is None:
            raise UserError(
                f"Method {method!r} reads gradients; give `loss`, a function of the model and of "
                "`batch` that returns a scalar."
            )
        gradients = gradient_norms(model, layers, loss, tuple(batch))
    numbers = {path: number for number, path in enumerate(layers)}

    def exchanged(path, index, layout, norms):
        growth = None if gradients is None else gradients[path][index]
        # A stream for each layer: a choice does not depend on the order of the layers.
        rng = np.random.default_rng([seed, numbers[path], index])
        return exchange(layout, norms, growth, rng)

    return exchanged


def _largest(layers, density, path, index, layout, norms):
    """Returns the layout of the largest blocks at a lower density."""
    if density >= layout.density:
        return layout
    try:
        sides = layout.in_features, layout.out_features
        degree = balanced_degree(sides, layout.block, density)
        grid = np.zeros(layout.mask.shape)
        grid[layout.rows, layout.cols] = norms
        return largest_blocks(grid, layout.block, degree, layout.mask)
    except UserError as error:
        raise UserError(f"{dotted(path)}: {error}") from None


def _change(path, layer, choose):
    """Returns the change of a layer; layouts that a stack shares are chosen by its summed norms."""
    values = layer.values.get_value()
    if without_values(values):
        raise UserError(
            f"{dotted(path)}: a layout is chosen by values, and there are none in an abstract "
            "model or inside `jit`; legal: a model with values, outside of `jit`."
        )
    norms = np.asarray(stored_norms(values.reshape(-1, *values.shape[-3:])))
    old = layer.layouts()
    if len(old) < len(norms):
        norms = summed(norms)
    new = [choose(path, index, *pair) for index, pair in enumerate(zip(old, norms, strict=True))]
    if len({each.nnz for each in new}) > 1:
        raise UserError(f"{dotted(path)}: the layers of a stack would store unequal blocks.")
    return Change(path, layer, new, np.stack([block_sources(a, b) for a, b in zip(old, new)]))


def _prepared(change, method):
    """Returns the function that gives a layer its new layouts, after all that can fail."""
    _, layer, layouts, sources = change
    values, evolving = layer.values.get_value(), layer.evolving and method != STATIC
    if evolving == layer.evolving and layouts == layer.layouts():
        return lambda: None
    if method != STATIC:
        values = moved(values, sources, values.ndim - 3)
    return layer.prepare_layouts(layouts, evolving, values)


def gradient_norms(
    model: nnx.Module, layers: dict[tuple, BlockSparseLinear], loss: Callable, batch: tuple
) -> dict[tuple, np.ndarray]:
    """Returns path -> block norms of the dense gradient, float32 [layouts, in_blocks, out_blocks].

    They are of the sum over all products of a layer: of a layer that is used twice, of
    micro-batches in a scan, of the examples of `jax.vmap`.  One forward and one backward pass; a
    dense gradient of a layer is formed, reduced to norms and dropped.  Norms of a stack that shares
    a layout are summed, as squares.
    """
    zeros = {}
    for path, layer in layers.items():
        stack, layout = layer.values.shape[:-3], layer.layouts()[0]
        wide = jnp.promote_types(layer.values.dtype, jnp.float32)
        zeros[dotted(path)] = jnp.zeros((*stack, *layout.mask.shape), wide)
    norms = _measure(loss)(model, zeros, *batch)
    measured = {}
    for path, layer in layers.items():
        stacked = np.asarray(norms[dotted(path)])
        stacked = stacked.reshape(-1, *stacked.shape[-2:])
        if len(layer.layouts()) < len(stacked):
            stacked = summed(stacked)
        measured[path] = stacked
    return measured


@functools.lru_cache(maxsize=16)
def _measure(loss):
    """Returns a compiled (model, zeros of norms by path, *batch) -> norms by path."""

    @nnx.jit
    def measure(model, zeros, *batch):
        graph, state = nnx.split(model)

        def probed_loss(norms):
            # New variables: nnx extracts none of an outer trace.
            probed = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
            for path, layer in block_sparse_layers(probed, None).items():
                if dotted(path) in norms:
                    gradient = zeros_of_norms(norms[dotted(path)], layer.values.shape[-1])
                    layer.dense_gradient = DenseGradient(gradient)
            return loss(probed, *batch)

        # The loss does not depend on the zeros; their custom gradient is the block norms.
        return jax.grad(probed_loss)(zeros)

    return measure
