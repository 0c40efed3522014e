"""The sparse MLP of aligned groups on a TPU: the hidden layer stays in VMEM.

Groups are aligned if group g of W_out reads exactly the hidden features that group g of W_in
writes.  Then the MLP is a batch of dense MLPs.  A gradient's forward pass also writes the
pre-activations, as single products would; a forward pass alone writes nothing but y.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul import fused, grouped
from sparse_dataflow.kernels.block_sparse_matmul.tpu.tuning import LANES, limits
from sparse_dataflow.kernels.block_sparse_matmul.tpu_grouped import api as products
from sparse_dataflow.kernels.block_sparse_matmul.tpu_grouped.windows import Columns
from sparse_dataflow.kernels.dispatch import Shaped
from sparse_dataflow.kernels.sparse_mlp import pallas_tpu_grouped_kernels as kernels
from sparse_dataflow.kernels.sparse_mlp import tuning_grouped
from sparse_dataflow.kernels.sparse_mlp.tuning_grouped import GroupedMlpTuning
from sparse_dataflow.sparsity.layout import Groups, LayoutTables

ACTIVATIONS = tuple(kernels.ACTIVATIONS)
"""Legal activations."""


@dataclasses.dataclass(frozen=True)
class _Options:
    """Static options of the op: tiles, columns of x, hidden features and y, the activation."""

    tuning: GroupedMlpTuning | None
    columns: tuple[Columns, Columns, Columns]
    activation: str


def sparse_mlp(
    x: jax.Array,
    values_in: jax.Array,
    bias_in: jax.Array | None,
    values_out: jax.Array,
    tables_in: LayoutTables,
    tables_out: LayoutTables,
    values_gate: jax.Array | None = None,
    activation: str = "gelu",
) -> jax.Array:
    """Compute the MLP of `grouped_mlp` from stored blocks; arguments as in `api.sparse_mlp`.

    Args:
      x: see `api.sparse_mlp`, also for the next five.
      values_in: of W_in.
      bias_in: of W_in; None for none.
      values_out: of W_out.
      tables_in: layout of W_in and W_gate, with groups.
      tables_out: layout of W_out, with groups.
      values_gate: stored blocks of W_gate; None for an MLP without a gate.
      activation: key of `pallas_tpu_grouped_kernels.ACTIVATIONS`.

    Raises:
      UserError: if `refusal` gives a reason.
    """
    groups_in, groups_out = tables_in.groups, tables_out.groups
    block = values_in.shape[-1]
    assert groups_in and groups_out
    weight_in = grouped.group_values(values_in, tables_in, groups_in)
    x = grouped.own_inputs(x, tables_in, groups_in, block)
    y = grouped_mlp(
        products.on_lanes(x, groups_in, weight_in, block),
        weight_in,
        bias_in,
        grouped.group_values(values_out, tables_out, groups_out),
        products.lane_groups(groups_in, weight_in, block),
        groups_out,
        block=block,
        weight_gate=(
            None if values_gate is None else grouped.group_values(values_gate, tables_in, groups_in)
        ),
        activation=activation,
    )
    return grouped.among_outputs(y, tables_out, groups_out, block)


def refusal(
    x: Shaped,
    values_in: Shaped,
    values_out: Shaped,
    tables_in: LayoutTables,
    tables_out: LayoutTables,
    gated: bool = False,
) -> str:
    """Return why the target TPU cannot run these operands; empty if it can."""
    groups_in, groups_out = tables_in.groups, tables_out.groups
    if not groups_in or not groups_out:
        return "a layout has no equal groups, or may change."
    block = values_in.shape[-1]
    if values_out.shape[-1] != block:
        return f"the blocks have sides of {block} and {values_out.shape[-1]}; legal: one side."
    x, weight_in = grouped.operand_shapes(x, values_in, tables_in, groups_in)
    hidden = jax.ShapeDtypeStruct((len(x), len(tables_in.in_index) * block), x.dtype)
    weight_out = grouped.operand_shapes(hidden, values_out, tables_out, groups_out)[1]
    groups_in = products.lane_groups(groups_in, weight_in, block)
    groups = groups_in, groups_out
    return groups_refusal(x, weight_in, weight_out, *groups, block=block, gated=gated)


def grouped_mlp(
    x: jax.Array,
    weight_in: jax.Array,
    bias_in: jax.Array | None,
    weight_out: jax.Array,
    groups_in: Groups,
    groups_out: Groups,
    *,
    block: int,
    weight_gate: jax.Array | None = None,
    activation: str = "gelu",
    tuning: GroupedMlpTuning | None = None,
) -> jax.Array:
    """Compute activation(x W_in + bias_in) W_out; differentiable in the arrays.

    With a gate: ((x W_in + bias_in) * activation(x W_gate)) W_out.

    Args:
      x: bfloat16 or float32 [tokens, in_features].
      weight_in: [count, inputs, hidden] of each group, in x's dtype.
      bias_in: [hidden_features], any float dtype; None for none.
      weight_out: [count, hidden, outputs] of each group, in x's dtype.
      groups_in: groups of W_in, and of W_gate.
      groups_out: groups of W_out.
      block: features of a block.
      weight_gate: like weight_in; None for an MLP without a gate.
      activation: key of `pallas_tpu_grouped_kernels.ACTIVATIONS`.
      tuning: tile sizes; None for `default_tuning`.

    Returns:
      [tokens, out_features] in x's dtype; sums, bias and activation in float32.

    Raises:
      UserError: if `groups_refusal` gives a reason, or the bias has another shape.
    """
    gated, groups = weight_gate is not None, (groups_in, groups_out)
    if reason := groups_refusal(x, weight_in, weight_out, *groups, block=block, gated=gated):
        raise UserError(f"sparse_mlp on TPU: {reason}")
    if weight_gate is not None and weight_gate.shape != weight_in.shape:
        raise UserError(f"weight_gate has shape {weight_gate.shape}; legal: {weight_in.shape}.")
    if activation not in ACTIVATIONS:
        legal = ", ".join(ACTIVATIONS)
        raise UserError(f"activation {activation!r} is unknown; legal: {legal}.")
    left, hidden = products.sides_of(weight_in, groups_in, block)
    right = products.sides_of(weight_out, groups_out, block)[1]
    if bias_in is not None and bias_in.shape != (hidden.features,):
        raise UserError(f"bias_in has shape {bias_in.shape}; legal: ({hidden.features},).")
    if len(x) == 0:
        return jnp.zeros((0, right.features), x.dtype)
    tuning = tuning or default_tuning(x, weight_in, weight_out, gated)
    assert tuning is not None
    options = _Options(tuning, (left, hidden, right), activation)
    weights_in = (weight_in,) if weight_gate is None else (weight_in, weight_gate)
    return _mlp(options, x, weights_in, bias_in, weight_out)


def groups_refusal(
    x: Shaped,
    weight_in: Shaped,
    weight_out: Shaped,
    groups_in: Groups,
    groups_out: Groups,
    *,
    block: int,
    gated: bool = False,
) -> str:
    """Return why the target TPU cannot run these operands; empty if it can."""
    aligned = (groups_in.count, groups_in.out_run) == (groups_out.count, groups_out.in_run)
    if not aligned or weight_in.shape[2] != weight_out.shape[1]:
        return (
            f"the outputs of {groups_in} are not the inputs of {groups_out}; "
            "legal: as many groups, with the same hidden blocks."
        )
    hidden = jax.ShapeDtypeStruct((len(x), len(weight_out) * weight_out.shape[1]), x.dtype)
    for reason in (
        products.refusal(x, weight_in, groups_in, block=block),
        products.refusal(hidden, weight_out, groups_out, block=block),
    ):
        if reason:
            return reason
    if len(x) and default_tuning(x, weight_in, weight_out, gated) is None:
        return (
            f"the weights {weight_in.shape[1:]} and {weight_out.shape[1:]} of a group do not fit "
            "VMEM; legal: more groups."
        )
    return ""


def default_tuning(
    x: Shaped, weight_in: Shaped, weight_out: Shaped, gated: bool = False
) -> GroupedMlpTuning | None:
    """Return the tile sizes for these shapes on the target TPU; None if no tile fits VMEM."""
    _, inputs, hidden = weight_in.shape
    group = tuning_grouped.MlpGroup(inputs, hidden, weight_out.shape[2], 2 if gated else 1)
    return tuning_grouped.choose_tuning(products.padded_tokens(x), group, x.dtype.itemsize)


@fused.batchable
def _product(options, x, weights_in, bias_in, weight_out, *, with_preactivation):
    left, hidden, right = options.columns
    return kernels.forward(
        products.pad_rows(x, LANES if with_preactivation else 0),
        weights_in,
        None if bias_in is None else products.by_group(bias_in, hidden),
        weight_out,
        (left, right),
        options.tuning.forward,
        activation=options.activation,
        with_preactivation=with_preactivation,
        **limits(options.tuning),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(options, *operands):
    return _product(options, *operands, with_preactivation=False)[0][: len(operands[0])]


def _forward(options, *operands):
    y, preactivation = _product(options, *operands, with_preactivation=True)
    return y[: len(operands[0])], (operands, preactivation)


def _backward(options, saved, dy):
    operands, preactivation = saved
    return _gradients(options, *operands, preactivation, dy)


@fused.batchable
def _gradients(options, x, weights_in, bias_in, weight_out, preactivation, dy):
    left, hidden, right = options.columns
    dx, dweights_in, dbias, dweight_out = kernels.backward(
        products.pad_rows(x, LANES),
        products.pad_rows(dy, LANES),
        preactivation,
        weights_in,
        weight_out,
        (left, right),
        options.tuning.backward,
        activation=options.activation,
        biased=bias_in is not None,
        **limits(options.tuning),
    )
    if dbias is not None:
        dbias = products.from_group(dbias, hidden).astype(bias_in.dtype)
    return dx[: len(x)], dweights_in, dbias, dweight_out


_mlp.defvjp(_forward, _backward)
