"""Stored blocks as arrays, without a module: drawn, cut from a kernel, joined, and moved.

The layers of this package are written over these functions; users of other frameworks call them
directly.  The product is `block_sparse_matmul`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sparse_dataflow.core.config.sparsity import EXCHANGED_BLOCKS
from sparse_dataflow.core.layouts.evolution import METHODS, block_sources
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.model.blocks import (
    collect,
    expand,
    gather_blocks,
    grid_norms,
    stored_norms,
)
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.axis_names import over_auto_axes, placed

Layouts = BlockLayout | Sequence[BlockLayout]
"""One layout for all layers of a stack, or one for each."""


def draw_blocks(
    key: jax.Array,
    layout: BlockLayout,
    kernel_init: Callable | None = None,
    dtype: DTypeLike = jnp.float32,
    shape: tuple[int, int] | None = None,
) -> jax.Array:
    """Returns new values of a layout: the stored blocks of a drawn kernel.

    They are scaled by 1 / sqrt(share of the inputs that their output reads), so the variance of the
    outputs does not depend on the density.  A constant kernel is not scaled.

    The arguments begin as those of an initializer do, so linen's `self.param` takes it.

    Args:
      key: the random key.
      layout: the stored blocks.
      kernel_init: initializer of the dense kernel, (key, shape, dtype) -> array, such as those of
        `jax.nn.initializers`; None for `lecun_normal`.
      dtype: dtype of the values.
      shape: features of the kernel, (in, out); None for those of the layout.

    Returns:
      dtype [nnz, block, block], as `sd.block_sparse_matmul` takes them.

    Raises:
      UserError: the kernel is larger than the layout.

    Examples:
        >>> layout = sd.make_layout("random", 64, 128, block=16, density=0.25)
        >>> sd.draw_blocks(jax.random.key(0), layout).shape
        (8, 16, 16)
    """
    draw = kernel_init or jax.nn.initializers.lecun_normal()
    shape = shape or (layout.in_features, layout.out_features)
    return scaled_blocks(draw(key, shape, dtype), layout)


def cut_blocks(kernel: object, layout: object) -> jax.Array:
    """Returns the stored blocks of a dense kernel: inverse of `sd.join_blocks`.

    Args:
      kernel: float [..., in, out]; a side that is shorter than the layout's is filled up with
        zeros.
      layout: the stored blocks, a `sd.BlockLayout`; or a list of one for each layer of a stack
        [layers, in, out].

    Returns:
      [..., nnz, block, block] in the kernel's dtype.  Differentiable.

    Raises:
      UserError: the kernel is larger than the layout.

    Examples:
        >>> layout = sd.make_layout("random", 64, 128, block=16, density=0.25)
        >>> kernel = jax.random.normal(jax.random.key(0), (64, 128))
        >>> values = sd.cut_blocks(kernel, layout)
        >>> pruned = sd.join_blocks(values, layout)
        >>> bool(jnp.all((pruned == kernel) | (pruned == 0)))
        True
    """
    dense, layouts = _array("kernel", kernel), _listed(layout)
    full = layouts[0].in_features, layouts[0].out_features
    if dense.ndim < 2 or not dense.size or any(n > most for n, most in zip(dense.shape[-2:], full)):
        raise UserError(
            f"The kernel has shape {dense.shape}; legal for this layout: [..., {full[0]}, "
            f"{full[1]}], or shorter sides, which zeros fill up."
        )
    missing = [(0, most - n) for n, most in zip(dense.shape[-2:], full)]
    stack = dense.shape[:-2]
    layers = jnp.pad(dense.reshape(-1, *dense.shape[-2:]), [(0, 0), *missing])
    values = collect(*_positions(layouts, len(layers)), layers, layouts[0].block)
    return values.reshape(*stack, *values.shape[1:])


def join_blocks(values: object, layout: object, shape: tuple[int, int] | None = None) -> jax.Array:
    """Returns the dense kernel of stored blocks, with zeros between them.

    Args:
      values: float [..., nnz, block, block].
      layout: the stored blocks, a `sd.BlockLayout`; or a list of one for each layer of a stack
        [layers, nnz, block, block].
      shape: features of the kernel, (in, out), at most those of the layout; None for these.

    Returns:
      [..., in, out] in the dtype of the values.  Differentiable.

    Raises:
      UserError: the values are not of the layout.

    Examples:
        >>> layout = sd.make_layout("random", 64, 128, block=16, density=0.25)
        >>> x, values = jnp.ones((2, 64)), sd.draw_blocks(jax.random.key(0), layout)
        >>> y = sd.block_sparse_matmul(x, values, layout)
        >>> bool(jnp.allclose(y, x @ sd.join_blocks(values, layout), atol=1e-5))
        True
    """
    stored, layouts = _array("values", values), _listed(layout)
    _check_values(stored, layouts[0])
    stack, layers = stored.shape[:-3], stored.reshape(-1, *stored.shape[-3:])
    kernel = expand(*_positions(layouts, len(layers)), layers, layouts[0].mask.shape)
    rows, columns = shape or kernel.shape[1:]
    return kernel[:, :rows, :columns].reshape(*stack, rows, columns)


def evolve_blocks(
    layout: BlockLayout,
    values: object,
    method: str = "set",
    *,
    share: float = EXCHANGED_BLOCKS,
    gradient: Any = None,
    seed: int = 0,
) -> tuple[BlockLayout, Callable[[object], jax.Array]]:
    """Returns the next layout of a weight, and the function that moves its arrays there.

    The function is for the values, their moments and averages: arrays [..., nnz, block, block].  A
    block that stays keeps its bits; a new block is zero.  The fan-in of every output block stays.

    Args:
      layout: the stored blocks now.
      values: float [..., nnz, block, block]; layers of a stack get one layout, by the sum of their
        squares.
      method: "set", "rigl" or another method that exchanges blocks; see `sd.evolve`.
      share: fraction of the stored blocks to exchange, at least one of them.
      gradient: of the dense kernel, [..., in, out], for "rigl": the gradient of
        `sd.join_blocks(values, layout)` where that is the weight.
      seed: seed of random choices; give another one for every weight and update.

    Raises:
      UserError: the method, its arguments or the arrays do not fit the layout, or they are traced:
        a layout is chosen outside of `jit`.

    Examples:
        >>> layout = sd.make_layout("random", 64, 128, block=16, density=0.25)
        >>> params = {"values": sd.draw_blocks(jax.random.key(0), layout)}
        >>> tx = optax.adam(1e-3)
        >>> state = tx.init(params)
        >>> layout, move = sd.evolve_blocks(layout, params["values"], "set", share=0.2, seed=1)
        >>> params = {"values": move(params["values"])}
        >>> state = optax.tree_map_params(tx, lambda leaf, f: f(leaf), state, {"values": move})
        >>> layout.density, params["values"].shape
        (0.25, (8, 16, 16))
    """
    if any(isinstance(array, jax.core.Tracer) for array in (values, gradient)):
        raise UserError("A layout is chosen by values, so not inside jit; legal: concrete arrays.")
    if seed < 0:
        raise UserError(f"seed={seed} is not legal: it must be 0 or more.")
    exchange = exchanger(method, share)
    stored = _array("values", values)
    _check_values(stored, layout)
    growth = None
    if gradient is not None and not METHODS[method].reads_gradients:
        raise UserError(f"Method {method!r} reads no gradient; legal: gradient=None.")
    if METHODS[method].reads_gradients:
        full = layout.in_features, layout.out_features
        if gradient is None or jnp.shape(gradient)[-2:] != full:
            raise UserError(
                f"Method {method!r} reads `gradient`, which has shape {np.shape(gradient)}; legal: "
                f"the gradient of the dense kernel, [..., {full[0]}, {full[1]}]."
            )
        growth = summed(grid_norms(jnp.reshape(gradient, (-1, *full)), layout.block))[0]
    # A stack of layers has one layout, so its layers choose together, by the sums of their norms.
    norms = summed(stored_norms(stored.reshape(-1, *stored.shape[-3:])))[0]
    new = exchange(layout, norms, growth, np.random.default_rng([seed]))
    # Kept blocks move to their new slots, grown ones are zero.  `move` serves moments as well:
    # they have one array for each of the weight.
    sources = block_sources(layout, new)[None]

    def move(array):
        array = _array("an array of the weight", array)
        _check_values(array, layout)
        return moved(array, sources, np.ndim(array) - 3)

    return new, move


def scaled_blocks(kernel: jax.Array, layout: BlockLayout) -> jax.Array:
    """Returns the blocks of a drawn kernel, so scaled that the density leaves the variance."""
    inputs, block = kernel.shape[0], layout.block
    stored = cut_blocks(kernel, layout)
    # Real inputs of each block; the last blocks may be filled up with zeros.
    features = np.clip(inputs - block * np.arange(layout.in_blocks), 0, block)
    # Inputs that each output block reads.
    read = np.bincount(layout.cols, features[layout.rows], layout.out_blocks)
    scale = np.sqrt(inputs / np.maximum(1, read[layout.cols]))[:, None, None]
    is_constant = jnp.all(kernel == kernel[0, 0])
    return jnp.where(is_constant, stored, (stored * scale).astype(stored.dtype))


def exchanger(method: str, share: float) -> Callable[..., BlockLayout]:
    """Returns (layout, norms, gradient norms or None, generator) -> the next layout.

    Raises:
      UserError: the method exchanges no blocks, or the share is not legal.
    """
    exchanging = sorted(name for name, each in METHODS.items() if each.update is not None)
    if method not in exchanging:
        raise UserError(f"Method {method!r} is unknown; legal: {', '.join(exchanging)}.")
    if not 0 < share < 1:
        raise UserError(f"share is {share}; legal: in (0, 1).")
    update = METHODS[method].update
    assert update is not None

    def exchange(layout, norms, growth, rng):
        if not all(np.isfinite(each).all() for each in (norms, growth) if each is not None):
            raise UserError("Values or gradients are not finite, so no blocks can be chosen.")
        # At least one block, also of a small weight.
        return update(layout, norms, growth, max(share, 1 / layout.nnz), 1, rng)

    return exchange


def summed(norms: object) -> np.ndarray:
    """Returns block norms [1, ...] of all layers of a stack [layers, ...] together."""
    norms = np.asarray(norms)
    # Norms of blocks at one place add up as squares.
    return norms if len(norms) == 1 else np.sqrt(np.square(norms).sum(axis=0, keepdims=True))


def moved(array: jax.Array, sources: np.ndarray, axis: int) -> jax.Array:
    """Returns [*stack, nnz, ...] at new layouts, given sources [1 or layers, new nnz].

    Args:
      array: a parameter or a moment.
      sources: slots of the new blocks in the old array; -1 for new ones.
      axis: axis of the stored blocks, after those of a stack.
    """
    stack, rest = array.shape[:axis], array.shape[axis:]
    layers = over_auto_axes(jnp.asarray(array)).reshape(-1, *rest)
    # Layers of a stack may share one layout.
    wide = np.broadcast_to(sources, (len(layers), sources.shape[1]))
    new = gather_blocks(layers, wide).reshape(*stack, sources.shape[1], *rest[1:])
    return placed(new, array)


def _array(name, value):
    """Returns a jax array; UserError for what is no array of numbers."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise UserError(f"{name} is {type(value).__name__}; legal: an array of numbers.") from None


def _listed(layout):
    layouts = list(layout) if isinstance(layout, list | tuple) else [layout]
    if not layouts or not all(isinstance(each, BlockLayout) for each in layouts):
        raise UserError("layout is not legal: it must be a sd.BlockLayout, or a list of them.")
    return layouts


def _check_values(values, layout):
    """Raises UserError if an array has no blocks of a layout."""
    expected = layout.nnz, layout.block, layout.block
    if tuple(np.shape(values)[-3:]) != expected:
        raise UserError(
            f"The values have shape {np.shape(values)}; legal for this layout: [..., "
            f"{', '.join(map(str, expected))}]."
        )


def _positions(layouts, layers):
    """Returns (rows, cols), int32 [layers, nnz] each, of one layout for all layers or one each."""
    if len(layouts) not in (1, layers):
        raise UserError(f"There are {len(layouts)} layouts; legal: 1 or {layers}, one a layer.")
    rows, cols = (np.stack([getattr(each, side) for each in layouts]) for side in ("rows", "cols"))
    shape = layers, rows.shape[1]
    return np.broadcast_to(rows, shape), np.broadcast_to(cols, shape)
