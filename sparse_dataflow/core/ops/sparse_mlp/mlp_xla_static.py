"""The block-sparse MLP in plain XLA, group by group, of layouts known at trace time.

Where each group of mlp_out reads the hidden blocks that one group of mlp_in computes (`monarch`),
the groups are MLPs by themselves.  The hidden layer is then never assembled or taken apart, which
is faster than two products (docs/evidence/performance.md).  One batched product over the groups is
as fast.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.core.config.remat import PROJECTION_OUTPUT
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.activation import activation as activation_op
from sparse_dataflow.core.ops.block_sparse_matmul import xla_static
from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import MAX_STATIC_GROUPS, check_operands
from sparse_dataflow.core.ops.matrix_product import dot
from sparse_dataflow.core.ops.sparse_mlp.mlp_op import Operands

Chain = tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
"""(Input blocks, hidden blocks, output blocks) of each group."""


def run_sparse_mlp(mlp: Operands) -> jax.Array:
    """Compute the MLP of concrete layouts; products accumulate in float32 or wider."""
    gate = [] if mlp.values_gate is None else [mlp.values_gate]
    values = (mlp.values_in, mlp.values_out, *gate)
    return _mlp((_layouts(mlp), mlp.activation), mlp.x, values, mlp.bias_in)


def sparse_mlp_refusal(mlp: Operands) -> str:
    """Return why the operands have no chain of groups or too many; empty if this can run them."""
    if reason := mlp.activation_refusal():
        return reason
    if not (layouts := _layouts(mlp)):
        return "a layout is data, or the blocks of the weights have two sides."
    if not (groups := chain(*layouts)):
        return "W_out does not read the hidden blocks of each group of W_in together."
    # Two products per group, each of which the compiler sees; see MAX_STATIC_GROUPS.
    if 2 * len(groups) > MAX_STATIC_GROUPS:
        return f"the layouts have {len(groups)} groups; legal: at most {MAX_STATIC_GROUPS // 2}."
    return ""


@functools.lru_cache(maxsize=4096)
def chain(layout_in: BlockLayout, layout_out: BlockLayout) -> Chain:
    """Return the groups that are MLPs by themselves; none unless all blocks belong to one."""
    outputs = {rows: cols for rows, cols in xla_static.column_groups(layout_out)}
    groups = [(*group, outputs.get(group[1], ())) for group in xla_static.column_groups(layout_in)]
    # All groups of W_in have readers, and W_out has no other groups.
    whole = all(rows and outs for rows, _, outs in groups) and len(groups) == len(outputs)
    # Every input block is read by exactly one group, so the dx of groups are put together, not
    # added.
    inputs = sorted(block for rows, _, _ in groups for block in rows)
    return tuple(groups) if whole and inputs == list(range(layout_in.in_blocks)) else ()


def _layouts(mlp):
    """Return both layouts, of one block size; None if a layout is data."""
    layout_in = check_operands(mlp.x, mlp.values_in, mlp.tables_in)
    layout_out = check_operands(mlp.hidden, mlp.values_out, mlp.tables_out)
    if layout_in is None or layout_out is None or layout_in.block != layout_out.block:
        return None
    return layout_in, layout_out


def _value(options, *operands):
    return _forward(options, *operands)[0]


def _forward(options, x, values, bias):
    """The output, and what the gradient reads: the operands and the inputs of the activation."""
    layouts, activation = options
    layout_in, _ = layouts
    pieces, inputs = [], []
    for rows, hidden, outs in chain(*layouts):
        weight_in, weight_out, *gate = _group_weights(layouts, values, (rows, hidden, outs))
        x_group = xla_static.take(x, rows, layout_in.block)
        before = [dot(x_group, weight, 1, 0) for weight in (weight_in, *gate)]
        if bias is not None:
            before[0] += xla_static.take(bias[None], hidden, layout_in.block)
        before = [checkpoint_name(each.astype(x.dtype), PROJECTION_OUTPUT) for each in before]
        inputs.append(before)
        y = dot(_hidden(activation, *map(_wide, before)).astype(x.dtype), weight_out, 1, 0)
        pieces.append((outs, y.astype(x.dtype)))
    return xla_static.assemble(pieces, layout_in.block), (x, values, bias, inputs)


def _backward(options, saved, dy):
    layouts, activation = options
    layout_in, layout_out = layouts
    x, values, bias, inputs = saved
    dxs: list[tuple[tuple[int, ...], jax.Array]] = []
    dweights, dbiases = [], []
    # The activation is computed again: its outputs are as large as its inputs.
    (x, inputs), dy = derivatives.again((x, inputs), dy)
    gradient_in = xla_static.weight_gradient(x, layout_in.block)
    for (rows, hidden, outs), before in zip(chain(*layouts), inputs):
        # One group after the other, so that only one has its products in float32.
        (before, dy), _ = derivatives.again((before, dy), [dx for _, dx in dxs[-1:]])
        weight_in, weight_out, *gate = _group_weights(layouts, values, (rows, hidden, outs))
        dy_group = xla_static.take(dy, outs, layout_in.block)
        activated, pull = jax.vjp(functools.partial(_hidden, activation), *map(_wide, before))
        # Gradients of the activation's inputs, in float32 up to the sum of the bias.
        dwide = pull(dot(dy_group, weight_out, 1, 1))
        if bias is not None:
            dbiases.append((hidden, dwide[0].sum(0, keepdims=True)))
        dbefore = [each.astype(dy.dtype) for each in dwide]
        din, *dgate = (gradient_in(rows, each) for each in dbefore)
        dout = dot(activated.astype(dy.dtype), dy_group, 0, 0)
        weights = (weight_in, *gate)
        parts = (dot(each, weight, 1, 1) for each, weight in zip(dbefore, weights))
        dx = functools.reduce(jnp.add, parts)
        dxs.append((rows, dx.astype(x.dtype)))
        dweights.append(
            [(rows, hidden, din), (hidden, outs, dout), *((rows, hidden, dw) for dw in dgate)]
        )
    dvalues = tuple(
        xla_static.stored_gradient([*groups], layout).astype(x.dtype)
        for groups, layout in zip(zip(*dweights), (layout_in, layout_out, layout_in))
    )
    dbias = None if bias is None else xla_static.assemble(dbiases, layout_in.block)[0]
    return xla_static.assemble(dxs, layout_in.block), dvalues, _like(dbias, bias)


_mlp = derivatives.differentiable(_value, _backward, forward=_forward)


def _group_weights(layouts, values, group):
    """Return a group's dense weights: in, out and perhaps of the gate."""
    (layout_in, layout_out), (rows, hidden, outs) = layouts, group
    places = (layout_in, rows, hidden), (layout_out, hidden, outs), (layout_in, rows, hidden)
    return [xla_static.group_weight(v, *place) for v, place in zip(values, places)]


def _hidden(activation, before, gate=None):
    """The hidden layer of a group: before the activation, or the product that a gate multiplies."""
    function = activation_op(activation)
    return function(before) if gate is None else function(gate) * before


def _wide(array):
    return array.astype(derivatives.wide(array.dtype))


def _like(gradient, operand):
    return None if gradient is None else gradient.astype(operand.dtype)
