"""The block-sparse matmul: one function, one implementation chosen per platform."""

import functools
import importlib
import math

import jax
import numpy as np

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels import dispatch
from sparse_dataflow.kernels.block_sparse_matmul import reference, xla, xla_few_rows, xla_static
from sparse_dataflow.sparsity.layout import BlockLayout, LayoutTables, check_shapes

_KERNELS = {"pallas_tpu": "tpu", "pallas_hopper": "gpu"}
"""Mosaic kernels, each a module of this name: the platform that they run on."""

IMPLEMENTATIONS = ("reference", "xla", "xla_static", *_KERNELS)

MAX_STATIC_GROUPS = 128
"""Groups of equal support, over columns and rows, past which specialising costs too much compile
time (about 0.05 s each on a laptop)."""


def block_sparse_matmul(
    x: jax.Array, values: jax.Array, tables: LayoutTables, implementation: str | None = None
) -> jax.Array:
    """`x @ W` where only some blocks of W are stored; differentiable in x and values.

    The gradient of values exists at stored blocks only; nothing of W's dense size is made.

    Args:
      x: float [..., in_features].
      values: float [nnz, block, block], as `BlockLayout` orders them.
      tables: `BlockLayout.tables()`.  Concrete (numpy) tables may be specialised at trace time;
        traced ones are data, so that a changed layout runs in the same program.
      implementation: one of IMPLEMENTATIONS, or None to choose by platform and tables.

    Returns:
      [..., out_features] in x's dtype; products accumulate in float32 (float64 for float64).

    Raises:
      UserError: if shapes disagree or a named implementation cannot run.
    """
    check_operands(x, values, tables)
    tokens = math.prod(x.shape[:-1])
    flat = x.reshape(tokens, x.shape[-1])
    name = implementation or _choose(flat, values, tables)
    if name == "reference":
        y = reference.block_sparse_matmul(flat, values, tables)
    elif name == "xla":
        y = xla.block_sparse_matmul(flat, values, jax.tree.map(jax.numpy.asarray, tables))
    elif name == "xla_static":
        if not is_concrete(tables):
            raise UserError(
                "implementation 'xla_static' needs concrete numpy tables, and these are traced; "
                "legal here: reference, xla."
            )
        y = xla_static.block_sparse_matmul(flat, values, layout_of(tables, values.shape[-1]))
    elif name in _KERNELS:
        home = _KERNELS[name]
        if dispatch.platform() != home:
            raise UserError(
                f"implementation {name!r} runs on {home}, and this is {dispatch.platform()}; "
                "legal here: reference, xla."
            )
        y = _kernels(name).block_sparse_matmul(flat, values, tables)
    else:
        raise UserError(f"implementation {name!r} is unknown; legal: {', '.join(IMPLEMENTATIONS)}.")
    return y.reshape(*x.shape[:-1], y.shape[-1])


def is_concrete(tables: LayoutTables) -> bool:
    """Whether the tables are numpy arrays, known while tracing."""
    return all(isinstance(table, np.ndarray) for table in tables)


def check_operands(x: dispatch.Shaped, values: dispatch.Shaped, tables: LayoutTables) -> None:
    """Raises UserError where shapes or dtypes disagree, or concrete tables are no layout's."""
    if values.ndim != 3 or values.shape[1] != values.shape[2]:
        raise UserError(f"values have shape {values.shape}; legal: [nnz, block, block].")
    check_shapes(tables)
    stored = tables.in_slot.size
    if is_concrete(tables):
        stored = layout_of(tables, values.shape[-1]).nnz
    if len(values) > stored or (is_concrete(tables) and len(values) < stored):
        raise UserError(f"values hold {len(values)} blocks; the layout stores {stored}.")
    features = len(tables.out_index) * values.shape[-1]
    if x.ndim < 1 or x.shape[-1] != features:
        raise UserError(f"x has shape {x.shape}; the layout reads [..., {features}].")
    if x.dtype != values.dtype or not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
        raise UserError(f"x is {x.dtype} and values are {values.dtype}; legal: one float dtype.")


def _choose(x, values, tables):
    name, reason = "xla", ""
    for kernel, home in _KERNELS.items():
        if dispatch.platform() == home:
            reason = _kernels(kernel).refusal(x, values, tables) or dispatch.partitioned()
            name = "xla" if reason else kernel
    many = len(x) > xla_few_rows.FEW_ROWS
    if dispatch.platform() == "cpu" and is_concrete(tables) and many:
        layout = layout_of(tables, values.shape[-1])
        groups = len(xla_static.column_groups(layout)) + len(xla_static.row_groups(layout))
        name = "xla_static" if groups <= MAX_STATIC_GROUPS else "xla"
    dispatch.log_choice("block_sparse_matmul", name, dispatch.platform(), reason)
    return name


def _kernels(name):
    """Imported where they run: the compilers that they are written for take half a second."""
    return importlib.import_module(f"{__package__}.{name}")


def layout_of(tables: LayoutTables, block: int) -> BlockLayout:
    """The layout of concrete tables; cached by content."""
    return _cached_layout(tuple(t.tobytes() for t in tables), tuple(t.shape for t in tables), block)


@functools.lru_cache(maxsize=4096)
def _cached_layout(contents, shapes, block):
    arrays = [np.frombuffer(c, np.int32).reshape(s) for c, s in zip(contents, shapes)]
    return BlockLayout.from_tables(LayoutTables(*arrays), block)
