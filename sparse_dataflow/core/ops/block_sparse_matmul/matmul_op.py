"""The block-sparse matmul: one function that dispatches to one implementation per platform."""

import dataclasses
import functools
import math
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.projections import PRECISIONS
from sparse_dataflow.core.layouts.layout import (
    BlockLayout,
    LayoutTables,
    check_shapes,
    index_tables,
)
from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.core.ops.block_sparse_matmul import grouped, xla_few_rows, xla_static
from sparse_dataflow.core.ops.dispatch import Implementation, Op
from sparse_dataflow.files.errors import UserError

OP = Op(
    __package__,
    {
        "reference": Implementation("dense_matmul"),
        "grouped": Implementation("grouped"),
        "xla": Implementation("xla"),
        "xla_static": Implementation("xla_static"),
        "pallas_tpu_grouped": Implementation(
            ".chips.tpu.grouped_matmul.api", "tpu", partitioned=False
        ),
        "pallas_tpu": Implementation(".chips.tpu.matmul.api", "tpu", partitioned=False),
        "pallas_hopper": Implementation(".chips.hopper.api", "gpu", partitioned=False),
        "pallas_triton": Implementation(".chips.triton.matmul", "gpu", partitioned=False),
    },
    fallback=("reference", "xla"),
)
"""An implementation has `block_sparse_matmul(x, values, tables)` for x [tokens, in_features] of at
least one token, and tables with groups.  If it has tiles, it takes them as `tuning`.  xla_static
takes a `BlockLayout` instead of tables, or None of traced ones."""

IMPLEMENTATIONS = tuple(OP.implementations)

MAX_STATIC_GROUPS = 128
"""Most groups of equal support, over columns and rows, that are specialised.  Each group adds about
0.05 s of compile time on a laptop."""

P = TypeVar("P")
G = TypeVar("G")


@dataclasses.dataclass(frozen=True)
class ProductTuning(Generic[P, G]):
    """Tiles of the three products on one device.

    Attributes:
      forward: tiles of y = xW.
      input_gradient: tiles of dx = dy Wᵀ.
      weight_gradient: tiles of dW.
    """

    forward: P
    input_gradient: P
    weight_gradient: G


def block_sparse_matmul(
    x: jax.Array,
    values: jax.Array,
    layout: BlockLayout | LayoutTables,
    implementation: str | None = None,
    precision: str = PRECISIONS[0],
    tuning: object = None,
) -> jax.Array:
    """Compute `x @ W` where only some blocks of W are stored.

    Differentiable in x and values, in reverse and forward mode, and in jax.vmap over both. The
    Pallas kernels have first derivatives alone.

    The gradient of values exists at stored blocks only. No array has the size of the dense W,
    except in "reference".

    Args:
      x: float [..., in_features].
      values: float [nnz, block, block], as `BlockLayout` orders them.
      layout: the stored blocks, which a program is specialised to; or `BlockLayout.tables()`.
        Concrete (numpy) tables are specialised alike.  Traced tables are data: changing them does
        not recompile.
      implementation: one of IMPLEMENTATIONS, or None to choose by platform and tables.
      precision: as in `ModelConfig`; quantised operands need "grouped" or None, and a layout of
        equal groups.
      tuning: tile sizes of a named implementation, or None for its heuristic's.

    Returns:
      [..., out_features] in x's dtype; products accumulate in float32 (float64 for float64).

    Raises:
      UserError: if shapes disagree or a named implementation cannot run.

    Examples:
        >>> layout = sd.make_layout("monarch", 64, 128, block=16, density=0.25)
        >>> values = jax.random.normal(jax.random.key(0), (layout.nnz, 16, 16))
        >>> sd.block_sparse_matmul(jnp.ones((8, 64)), values, layout).shape
        (8, 128)
    """
    static_layout = check_operands(x, values, layout)
    product = functools.partial(
        block_sparse_matmul, implementation=implementation, precision=precision, tuning=tuning
    )
    # Traced tables are operands, which vary and are sharded as others are.  A static layout is
    # bound to the function: as an operand it would have to be an array.
    if static_layout is None:
        y = dispatch.over_auto_axes(product, x, values, layout)
        x, values, layout = dispatch.equally_varying(x, values, layout)
    else:
        specialised = functools.partial(product, layout=layout)
        y = dispatch.over_auto_axes(specialised, x, values)
        x, values = dispatch.equally_varying(x, values)
    if y is not None:
        return y
    tables = index_tables(layout)
    if static_layout:
        tables = tables._replace(groups=static_layout.groups)
    flat = jnp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
    if precision != PRECISIONS[0]:
        y = _quantized(flat, values, tables, implementation, precision)
        return y.reshape(*x.shape[:-1], y.shape[-1])
    name = implementation or _choose(flat, values, tables, static_layout)
    operands = flat, values, static_layout if name == "xla_static" else tables
    if implementation:
        OP.check(name, *operands)
    # No implementation has to expect zero rows, of which a tile has none.
    if flat.shape[0] == 0:
        return jnp.zeros((*x.shape[:-1], len(tables.in_index) * values.shape[-1]), x.dtype)
    tiles = {} if tuning is None else {"tuning": tuning}
    y = OP.load(name).block_sparse_matmul(*operands, **tiles)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _quantized(x, values, tables, implementation, precision):
    """Multiplies the groups of a layout with quantised operands, as one batched dot."""
    if precision not in PRECISIONS:
        raise UserError(f"precision {precision!r} is unknown; legal: {', '.join(PRECISIONS)}.")
    if implementation not in (None, "grouped"):
        raise UserError(
            f"implementation {implementation!r} does not quantise its operands; legal with "
            f"precision={precision}: grouped."
        )
    if tables.groups is None:
        raise UserError(
            f"precision={precision} needs a layout of equal groups that cannot change; legal: the "
            "patterns monarch and shuffle, or precision=compute_dtype."
        )
    if x.shape[0] == 0:  # No value to scale by.
        return jnp.zeros((0, len(tables.in_index) * values.shape[-1]), x.dtype)
    dispatch.log_choice("block_sparse_matmul", f"grouped in {precision}", dispatch.platform())
    products = functools.partial(grouped.dense_products, precision=precision)
    return grouped.block_sparse_matmul(x, values, tables, products=products)


def check_operands(
    x: dispatch.Shaped, values: dispatch.Shaped, tables: BlockLayout | LayoutTables
) -> BlockLayout | None:
    """Check shapes, dtypes and concrete tables.

    Returns:
      The layout, also of concrete (numpy) tables; None for traced ones.

    Raises:
      UserError: if shapes or dtypes disagree, or concrete tables describe no layout.
    """
    if values.ndim != 3 or values.shape[1] != values.shape[2]:
        raise UserError(f"values have shape {values.shape}; legal: [nnz, block, block].")
    block = values.shape[-1]
    layout = tables if isinstance(tables, BlockLayout) else None
    if isinstance(tables, LayoutTables):
        check_shapes(tables)
        if all(isinstance(table, np.ndarray) for table in tables.arrays):
            layout = BlockLayout.from_tables(tables, block)
        stored, inputs = tables.in_slot.size, len(tables.out_index)
    if layout:
        if layout.block != block:
            raise UserError(f"values have blocks of {block}; legal: the layout's {layout.block}.")
        stored, inputs = layout.nnz, layout.in_blocks
    # Tables may have room for more blocks than are stored, a layout may not.
    if len(values) > stored or (layout and len(values) < stored):
        raise UserError(f"values have {len(values)} blocks; the layout stores {stored}.")
    features = inputs * block
    if x.ndim < 1 or x.shape[-1] != features:
        raise UserError(f"x has shape {x.shape}; the layout reads [..., {features}].")
    if x.dtype != values.dtype or not jnp.issubdtype(x.dtype, jax.numpy.floating):
        raise UserError(f"x is {x.dtype} and values are {values.dtype}; legal: one float dtype.")
    return layout


def _choose(x, values, tables, static_layout):
    few_rows = dispatch.at_most(x.shape[0], xla_few_rows.FEW_ROWS)
    names, groups = OP.platform_implementations(), tables.groups
    if few_rows and dispatch.on(platforms.FEW_ROWS):
        # The kernels' tiles have more rows, and each layer's call is compiled by itself.
        names = []
    elif groups and not few_rows:
        # On a GPU a group is a product of the vendor's library.
        names = ["grouped"] if dispatch.on(platforms.LIBRARY_GROUPS) else [*names, "grouped"]
    if dispatch.on(platforms.STATIC_LAYOUTS) and static_layout and not few_rows:
        sides = xla_static.column_groups(static_layout), xla_static.row_groups(static_layout)
        # A layout of many different supports would compile as many dots.
        supports = sum(map(len, sides))
        if supports <= MAX_STATIC_GROUPS:
            return OP.choose(["xla_static"], x, values, static_layout)
    return OP.choose(names, x, values, tables)
