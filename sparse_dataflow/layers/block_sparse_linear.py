"""`BlockSparseLinear`: an nnx.Linear that stores some blocks of its kernel."""

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from jax import lax
from jax.typing import DTypeLike

from sparse_dataflow.core.config import arguments
from sparse_dataflow.core.layouts.layout import BlockLayout, LayoutTables
from sparse_dataflow.core.layouts.patterns import has_layout, make_layout
from sparse_dataflow.core.ops.derivatives import broadcast_like
from sparse_dataflow.core.weights.block_sparse import BlockSparse
from sparse_dataflow.core.weights.kind import Weight
from sparse_dataflow.core.weights.texts import array_text
from sparse_dataflow.core.weights.weight import WithDenseGradient
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.layers.axis_names import constrained, joined_names, placed, variable_of
from sparse_dataflow.layers.block_arrays import scaled_blocks
from sparse_dataflow.layers.dense_kernel import DenseKernel
from sparse_dataflow.layers.layer_products import by_dot_general, in_precision, precision_name
from sparse_dataflow.layers.layout_state import (
    MARK,
    TABLES,
    contradicts,
    is_layout_variable,
    layout_name,
    layout_names,
    layout_variables,
)
from sparse_dataflow.layers.paths import without_values

Initializer = Callable[..., jax.Array]

_NO_METADATA: Mapping[str, object] = MappingProxyType({})


class DenseGradient(nnx.Variable):
    """Zeros [in, out] whose gradient is that of the kernel if it were dense."""


class BlockSparseLinear(nnx.Module):
    """Drop-in for `nnx.Linear` that stores some blocks of its kernel: y = x W + b.

    Gradients, optimizer state and checkpoints have the stored blocks, and an entry of eight numbers
    that identifies the layout.  Rules that move every parameter may move those numbers.

    The layout is static by default: it is hashable, compares by content, and programs are
    specialised to it.  With `evolving=True` it is a variable of four index tables, which
    `sd.evolve` changes without recompiling; products are then slower.  Values of another layout
    raise an error; inside `jit` an evolving layer returns NaN.

    Handles that share the variables of an evolving layer, as of `nnx.view`, see each change.  If
    the layout of a static layer changes, handles from before raise an error.

    It has the public attributes of `nnx.Linear`.  `kernel` can be read, and is dense then.

    Attributes:
      values: nnx.Param, param_dtype [nnz, block, block], the stored blocks as `BlockLayout` orders
        them.
      bias: nnx.Param, param_dtype [out_features]; None without a bias.
      evolving: whether the layout is a variable.

    Args:
      in_features: features of the input.  Each side of the weight is padded with zeros to whole
        blocks, or by up to a quarter if the density needs it.  Padding stays 0.
      out_features: features of the output.
      layout: the stored blocks; None for those of `pattern`, `density` and `block`.
      pattern: rule that chooses the blocks, as in `sd.make_layout`.
      offset: number or seed of the pattern, as in `sd.make_layout`; None for 0, or a draw from
        `rngs` for a random pattern.  Inside `jit`, `vmap` and `nnx.eval_shape` keys have no value,
        so the number of the layer is used: give `offset` if an abstract layer must equal a concrete
        one.
      density: fraction of the blocks stored; see `sd.legal_densities`.
      block: side of a square block, in features.
      evolving: whether `sd.evolve` may change the layout without recompiling.
      use_bias: whether to add a bias.
      dtype: dtype of the computation; None for that of the input and the parameters.
      param_dtype: dtype of the parameters.
      precision: of products, as in `jax.default_matmul_precision`; one for both operands.
      kernel_init: initializer of the kernel.  It draws the dense kernel; stored blocks are scaled
        by 1 / sqrt(share of the inputs that the output reads), so the variance of the outputs does
        not depend on the density.  A constant stays that constant.
      bias_init: initializer of the bias.
      dot_general: product to use in place of the kernels.  It gets the gathered input blocks
        [tokens, out_blocks, inputs] and the stored blocks [out_blocks, inputs, block]; or, if all
        blocks are stored, what nnx.Linear gives it.
      promote_dtype: casts (inputs, values, bias), as that of `nnx.Linear` does.
      preferred_element_type: dtype of the product; None for that of its operands.
      kernel_metadata: metadata of `values`.  Names of the two axes of a kernel, here or in the
        metadata of `kernel_init`, become names of the axis of stored blocks: it is sharded over
        both, as far as they divide the number of blocks.  Three names are those of `values`.
      bias_metadata: metadata of `bias`.
      rngs: random keys; `params` is used.

    Raises:
      UserError: no layout fits; names the legal densities or blocks.

    Examples:
        >>> layer = sd.BlockSparseLinear(64, 128, density=0.25, block=16, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((8, 64))).shape
        (8, 128)
        >>> layer.values.shape, layer.layout.density
        ((8, 16, 16), 0.25)
    """

    @arguments.checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        layout: BlockLayout | None = None,
        pattern: str = "random",
        density: float = 0.125,
        block: int = 64,
        offset: int | None = None,
        evolving: bool = False,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: object = None,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),  # noqa: B008
        bias_init: Initializer = nnx.initializers.zeros_init(),  # noqa: B008
        dot_general: Callable = lax.dot_general,
        promote_dtype: Callable = flax_promote_dtype,
        preferred_element_type: DTypeLike | None = None,
        kernel_metadata: Mapping[str, object] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        rngs: nnx.Rngs,
    ):
        # The order of draws is that of `nnx.Linear`: kernel, then bias.  So replacing a linear
        # changes no other layer's initial values.
        key, shape = rngs.params(), (in_features, out_features)
        if layout is None:
            if offset is None:
                offset = _drawn_offset(rngs, key) if pattern == "random" else 0
            # Sides that blocks do not divide are filled up with features that are zero.
            sides = filled_up(shape, block, density)
            layout = make_layout(pattern, *sides, block, density, offset)
        if any(n not in _counts(s, layout.block) for n, s in zip(layout.mask.shape, shape)):
            raise UserError(
                f"The layout is of a {layout.in_features} x {layout.out_features} weight and the "
                f"layer has {in_features} x {out_features} features; legal: equal, or with "
                "as many blocks and up to a quarter more."
            )
        kernel = kernel_init(key, shape, param_dtype)
        values = scaled_blocks(getattr(kernel, "raw_value", kernel), layout)
        metadata = {**kernel_metadata, **getattr(kernel, "metadata", {})}
        metadata = _metadata_of_values(metadata, values.shape)
        self.values = variable_of(nnx.Param, values, metadata)
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            bias = bias_init(rngs.params(), (out_features,), param_dtype)
            self.bias = nnx.Param(bias, **bias_metadata)
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.dtype, self.param_dtype = use_bias, dtype, param_dtype
        self.precision, self.dot_general = precision, dot_general
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        self.kernel_init, self.bias_init = kernel_init, bias_init
        precision_name(precision)
        self.dense_gradient: DenseGradient | None = nnx.data(None)
        self.set_layouts([layout], evolving)

    def __repr__(self):
        layout = "an evolving layout" if self.evolving else repr(self.static_layout)
        arrays = f"values={array_text(self.values)}, bias={array_text(self.bias)}"
        return f"BlockSparseLinear({self.in_features} -> {self.out_features}, {layout}, {arrays})"

    __str__ = __repr__

    def _repr_html_(self):
        """Returns pictures of the layouts for notebooks, each once."""
        return "".join(layout._repr_html_() for layout in dict.fromkeys(self.layouts()))

    def __call__(self, inputs: jax.Array, out_sharding: object = None) -> jax.Array:
        """Applies the layer: [..., in_features] -> [..., out_features].

        Args:
          inputs: the input.
          out_sharding: sharding of the result, as `nnx.Linear` takes it; over Auto axes it is a
            constraint.

        Raises:
          UserError: the input has other features, or the state is of another layout.
        """
        bias = None if self.bias is None else self.bias[...]
        inputs, values, bias = self.promote_dtype(
            (inputs, self.values[...], bias), dtype=self.dtype
        )
        y = self._product(self._filled_up(inputs), values)[..., : self.out_features]
        if bias is not None:
            y = y.astype(jnp.result_type(y, bias))  # A user's promotion may leave it wider.
            y += broadcast_like(bias, y)
        return constrained(self.unless_foreign(y), out_sharding)

    def weight(self, values: jax.Array | None = None) -> Weight:
        """Returns the weight; `x @ layer.weight()` is the product without the bias.

        Args:
          values: stored blocks to use in place of the layer's.

        Raises:
          UserError: the state is of another layout.
        """
        self.check_layout()
        values = self.values[...] if values is None else values
        stored = BlockSparse(values, self.stored_layout)
        if self.dense_gradient is None:
            return stored
        return WithDenseGradient(stored, self.dense_gradient[...])

    def _filled_up(self, inputs):
        """Returns inputs with the features that fill up the last block; they are 0."""
        features, blocks = self.in_features, self.stored_layout.grid[-2]
        missing = blocks * self.values.shape[-1] - features
        if not missing:
            return inputs
        if inputs.ndim < 1 or inputs.shape[-1] != features:
            raise UserError(f"x has shape {inputs.shape}; the layer reads [..., {features}].")
        return jnp.pad(inputs, [(0, 0)] * (inputs.ndim - 1) + [(0, missing)])

    def _product(self, inputs, values):
        if self.dot_general is not lax.dot_general:
            product = functools.partial(
                by_dot_general, self.dot_general, self.precision, self.preferred_element_type
            )
            return product(inputs, self.weight(values))
        dtype = self.preferred_element_type or inputs.dtype
        # Products round to the dtype of their operands, so these take the wider one.
        wide = jnp.promote_types(inputs.dtype, dtype)
        weight = self.weight(values.astype(wide))
        return in_precision(self.precision, inputs.astype(wide), weight).astype(dtype)

    @property
    def kernel(self) -> DenseKernel:
        """The kernel, which can be read like that of `nnx.Linear` and is dense where it is."""
        return DenseKernel(self)

    @property
    def evolving(self) -> bool:
        """Whether the layout is a variable, which changes without recompiling."""
        return self.static_layout is None

    @property
    def layout(self) -> BlockLayout:
        """The stored blocks now.

        Raises:
          UserError: the layers of a stack have different layouts.
        """
        first, *others = self.layouts()
        if any(other != first for other in others):
            raise UserError(
                f"The {len(others) + 1} stacked layers have different layouts; legal: `layouts()`."
            )
        return first

    def layouts(self) -> list[BlockLayout]:
        """Returns the layout that all layers of a stack share, or each layer's if it is evolving.

        An evolving layout is read from its tables, so not inside `jit`.

        Raises:
          UserError: the state is of another layout, or has no values.
        """
        self.check_layout()
        layout = self.stored_layout
        if isinstance(layout, BlockLayout):
            return [layout]
        if without_values(layout.in_index):
            raise UserError(
                "The layout of an evolving layer is read from its tables, which have no values in "
                "an abstract model or inside `jit`; legal: a layer with values, outside of `jit`."
            )
        return layout.layouts(self.values.shape[-1])

    def set_layouts(
        self, layouts: Sequence[BlockLayout], evolving: bool, values: object = None
    ) -> None:
        """Replaces the layout: see `sd.evolve`.

        An evolving layer that stays one changes its variables in place, so handles that share them
        see the change.  Otherwise the layer gets new variables, and handles from before get empty
        values, which raise an error.

        Args:
          layouts: one that all layers of a stack share, or one for each layer if `evolving`.
          evolving: whether the layout becomes a variable.
          values: the stored blocks of the new layout; None for those of the layer.
        """
        self.prepare_layouts(layouts, evolving, values)()

    def prepare_layouts(
        self, layouts: Sequence[BlockLayout], evolving: bool, values: Any = None
    ) -> Callable[[], None]:
        """Returns the function that does what `set_layouts` does, after all that can fail."""
        values = self.values.get_value() if values is None else values
        new = layout_variables(layouts, evolving, values.shape[:-3], values.dtype)
        old = {
            name: variable
            for name, variable in vars(self).items()
            if is_layout_variable(name) and isinstance(variable, nnx.Variable)
        }
        arrays = {name: variable.get_value() for name, variable in new.items()}
        if old:
            # A variable that is new goes where the others are.
            first, *_ = old.values()
            arrays = {
                name: placed(array, old.get(name, first).get_value())
                for name, array in arrays.items()
            }

        def apply():
            if set(new) == set(old):
                self.values.set_value(values)
                for name, array in arrays.items():
                    old[name].set_value(array)
                return
            if old:
                # Handles from before share the old variable: without blocks it makes them raise an
                # error.
                variable = self.values.copy()
                empty = (*values.shape[:-3], 0, *values.shape[-2:])
                self.values.set_value(np.zeros(empty, values.dtype))
                self.values = variable
            self.values.set_value(values)
            self.static_layout = None if evolving else layouts[0]
            for name in filter(is_layout_variable, list(vars(self))):
                delattr(self, name)
            for name in (*TABLES, MARK):
                setattr(self, name, nnx.data(None))
            for name, array in arrays.items():
                new[name].set_value(array)
                setattr(self, name, new[name])

        return apply

    def check_layout(self) -> None:
        """Raises UserError if the state is of another layout."""
        if not self.values.shape[-3]:
            raise UserError(
                f"The layout of this {self.in_features} x {self.out_features} layer changed after "
                "this handle on its variables was made (nnx.view, nnx.split, nnx.cached_partial); "
                "legal: a new handle, or an evolving layer, whose handles see every change."
            )
        names, static = layout_names(vars(self)), self.static_layout
        expected = set() if static is None else {layout_name(static)}
        if names != expected:
            mine = "an evolving layout" if static is None else layout_name(static)
            raise UserError(
                f"The state of this {self.in_features} x {self.out_features} layer is of "
                f"{' and '.join(sorted(names - expected)) or 'no layout'}, and the layer has "
                f"{mine}; legal: a state of the same layout."
            )
        if self.evolving:
            foreign = self._is_foreign()
            if not isinstance(foreign, jax.core.Tracer) and foreign:
                raise UserError(
                    f"The index tables of this {self.in_features} x {self.out_features} layer are "
                    "of another layout than its values; legal: both from one state, or an average "
                    "of states of one layout."
                )

    def _is_foreign(self):
        """Returns whether the values are of another layout than the tables, bool []."""
        mark = getattr(self, MARK)
        if mark is None:  # A state without it replaced the attribute.
            return np.bool_(True)
        mark = mark.get_value()
        if isinstance(mark, jax.ShapeDtypeStruct):
            return np.bool_(False)
        return contradicts(mark, self.stored_layout)

    def unless_foreign(self, result: jax.Array) -> jax.Array:
        """Returns what the layer computed; NaN if the values are of another layout.

        A state under `jit` has no values to compare, so it cannot raise an error.
        """
        return jnp.where(self._is_foreign(), jnp.nan, result) if self.evolving else result

    @property
    def stored_layout(self) -> BlockLayout | LayoutTables:
        """The layout as products take it: static, or the index tables of an evolving layer."""
        variables = (getattr(self, name) for name in TABLES)
        return self.static_layout or LayoutTables(*(each.get_value() for each in variables))


def filled_up(shape: tuple[int, int], block: int, density: float) -> tuple[int, int]:
    """Returns the shape of the layout of a weight, the smallest that has a layout of the density.

    Sides are whole blocks, with up to a quarter more; without such a layout, the fewest blocks.

    Raises:
      UserError: a side is shorter than the block, so most of it would be filling.
    """
    if block < 1:
        raise UserError(f"block={block} is not legal: it must be 1 or more.")
    if min(shape) < block:
        raise UserError(
            f"A block of {block} is larger than a side of a {shape[0]} x {shape[1]} weight; legal: "
            f"blocks of at most {min(shape)}."
        )
    counts = [_counts(side, block) for side in shape]
    fits = [(i, o) for i, o in itertools.product(*counts) if has_layout(i, o, density)]
    rows, columns = min(fits, key=math.prod, default=[each[0] for each in counts])
    return rows * block, columns * block


def _counts(side, block):
    """Numbers of blocks that a side may have: the fewest, and up to a quarter more, rounded up."""
    fewest = -(-side // block)
    return range(fewest, fewest + 1 + -(-fewest // 4))


def _metadata_of_values(metadata, shape):
    """Returns metadata of stored blocks, from that of a kernel or of themselves."""
    names = metadata.get("out_sharding")
    if isinstance(names, tuple | jax.P) and len(tuple(names)) == len(shape):
        return metadata
    return joined_names(metadata, [(0, 1), (), ()], shape)


_numbers: weakref.WeakKeyDictionary[nnx.Rngs, int] = weakref.WeakKeyDictionary()
"""Layers with a random layout that each `nnx.Rngs` has drawn where its keys have no value."""


def _drawn_offset(rngs, key):
    """Returns the seed of a random layout, from a key or, where it is traced, by counting."""
    if isinstance(key, jax.core.Tracer):
        _numbers[rngs] = _numbers.get(rngs, -1) + 1
        return _numbers[rngs]
    # Folded in, as the key itself draws the kernel.
    return int(jax.random.bits(jax.random.fold_in(key, 1), dtype=jnp.uint32) >> 1)
