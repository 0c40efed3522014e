"""The products of a block-sparse MLP as one op, so that a kernel may fuse them."""

import importlib
import math
from collections.abc import Sequence

import jax
import numpy as np

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels import dispatch
from sparse_dataflow.kernels.block_sparse_matmul import api as matmul
from sparse_dataflow.kernels.block_sparse_matmul import xla_few_rows
from sparse_dataflow.kernels.gelu.api import gelu
from sparse_dataflow.sparsity.layout import LayoutTables

_KERNELS = {
    "pallas_tpu_grouped": "tpu",
    "pallas_tpu": "tpu",
    "pallas_hopper": "gpu",
    "xla_static": "cpu",
}
"""Module of each fused implementation -> the platform that it runs on.  Of several, the first that
does not refuse runs."""

_GATED = {"tpu": "pallas_tpu_grouped", "cpu": "xla_static"}
"""Platform -> the implementation that has a gate."""

IMPLEMENTATIONS = ("products", *_KERNELS)


def sparse_mlp(
    x: jax.Array,
    values_in: jax.Array,
    bias_in: jax.Array,
    values_out: jax.Array,
    tables_in: LayoutTables,
    tables_out: LayoutTables,
    implementation: str | None = None,
) -> jax.Array:
    """Compute gelu(x W_in + bias_in) W_out; differentiable in the first four arguments.

    Args:
      x: float [..., in_features].
      values_in: stored blocks of W_in, [nnz, block, block].
      bias_in: [hidden_features].
      values_out: stored blocks of W_out.
      tables_in: layout of W_in; see `block_sparse_matmul`.
      tables_out: layout of W_out.
      implementation: one of IMPLEMENTATIONS, or None to choose by platform and layouts.
        "products" runs two block-sparse matmuls; "pallas_tpu_grouped" and "pallas_tpu" keep the
        hidden layer in VMEM, of equal groups and where that is faster; "pallas_hopper" fuses the
        GELU and its derivative into the products; "xla_static" runs group by group, of concrete
        tables whose groups of W_out each read the hidden features of one group of W_in.

    Returns:
      [..., out_features] in x's dtype.

    Raises:
      UserError: if shapes disagree or a named implementation cannot run.
    """
    tables_in, tables_out = _checked(x, (values_in, values_out), (tables_in, tables_out))
    features = len(tables_in.in_index) * values_in.shape[-1]
    if bias_in.shape != (features,):
        raise UserError(f"bias_in has shape {bias_in.shape}; legal: ({features},).")
    flat = x.reshape(-1, x.shape[-1])
    stored = (values_in, values_out, tables_in, tables_out)
    if implementation not in (None, *IMPLEMENTATIONS):
        raise UserError(
            f"implementation {implementation!r} is unknown; legal: {', '.join(IMPLEMENTATIONS)}."
        )
    if implementation is None:
        implementation = _choose(flat, *stored)
    elif reason := _refusal(implementation, flat, *stored):
        raise UserError(f"implementation {implementation!r} cannot run: {reason} Legal: products.")
    if implementation == "products":
        hidden = matmul.block_sparse_matmul(x, values_in, tables_in) + bias_in
        return matmul.block_sparse_matmul(gelu(hidden.astype(x.dtype)), values_out, tables_out)
    operands = (flat, values_in, bias_in, values_out)
    y = _import_kernels(implementation).sparse_mlp(*operands, tables_in, tables_out)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def gated_sparse_mlp(
    x: jax.Array,
    values: Sequence[jax.Array],
    tables: Sequence[LayoutTables],
    activation: str,
) -> jax.Array | None:
    """Compute (activation(x W_gate) * x W_in) W_out as one op; None if no implementation has it.

    "pallas_tpu_grouped" and "xla_static" have it.  The layouts of W_gate and W_in must be equal.

    Args:
      x: float [..., in_features].
      values: stored blocks of W_gate, W_in and W_out, [nnz, block, block] each.
      tables: layouts of W_gate, W_in and W_out; see `block_sparse_matmul`.
      activation: such as "silu" or "gelu".

    Returns:
      [..., out_features] in x's dtype, differentiable in x and values.

    Raises:
      UserError: if shapes disagree.
    """
    platform = dispatch.platform()
    if not (name := _GATED.get(platform)) or _has_few_rows(x):
        return None
    values_gate, values_in, values_out = values
    tables_gate, tables_in, tables_out = _checked(x, values, tables)
    flat, kernels = x.reshape(-1, x.shape[-1]), _import_kernels(name)
    if activation not in kernels.ACTIVATIONS:
        reason = f"the activation is {activation}; legal: {', '.join(kernels.ACTIVATIONS)}."
    elif values_gate.shape != values_in.shape or not _equal_layouts(tables_gate, tables_in):
        reason = "the layouts of W_gate and W_in differ, or are shards of layouts."
    else:
        operands = flat, values_in, values_out, tables_in, tables_out
        reason = kernels.refusal(*operands, gated=True) or _sharding_refusal(name)
    chosen = "products" if reason else name
    dispatch.log_choice("gated_sparse_mlp", chosen, platform, reason)
    if reason:
        return None
    y = kernels.sparse_mlp(
        *(flat, values_in, None, values_out, tables_in, tables_out),
        values_gate=values_gate,
        activation=activation,
    )
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _equal_layouts(first, second):
    """Return whether two layouts are equal for certain.

    Groups tell the layout of traced tables, except in a shard, where tables tell the first group.
    """
    arrays = *first.arrays, *second.arrays
    if all(isinstance(array, np.ndarray) for array in arrays):
        return all(map(np.array_equal, first.arrays, second.arrays))
    groups = first.groups
    return (
        groups is not None
        and groups == second.groups
        and groups.count == groups.in_parts == groups.out_parts
    )


def _checked(x, values, tables):
    """Checks the weights into the hidden layer and the last one, out of it.

    Returns:
      The tables, with the groups of concrete ones.
    """
    features = len(tables[0].in_index) * values[0].shape[-1]
    hidden = jax.ShapeDtypeStruct((0, features), x.dtype)
    inputs = [x] * (len(values) - 1) + [hidden]
    layouts = [matmul.check_operands(*each) for each in zip(inputs, values, tables)]
    return [
        each._replace(groups=layout.groups) if layout else each
        for layout, each in zip(layouts, tables)
    ]


def _choose(flat, *stored):
    """Return the first implementation of the target platform that does not refuse."""
    platform, reasons = dispatch.platform(), []
    names = [name for name, required in _KERNELS.items() if required == platform]
    # A GPU multiplies groups by dense products of the vendor's library.
    if _has_few_rows(flat) or (platform == "gpu" and all(tables.groups for tables in stored[2:])):
        names = []
    for name in [*names, "products"]:
        reason = _refusal(name, flat, *stored)
        if not reason:
            break
        reasons.append(reason)
    dispatch.log_choice("sparse_mlp", name, platform, " ".join(reasons))
    return name


def _has_few_rows(x):
    """Whether a CPU has products of their own for so few rows of x [..., features]."""
    return dispatch.platform() == "cpu" and math.prod(x.shape[:-1]) <= xla_few_rows.FEW_ROWS


def _refusal(name, flat, *stored):
    """Return why an implementation cannot run here; empty if it can."""
    if name == "products":
        return ""
    required = _KERNELS[name]
    if dispatch.platform() != required:
        return f"it runs on {required}, and this is {dispatch.platform()}."
    return _import_kernels(name).refusal(flat, *stored) or _sharding_refusal(name)


def _sharding_refusal(name):
    """Return why a Pallas kernel cannot run here; empty for one that can, and for plain XLA."""
    return "" if name == "xla_static" else dispatch.sharding_refusal()


def _import_kernels(name):
    return importlib.import_module(f"{__package__}.{name}")
