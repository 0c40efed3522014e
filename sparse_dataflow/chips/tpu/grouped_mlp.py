"""The sparse MLP of aligned groups on a TPU: the hidden layer stays in VMEM.

Groups are aligned if group g of W_out reads exactly the hidden features that group g of W_in
writes.  Then the MLP is a batch of dense MLPs.  A gradient's forward pass also writes the
pre-activations, as single products would; a forward pass alone writes nothing but y.
"""

import dataclasses

import jax
import jax.numpy as jnp

from sparse_dataflow.chips.tpu import grouped_mlp_kernels as kernels
from sparse_dataflow.chips.tpu import grouped_mlp_tuning as tuning_grouped
from sparse_dataflow.chips.tpu.grouped_matmul import api as products
from sparse_dataflow.chips.tpu.grouped_matmul.windows import Columns
from sparse_dataflow.chips.tpu.grouped_mlp_tuning import GroupedMlpTuning
from sparse_dataflow.chips.tpu.matmul.tuning import LANES, limits
from sparse_dataflow.core.layouts.layout import Groups
from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.activation import value_and_derivative
from sparse_dataflow.core.ops.block_sparse_matmul import grouped
from sparse_dataflow.core.ops.dispatch import Shaped
from sparse_dataflow.core.ops.sparse_mlp.mlp_op import Operands


@dataclasses.dataclass(frozen=True)
class _Options:
    """Static options of the op: tiles, columns of x, hidden features and y, the activation."""

    tuning: GroupedMlpTuning | None
    columns: tuple[Columns, Columns, Columns]
    activation: str


def run_sparse_mlp(mlp: Operands, *, tuning: GroupedMlpTuning | None = None) -> jax.Array:
    """Compute the MLP of `grouped_mlp` from stored blocks."""
    x, values_in, bias_in, values_out, tables_in, tables_out, values_gate, activation = mlp
    groups_in, groups_out = tables_in.groups, tables_out.groups
    # `sparse_mlp_refusal` refuses other layouts.
    assert groups_in and groups_out
    block = values_in.shape[-1]
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
        tuning=tuning,
    )
    return grouped.among_outputs(y, tables_out, groups_out, block)


def sparse_mlp_refusal(mlp: Operands) -> str:
    """Return why the target TPU cannot run these operands; empty if it can."""
    groups_in, groups_out = mlp.tables_in.groups, mlp.tables_out.groups
    if not groups_in or not groups_out:
        return "a layout has no equal groups, or may change."
    if reason := mlp.activation_refusal():
        return reason
    block, sides = mlp.values_in.shape[-1], {mlp.values_in.shape[-1], mlp.values_out.shape[-1]}
    if len(sides) > 1:
        return f"the blocks have sides of {sorted(sides)}; legal: one side."
    x, weight_in = grouped.operand_shapes(mlp.x, mlp.values_in, mlp.tables_in, groups_in)
    weight_out = grouped.operand_shapes(mlp.hidden, mlp.values_out, mlp.tables_out, groups_out)[1]
    groups_in = products.lane_groups(groups_in, weight_in, block)
    groups, gated = (groups_in, groups_out), mlp.values_gate is not None
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
      activation: name of a fused one in `config.activations`.
      tuning: tile sizes; None for `default_tuning`.

    Returns:
      [tokens, out_features] in x's dtype; sums, bias and activation in float32.
    """
    left, hidden = products.sides_of(weight_in, groups_in, block)
    right = products.sides_of(weight_out, groups_out, block)[1]
    tuning = tuning or default_tuning(x, weight_in, weight_out, weight_gate is not None)
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
    # [tokens, hidden features], between both products.
    hidden = jax.ShapeDtypeStruct((len(x), len(weight_out) * weight_out.shape[1]), x.dtype)
    for reason in (
        products.groups_refusal(x, weight_in, groups_in, block=block),
        products.groups_refusal(hidden, weight_out, groups_out, block=block),
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


@derivatives.batchable
def _product(options, x, weights_in, bias_in, weight_out, *, with_preactivation):
    left, hidden, right = options.columns
    return kernels.forward(
        # The backward pass needs 128 rows, and takes the pre-activation as it is written here.
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


def _value(options, *operands):
    return _product(options, *operands, with_preactivation=False)[0][: len(operands[0])]


def _forward(options, *operands):
    y, preactivation = _product(options, *operands, with_preactivation=True)
    return y[: len(operands[0])], (*operands, preactivation)


def _backward(options, saved, dy):
    return _gradients(options, *saved, dy)


@derivatives.batchable
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


def _products(options, x, weights_in, bias_in, weight_out):
    """Computes the MLP as single products."""
    left, middle, right = options.columns
    totals = [products.product(x, weight, (left, middle)) for weight in weights_in]
    totals[0] += 0 if bias_in is None else bias_in.astype(x.dtype)
    # The gate is the last one; without a gate, the only product has the activation.
    hidden = value_and_derivative(options.activation, totals[-1].astype(jnp.float32))[0]
    hidden = hidden * totals[0] if len(totals) > 1 else hidden
    return products.product(hidden.astype(x.dtype), weight_out, (middle, right))


_mlp = derivatives.differentiable(
    _value, _backward, forward=_forward, tangent=derivatives.tangent_of(_products)
)
