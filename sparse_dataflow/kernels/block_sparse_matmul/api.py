"""The block-sparse matmul: one function that dispatches to one implementation per platform."""

import functools
import importlib
import math

import jax
import numpy as np

from sparse_dataflow.config.model import PRECISIONS
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels import dispatch
from sparse_dataflow.kernels.block_sparse_matmul import (
    grouped,
    reference,
    xla,
    xla_few_rows,
    xla_static,
)
from sparse_dataflow.sparsity.layout import BlockLayout, LayoutTables, check_shapes

_KERNELS = {
    "pallas_tpu_grouped": ("tpu", "tpu_grouped.api"),
    "pallas_tpu": ("tpu", "tpu.api"),
    "pallas_hopper": ("gpu", "hopper.api"),
    "pallas_triton": ("gpu", "pallas_triton"),
}
"""Pallas implementation -> the platform that it runs on, and its module.  Of several on a platform,
the first that does not refuse runs."""

_GROUPED = ("grouped", "pallas_tpu_grouped")
"""Implementations of layouts of equal groups."""

IMPLEMENTATIONS = ("reference", "grouped", "xla", "xla_static", *_KERNELS)

MAX_STATIC_GROUPS = 128
"""Most groups of equal support, over columns and rows, that are specialised.  Each group adds about
0.05 s of compile time on a laptop."""


def block_sparse_matmul(
    x: jax.Array,
    values: jax.Array,
    layout: BlockLayout | LayoutTables,
    implementation: str | None = None,
    precision: str = PRECISIONS[0],
) -> jax.Array:
    """Compute `x @ W` where only some blocks of W are stored.

    Differentiable in x and values in reverse mode, and in jax.vmap over both. The Pallas kernels
    have first derivatives alone.

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
        block_sparse_matmul, implementation=implementation, precision=precision
    )
    if static_layout is None:
        y = dispatch.over_auto_axes(product, x, values, layout)
        x, values, layout = dispatch.equally_varying(x, values, layout)
    else:
        specialised = functools.partial(product, layout=layout)
        y = dispatch.over_auto_axes(specialised, x, values)
        x, values = dispatch.equally_varying(x, values)
    if y is not None:
        return y
    tables = layout.tables() if isinstance(layout, BlockLayout) else layout
    tokens = math.prod(x.shape[:-1])
    flat = jax.numpy.reshape(x, (tokens, x.shape[-1]))
    groups = static_layout.groups if static_layout else tables.groups
    if precision != PRECISIONS[0]:
        return _quantized(flat, values, tables, groups, implementation, precision).reshape(
            *x.shape[:-1], -1
        )
    name = implementation or _choose(flat, values, tables, static_layout, groups)
    _check_implementation(name, static_layout, groups)
    if name == "reference":
        y = reference.block_sparse_matmul(flat, values, tables)
    elif name == "xla":
        y = xla.block_sparse_matmul(flat, values, jax.tree.map(jax.numpy.asarray, tables))
    elif name in _GROUPED:
        assert groups is not None
        products = None if name == "grouped" else _import_kernels(name).products
        y = grouped.block_sparse_matmul(flat, values, tables, groups, products)
    elif name == "xla_static":
        y = xla_static.block_sparse_matmul(flat, values, static_layout)
    else:
        y = _import_kernels(name).block_sparse_matmul(flat, values, tables)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _check_implementation(name, layout, groups):
    """Raises UserError where an implementation is unknown, or cannot run such a layout here."""
    if name not in IMPLEMENTATIONS:
        raise UserError(f"implementation {name!r} is unknown; legal: {', '.join(IMPLEMENTATIONS)}.")
    reason, platform = "", dispatch.platform()
    if name in _KERNELS and platform != _KERNELS[name][0]:
        reason = f"runs on {_KERNELS[name][0]}, and this is {platform}"
    elif name in _GROUPED and groups is None:
        reason = "needs a layout of equal groups that cannot change"
    elif name == "xla_static" and layout is None:
        reason = "needs concrete numpy tables, not traced ones"
    if reason:
        raise UserError(f"implementation {name!r} {reason}; legal here: reference, xla.")


def _quantized(x, values, tables, groups, implementation, precision):
    """Multiplies the groups of a layout with quantised operands, as one batched dot."""
    if precision not in PRECISIONS:
        raise UserError(f"precision {precision!r} is unknown; legal: {', '.join(PRECISIONS)}.")
    if implementation not in (None, "grouped"):
        raise UserError(
            f"implementation {implementation!r} does not quantise its operands; legal with "
            f"precision={precision}: grouped."
        )
    if groups is None:
        raise UserError(
            f"precision={precision} needs a layout of equal groups that cannot change; legal: the "
            "patterns monarch and shuffle, or precision=compute_dtype."
        )
    dispatch.log_choice("block_sparse_matmul", f"grouped in {precision}", dispatch.platform())
    products = functools.partial(grouped.dense_products, precision=precision)
    return grouped.block_sparse_matmul(x, values, tables, groups, products)


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
    if len(values) > stored or (layout and len(values) < stored):
        raise UserError(f"values have {len(values)} blocks; the layout stores {stored}.")
    features = inputs * block
    if x.ndim < 1 or x.shape[-1] != features:
        raise UserError(f"x has shape {x.shape}; the layout reads [..., {features}].")
    if x.dtype != values.dtype or not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
        raise UserError(f"x is {x.dtype} and values are {values.dtype}; legal: one float dtype.")
    return layout


def _choose(x, values, tables, layout, groups):
    platform, few_rows = dispatch.platform(), dispatch.at_most(x.shape[0], xla_few_rows.FEW_ROWS)
    names = [kernel for kernel, (required, _) in _KERNELS.items() if required == platform]
    if groups and not few_rows:
        # On a GPU a group is a product of the vendor's library.
        names = ["grouped"] if platform == "gpu" else [*names, "grouped"]
    if platform == "cpu" and layout and not few_rows:
        supports = len(xla_static.column_groups(layout)) + len(xla_static.row_groups(layout))
        names = ["xla_static", *names] if supports <= MAX_STATIC_GROUPS else names
    reasons = []
    for name in [*names, "xla"]:
        reason = _refusal(name, x, values, tables, groups)
        if not reason:
            break
        reasons.append(reason)
    dispatch.log_choice("block_sparse_matmul", name, platform, " ".join(reasons))
    return name


def _refusal(name, x, values, tables, groups):
    """Return why an implementation of this platform cannot run; empty if it can."""
    if name not in _KERNELS:
        return ""
    kernels = _import_kernels(name)
    if name not in _GROUPED:
        reason = kernels.refusal(x, values, tables)
    elif groups is None:
        reason = "the layout has no equal groups, or may change."
    else:
        shapes = grouped.operand_shapes(x, values, tables, groups)
        block = values.shape[-1]
        groups = kernels.lane_groups(groups, shapes[1], block)
        reason = kernels.refusal(*shapes, groups, block=block)
    return reason or dispatch.sharding_refusal()


def _import_kernels(name):
    """Import lazily: the Mosaic compilers take half a second to import."""
    return importlib.import_module(f"{__package__}.{_KERNELS[name][1]}")
