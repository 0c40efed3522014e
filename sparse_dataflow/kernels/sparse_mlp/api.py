"""Two block-sparse products around a GELU as one op, so that a kernel may fuse them."""

import importlib

import jax

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels import dispatch
from sparse_dataflow.kernels.block_sparse_matmul import api as matmul
from sparse_dataflow.kernels.gelu.api import gelu
from sparse_dataflow.sparsity.layout import LayoutTables

_KERNELS = {"pallas_tpu_grouped": "tpu", "pallas_tpu": "tpu", "pallas_hopper": "gpu"}
"""Module of each Mosaic implementation -> the platform that it runs on.  Of several, the first that
does not refuse runs."""

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
        GELU and its derivative into the products.

    Returns:
      [..., out_features] in x's dtype.

    Raises:
      UserError: if shapes disagree or a named implementation cannot run.
    """
    tables_in, tables_out = _check(x, values_in, bias_in, values_out, tables_in, tables_out)
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


def _check(x, values_in, bias_in, values_out, tables_in, tables_out):
    """Checks the operands; returns the tables, with the groups of concrete ones."""
    features = len(tables_in.in_index) * values_in.shape[-1]
    hidden = jax.ShapeDtypeStruct((0, features), x.dtype)
    layouts = [
        matmul.check_operands(x, values_in, tables_in),
        matmul.check_operands(hidden, values_out, tables_out),
    ]
    if bias_in.shape != (features,):
        raise UserError(f"bias_in has shape {bias_in.shape}; legal: ({features},).")
    return [
        tables._replace(groups=layout.groups) if layout else tables
        for layout, tables in zip(layouts, (tables_in, tables_out))
    ]


def _choose(flat, *stored):
    """Return the first implementation of the target platform that does not refuse."""
    platform, reasons = dispatch.platform(), []
    names = [name for name, required in _KERNELS.items() if required == platform]
    if platform == "gpu" and all(tables.groups for tables in stored[2:]):
        names = []  # Dense products of the vendor's library.
    for name in [*names, "products"]:
        reason = _refusal(name, flat, *stored)
        if not reason:
            break
        reasons.append(reason)
    dispatch.log_choice("sparse_mlp", name, platform, " ".join(reasons))
    return name


def _refusal(name, flat, *stored):
    """Return why an implementation cannot run here; empty if it can."""
    if name == "products":
        return ""
    required = _KERNELS[name]
    if dispatch.platform() != required:
        return f"it runs on {required}, and this is {dispatch.platform()}."
    return _import_kernels(name).refusal(flat, *stored) or dispatch.sharding_refusal()


def _import_kernels(name):
    return importlib.import_module(f"{__package__}.{name}")
