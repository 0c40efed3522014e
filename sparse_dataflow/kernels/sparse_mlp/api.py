"""Two block-sparse products around a GELU as one op: the hidden activations stay in chunks.

A chunk is a run of hidden blocks that one dot of `mlp_in` makes and one dot of `mlp_out` reads
(patterns put them side by side, see `patterns.monarch`); as a whole the hidden layer is never
assembled, sliced or, but for its pre-activation, kept.
"""

import functools
import importlib

import jax
import jax.numpy as jnp

from sparse_dataflow.errors import UserError
from sparse_dataflow.kernels import dispatch
from sparse_dataflow.kernels.block_sparse_matmul import api as matmul
from sparse_dataflow.kernels.block_sparse_matmul import xla_static
from sparse_dataflow.kernels.gelu.api import gelu, value_and_derivative
from sparse_dataflow.sparsity.layout import BlockLayout, LayoutTables

_KERNELS = {"pallas_tpu": "tpu", "pallas_hopper": "gpu"}
"""Mosaic kernels, each a module of this name: the platform that they run on."""

IMPLEMENTATIONS = ("products", "chunked", *_KERNELS)


def sparse_mlp(
    x: jax.Array,
    values_in: jax.Array,
    bias_in: jax.Array,
    values_out: jax.Array,
    tables_in: LayoutTables,
    tables_out: LayoutTables,
    implementation: str | None = None,
) -> jax.Array:
    """gelu(x W_in + bias_in) W_out, differentiable in its first four arguments.

    Args:
      x: float [..., in_features].
      values_in: stored blocks of W_in, [nnz, block, block].
      bias_in: [hidden_features].
      values_out: stored blocks of W_out.
      tables_in: layout of W_in; see `block_sparse_matmul`.
      tables_out: layout of W_out.
      implementation: one of IMPLEMENTATIONS, or None to choose by platform and layouts:
        "products" are two block-sparse matmuls; "chunked" is for known layouts of equal hidden
        groups on a CPU; "pallas_tpu" keeps the hidden layer in VMEM where that pays;
        "pallas_hopper" puts the GELU and its derivative into the products' epilogues.

    Returns:
      [..., out_features] in x's dtype.

    Raises:
      UserError: if shapes disagree or a named implementation cannot run.
    """
    _check(x, values_in, bias_in, values_out, tables_in, tables_out)
    flat = x.reshape(-1, x.shape[-1])
    operands = (flat, values_in, bias_in, values_out)
    stored = (values_in, values_out, tables_in, tables_out)
    if implementation not in (None, *IMPLEMENTATIONS):
        raise UserError(
            f"implementation {implementation!r} is unknown; legal: {', '.join(IMPLEMENTATIONS)}."
        )
    if implementation is None:
        implementation = _choose(flat, *stored)
    elif reason := _refusal(implementation, flat, *stored):
        raise UserError(f"implementation {implementation!r} cannot run: {reason} Legal: products.")
    if implementation == "chunked":
        layouts = _layouts(values_in, tables_in, tables_out)
        y = _chunked_mlp(*operands, *layouts)
    elif implementation in _KERNELS:
        y = _kernels(implementation).sparse_mlp(*operands, tables_in, tables_out)
    else:
        hidden = matmul.block_sparse_matmul(x, values_in, tables_in) + bias_in
        return matmul.block_sparse_matmul(gelu(hidden.astype(x.dtype)), values_out, tables_out)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _check(x, values_in, bias_in, values_out, tables_in, tables_out):
    matmul.check_operands(x, values_in, tables_in)
    features = len(tables_in.in_index) * values_in.shape[-1]
    matmul.check_operands(jax.ShapeDtypeStruct((0, features), x.dtype), values_out, tables_out)
    if bias_in.shape != (features,):
        raise UserError(f"bias_in has shape {bias_in.shape}; mlp_in makes ({features},).")


def _choose(flat, *stored):
    """The implementation of the platform compiled for, or products where it refuses."""
    platform = dispatch.platform()
    best = {"cpu": "chunked", **{home: name for name, home in _KERNELS.items()}}[platform]
    reason = _refusal(best, flat, *stored)
    name = "products" if reason else best
    dispatch.log_choice("sparse_mlp", name, platform, reason)
    return name


def _refusal(name, flat, *stored):
    """Why an implementation cannot run here; empty where it can."""
    if name == "products":
        return ""
    if name == "chunked":
        return _unchunked(*stored)
    home = _KERNELS[name]
    if dispatch.platform() != home:
        return f"it runs on {home}, and this is {dispatch.platform()}."
    return _kernels(name).refusal(flat, *stored) or dispatch.partitioned()


def _kernels(name):
    return importlib.import_module(f"{__package__}.{name}")


def _unchunked(values_in, values_out, tables_in, tables_out):
    if not (matmul.is_concrete(tables_in) and matmul.is_concrete(tables_out)):
        return "it needs concrete numpy tables, and these are traced."
    if values_in.shape[-1] != values_out.shape[-1]:
        return "it needs one block for both layouts."
    if not _chunks(*_layouts(values_in, tables_in, tables_out)):
        return "the two layouts do not have the same few hidden groups."
    return ""


def _layouts(values_in, tables_in, tables_out):
    return tuple(
        matmul.layout_of(tables, values_in.shape[-1]) for tables in (tables_in, tables_out)
    )


@functools.lru_cache(maxsize=1024)
def _chunks(layout_in: BlockLayout, layout_out: BlockLayout):
    """((input blocks, hidden blocks, output blocks), ...); () where the groups differ, or an input
    or output block belongs to more than one of them."""
    made = {hidden: rows for rows, hidden in xla_static.column_groups(layout_in)}
    read = {hidden: cols for cols, hidden in xla_static.row_groups(layout_out)}
    inputs, outputs = sum(made.values(), ()), sum(read.values(), ())
    once = sorted(inputs) == list(range(layout_in.in_blocks)) and sorted(outputs) == list(
        range(layout_out.out_blocks)
    )
    if made.keys() != read.keys() or not once or len(made) > matmul.MAX_STATIC_GROUPS // 2:
        return ()
    return tuple((made[hidden], hidden, read[hidden]) for hidden in made)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _chunked_mlp(x, values_in, bias_in, values_out, layout_in, layout_out):
    return _forward(x, values_in, bias_in, values_out, layout_in, layout_out)[0]


def _forward(x, values_in, bias_in, values_out, layout_in, layout_out):
    block = layout_in.block
    pieces, kept = [], []
    for rows, hidden, cols in _chunks(layout_in, layout_out):
        weight_in = xla_static.group_weight(values_in, layout_in, rows, hidden)
        weight_out = xla_static.group_weight(values_out, layout_out, hidden, cols)
        bias = xla_static.take(bias_in[None], hidden, block)
        pre = _dot(xla_static.take(x, rows, block), weight_in, 1, 0) + bias
        pieces.append((cols, _dot(gelu(pre), weight_out, 1, 0)))
        kept.append(pre)
    y = xla_static.assemble(pieces, block)
    return y, (x, values_in, bias_in, values_out, kept)


def _backward(layout_in, layout_out, saved, dy):
    x, values_in, bias_in, values_out, kept = saved
    block = layout_in.block
    dx_pieces, dbias_pieces, dw_in, dw_out = [], [], [], []
    for (rows, hidden, cols), pre in zip(_chunks(layout_in, layout_out), kept):
        weight_in = xla_static.group_weight(values_in, layout_in, rows, hidden)
        weight_out = xla_static.group_weight(values_out, layout_out, hidden, cols)
        dy_chunk = xla_static.take(dy, cols, block)
        h, slope = value_and_derivative(pre)
        dpre = _dot(dy_chunk, weight_out, 1, 1) * slope
        dw_out.append((hidden, cols, _wide_dot(h, dy_chunk)))
        dw_in.append((rows, hidden, _wide_dot(xla_static.take(x, rows, block), dpre)))
        dbias_pieces.append((hidden, jnp.sum(dpre, axis=0, keepdims=True)))
        dx_pieces.append((rows, _dot(dpre, weight_in, 1, 1)))
    dx = xla_static.assemble(dx_pieces, block)
    dbias = xla_static.assemble(dbias_pieces, block)[0].astype(bias_in.dtype)
    dvalues_in = xla_static.stored_gradient(dw_in, layout_in).astype(values_in.dtype)
    dvalues_out = xla_static.stored_gradient(dw_out, layout_out).astype(values_out.dtype)
    return dx.astype(x.dtype), dvalues_in, dbias, dvalues_out


_chunked_mlp.defvjp(_forward, _backward)


def _dot(a, b, a_axis, b_axis):
    return xla_static.dot(a, b, a_axis, b_axis).astype(a.dtype)


def _wide_dot(a, b):
    return xla_static.dot(a, b, 0, 0)
