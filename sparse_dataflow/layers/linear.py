"""`BlockSparseLinear`: an nnx.Linear that stores some blocks of its kernel."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.projections import LinearSpec
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul.api import block_sparse_matmul
from sparse_dataflow.models.linear import with_room
from sparse_dataflow.sparsity.layout import BlockLayout, LayoutTables, stack_tables
from sparse_dataflow.sparsity.patterns import make_layout
from sparse_dataflow.weights.gradient_norms import with_gradient_norms

Initializer = Callable[..., Any]

TABLES = ("in_index", "in_slot", "out_index", "out_slot")
"""Attributes of the index tables of an evolving layer, as in `LayoutTables`."""

LAYOUT_PREFIX = "layout_"
"""Start of the keys of `LayoutName`s."""

_ROOM = LinearSpec(max_fan_out=EvolutionConfig.max_fan_out)
"""Width of the tables of an evolving layer."""


class LayoutTable(nnx.Variable):
    """One int32 index table of an evolving layer; `sd.evolve` changes it, no optimizer does."""


class LayoutName(nnx.Variable):
    """A zero of a static layer, whose key in the state names the layout.

    So the state of another layout is another tree, which orbax and `jax.tree.map` refuse.

    Attributes:
      layout: the key, kept as metadata: `nnx.merge` checks no keys.
    """


class BlockNorms(nnx.Variable):
    """Zeros [in_blocks, out_blocks] whose "gradient" is the block norms of the dense gradient."""


class BlockSparseLinear(nnx.Module):
    """Drop-in for `nnx.Linear` that stores some blocks of its kernel: y = x W + b.

    Gradients, optimizer state and checkpoints have the stored blocks alone.

    The layout is static by default: it is no array, it is hashable and compares by content, so
    every program is specialised to it.  The state has its name, as the key of a zero, so that a
    state of another layout is refused.  With `evolving=True` the layout is a variable of four index
    tables, which `sd.evolve` changes without recompiling; products are then slower.

    Attributes:
      values: nnx.Param, param_dtype [nnz, block, block], the stored blocks as `BlockLayout` orders
        them.
      bias: nnx.Param, param_dtype [out_features]; None without a bias.
      evolving: whether the layout is a variable.

    Args:
      in_features: features of the input, a multiple of the block.
      out_features: features of the output, a multiple of the block.
      layout: the stored blocks; None for those of `pattern`, `density` and `block`.
      pattern: rule that chooses the blocks, as in `sd.make_layout`.
      density: fraction of the blocks stored; see `sd.legal_densities`.
      block: side of a square block, in features.
      evolving: whether `sd.evolve` may change the layout without recompiling.
      use_bias: whether to add a bias.
      dtype: dtype of the computation; None for that of the input and the parameters.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the kernel.  It draws as many inputs as an output reads, so the
        variance of the outputs does not depend on the density.
      bias_init: initializer of the bias.
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

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        layout: BlockLayout | None = None,
        pattern: str = "random",
        density: float = 0.125,
        block: int = 64,
        evolving: bool = False,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),  # noqa: B008
        bias_init: Initializer = nnx.initializers.zeros_init(),  # noqa: B008
        rngs: nnx.Rngs,
    ):
        layout = layout or make_layout(pattern, in_features, out_features, block, density)
        if (layout.in_features, layout.out_features) != (in_features, out_features):
            raise UserError(
                f"The layout is of a {layout.in_features} x {layout.out_features} weight and the "
                f"layer has {in_features} x {out_features} features; legal: equal."
            )
        self.values = nnx.Param(draw_blocks(layout, kernel_init, rngs.params(), param_dtype))
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (out_features,), param_dtype))
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.dtype, self.param_dtype = use_bias, dtype, param_dtype
        self.block_norms: BlockNorms | None = nnx.data(None)
        self.set_layouts([layout], evolving)

    def __call__(self, inputs: jax.Array, out_sharding: None = None) -> jax.Array:
        """Applies the layer: [..., in_features] -> [..., out_features].

        Raises:
          UserError: the input has other features, `out_sharding` is not None, or the state is of
            another layout.
        """
        self._check_layout()
        if out_sharding is not None:
            raise UserError(
                "A BlockSparseLinear takes no out_sharding; legal: None, and "
                "jax.lax.with_sharding_constraint of its result."
            )
        values, bias = self.values[...], None if self.bias is None else self.bias[...]
        arrays = [inputs, values, *([] if bias is None else [bias])]
        dtype = jnp.result_type(*arrays) if self.dtype is None else self.dtype
        inputs, values = jnp.asarray(inputs, dtype), values.astype(dtype)
        layout = self._tables() if self.static_layout is None else self.static_layout
        y = block_sparse_matmul(inputs, values, layout)
        if self.block_norms is not None:
            y = with_gradient_norms(y, inputs, self.block_norms[...])
        return y if bias is None else y + bias.astype(dtype)

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
          UserError: the state is of another layout.
        """
        self._check_layout()
        if self.static_layout is not None:
            return [self.static_layout]
        return self._tables().layouts(self.values.shape[-1])

    def set_layouts(self, layouts: Sequence[BlockLayout], evolving: bool) -> None:
        """Replaces the layout, but not the values: see `sd.evolve`.

        Args:
          layouts: one that all layers of a stack share, or one for each layer if `evolving`.
          evolving: whether the layout becomes a variable.
        """
        self.static_layout = None if evolving else layouts[0]
        stack = self.values.shape[:-3]
        for name in TABLES:
            setattr(self, name, nnx.data(None))
        for name in [name for name in vars(self) if name.startswith(LAYOUT_PREFIX)]:
            delattr(self, name)
        if not evolving:
            name = layout_name(layouts[0])
            setattr(self, name, LayoutName(jnp.zeros(stack), layout=name))
        else:
            stacked = stack_tables([with_room(each, _ROOM).tables() for each in layouts])
            for name, table in zip(TABLES, stacked.arrays):
                layers = (math.prod(stack), *table.shape[1:])
                value = jnp.broadcast_to(table, layers).reshape(*stack, *table.shape[1:])
                setattr(self, name, LayoutTable(value))

    def _check_layout(self):
        """Raises UserError if the state is of another layout."""
        attributes = vars(self)
        held = {name for name in attributes if name.startswith(LAYOUT_PREFIX)}
        for variable in [attributes[name] for name in held]:
            if isinstance(variable, LayoutName):
                held.add(variable.get_metadata("layout"))
        static = self.static_layout
        expected = set() if static is None else {layout_name(static)}
        if held != expected:
            mine = "an evolving layout" if static is None else layout_name(static)
            raise UserError(
                f"The state of this {self.in_features} x {self.out_features} layer is of "
                f"{' and '.join(sorted(held - expected))}, and the layer has {mine}; legal: a "
                "state of the same layout."
            )

    def _tables(self):
        return LayoutTables(*(getattr(self, name)[...] for name in TABLES))


def layout_name(layout: BlockLayout) -> str:
    """Returns the key of a layout's `LayoutName`."""
    return LAYOUT_PREFIX + layout.content_hash[:16]


def draw_blocks(layout: BlockLayout, kernel_init: Initializer, key: Any, dtype: Any) -> jax.Array:
    """Returns values [nnz, block, block] drawn by an initializer of dense kernels.

    The outputs of equal fan-in are one draw [stored inputs, outputs], so initializers that scale by
    the number of inputs scale by the stored ones.  Sharding metadata of the initializer is dropped.
    """
    block = layout.block
    values = jnp.zeros((layout.nnz, block, block), dtype)
    for fan_in in np.unique(layout.fan_in[layout.fan_in > 0]).tolist():
        slots = np.flatnonzero(layout.fan_in[layout.cols] == fan_in)
        outputs = len(slots) // fan_in
        compact: Any = kernel_init(
            jax.random.fold_in(key, fan_in), (fan_in * block, outputs * block), dtype
        )
        compact = getattr(compact, "raw_value", compact)
        blocks = compact.reshape(fan_in, block, outputs, block).transpose(2, 0, 1, 3)
        values = values.at[slots].set(blocks.reshape(-1, block, block))
    return values
