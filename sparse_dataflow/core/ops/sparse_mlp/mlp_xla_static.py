"""The block-sparse MLP in plain XLA, group by group, of layouts known at trace time.

Where each group of mlp_out reads the hidden blocks that one group of mlp_in computes (`monarch`),
the groups are MLPs by themselves.  The hidden layer is then never assembled or taken apart, which
is faster than two products (docs/performance.md).  One batched product over the groups is as fast.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.core.config.remat import PROJECTION_OUTPUT
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.activation import activation as activation_op
from sparse_dataflow.core.ops.block_sparse_matmul import xla_static
from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import MAX_STATIC_GROUPS, check_operands
from sparse_dataflow.core.ops.derivatives import broadcast_like
from sparse_dataflow.core.ops.sparse_mlp.mlp_op import Operands

Chain = tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
"""(Input blocks, hidden blocks, output blocks) of each group."""


def run(mlp: Operands) -> jax.Array:
    """Compute the MLP of concrete layouts; products accumulate in float32 or wider."""
    gate = [] if mlp.values_gate is None else [mlp.values_gate]
    values = (mlp.values_in, mlp.values_out, *gate)
    return _mlp((_layouts(mlp), mlp.activation), mlp.x, values, mlp.bias_in)


def refusal(mlp: Operands) -> str:
    """Return why the operands have no chain of groups or too many; empty if this can run them."""
    if reason := mlp.activation_refusal():
        return reason
    if not (layouts := _layouts(mlp)):
        return "a layout is data, or the blocks of the weights have two sides."
    if not (groups := chain(*layouts)):
        return "W_out does not read the hidden blocks of each group of W_in together."
    if 2 * len(groups) > MAX_STATIC_GROUPS:
        return f"the layouts have {len(groups)} groups; legal: at most {MAX_STATIC_GROUPS // 2}."
    return ""


@functools.lru_cache(maxsize=4096)
def chain(layout_in: BlockLayout, layout_out: BlockLayout) -> Chain:
    """Return the groups that are MLPs by themselves; none unless all blocks belong to one."""
    outputs = {rows: cols for rows, cols in xla_static.column_groups(layout_out)}
    groups = [(*group, outputs.get(group[1], ())) for group in xla_static.column_groups(layout_in)]
    whole = all(rows and outs for rows, _, outs in groups) and len(groups) == len(outputs)
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
    """The output, and of each group the function that gives its gradients."""
    layouts, activation = options
    layout_in, layout_out = layouts
    block, pieces, pulls = layout_in.block, [], []
    for rows, hidden, outs in chain(*layouts):
        places = (layout_in, rows, hidden), (layout_out, hidden, outs), (layout_in, rows, hidden)
        weights = [xla_static.group_weight(v, *place) for v, place in zip(values, places)]
        bias_here = None if bias is None else xla_static.take(bias[None], hidden, block)
        one = functools.partial(_group, activation_op(activation))
        y, pull = jax.vjp(one, xla_static.take(x, rows, block), weights, bias_here)
        pieces.append((outs, y))
        pulls.append(pull)
    return xla_static.assemble(pieces, block), pulls


def _backward(options, pulls, dy):
    layouts, _ = options
    layout_in, layout_out = layouts
    dxs, dweights, dbiases = [], [], []
    for (rows, hidden, outs), pull in zip(chain(*layouts), pulls):
        dx, (din, dout, *dgate), dbias = pull(xla_static.take(dy, outs, layout_in.block))
        dxs.append((rows, dx))
        dweights.append(
            [(rows, hidden, din), (hidden, outs, dout), *((rows, hidden, dw) for dw in dgate)]
        )
        dbiases.append((hidden, dbias))
    dvalues = tuple(
        xla_static.stored_gradient(groups, layout)
        for groups, layout in zip(zip(*dweights), (layout_in, layout_out, layout_in))
    )
    dbias = None if dbias is None else xla_static.assemble(dbiases, layout_in.block)[0]
    return xla_static.assemble(dxs, layout_in.block), dvalues, dbias


_mlp = derivatives.differentiable(_value, _backward, forward=_forward)


def _group(activation, x, weights, bias):
    """One group: x [tokens, inputs]; weights in, out and perhaps of the gate; bias [1, hidden]."""
    weight_in, weight_out, *gate = weights
    hidden = xla_static.dot(x, weight_in, 1, 0).astype(x.dtype)
    hidden = hidden if bias is None else hidden + broadcast_like(bias, hidden)
    hidden = checkpoint_name(hidden, PROJECTION_OUTPUT)
    if gate:
        gated = checkpoint_name(xla_static.dot(x, gate[0], 1, 0).astype(x.dtype), PROJECTION_OUTPUT)
        hidden = activation(gated) * hidden
    else:
        hidden = activation(hidden)
    return xla_static.dot(hidden, weight_out, 1, 0).astype(x.dtype)
