"""The block-sparse MLP in plain XLA, group by group, of layouts known at trace time.

Where each group of mlp_out reads the hidden blocks that one group of mlp_in computes (`monarch`),
the groups are MLPs by themselves.  The hidden layer is then never assembled or taken apart, which
is faster than two products (docs/performance.md).  One batched product over the groups is as fast.
"""

import functools
from collections.abc import Callable

import jax

from sparse_dataflow.kernels import dispatch
from sparse_dataflow.kernels.block_sparse_matmul import xla_static
from sparse_dataflow.kernels.block_sparse_matmul.api import MAX_STATIC_GROUPS, check_operands
from sparse_dataflow.kernels.gelu.api import gelu, silu
from sparse_dataflow.sparsity.layout import BlockLayout, LayoutTables

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"gelu": gelu, "silu": silu}
"""Elementwise functions of the hidden layer, or of its gate."""

Chain = tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
"""(Input blocks, hidden blocks, output blocks) of each group."""


def sparse_mlp(
    x: jax.Array,
    values_in: jax.Array,
    bias_in: jax.Array | None,
    values_out: jax.Array,
    tables_in: LayoutTables,
    tables_out: LayoutTables,
    *,
    values_gate: jax.Array | None = None,
    activation: str = "gelu",
) -> jax.Array:
    """Compute activation(x W_in + bias_in) W_out, or (activation(x W_gate) * x W_in) W_out.

    Args:
      x: float [tokens, in_features].
      values_in: stored blocks of W_in, [nnz, block, block].
      bias_in: [hidden_features], or None.
      values_out: stored blocks of W_out.
      tables_in: concrete tables of W_in's layout.
      tables_out: concrete tables of W_out's layout.
      values_gate: stored blocks of W_gate, in W_in's layout, or None.
      activation: key of ACTIVATIONS.

    Returns:
      [tokens, out_features] in x's dtype; products accumulate in float32 or wider.
    """
    layouts = _layouts(x, values_in, values_out, tables_in, tables_out)
    values = (values_in, values_out, *([] if values_gate is None else [values_gate]))
    return _mlp(x, values, bias_in, layouts, activation)


def refusal(
    x: dispatch.Shaped,
    values_in: dispatch.Shaped,
    values_out: dispatch.Shaped,
    tables_in: LayoutTables,
    tables_out: LayoutTables,
    gated: bool = False,
) -> str:
    """Return why the operands have no chain of groups or too many; empty if this can run them."""
    layouts = _layouts(x, values_in, values_out, tables_in, tables_out)
    if not layouts:
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


def _layouts(x, values_in, values_out, tables_in, tables_out):
    """Return both layouts, of one block size; None if a layout is data."""
    hidden = jax.ShapeDtypeStruct((len(x), len(tables_in.in_index) * values_in.shape[-1]), x.dtype)
    layout_in = check_operands(x, values_in, tables_in)
    layout_out = check_operands(hidden, values_out, tables_out)
    if layout_in is None or layout_out is None or layout_in.block != layout_out.block:
        return None
    return layout_in, layout_out


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _mlp(x, values, bias, layouts, activation):
    return _forward(x, values, bias, layouts, activation)[0]


def _forward(x, values, bias, layouts, activation):
    """The output, and of each group the function that gives its gradients."""
    layout_in, layout_out = layouts
    block, pieces, pulls = layout_in.block, [], []
    for rows, hidden, outs in chain(*layouts):
        places = (layout_in, rows, hidden), (layout_out, hidden, outs), (layout_in, rows, hidden)
        weights = [xla_static.group_weight(v, *place) for v, place in zip(values, places)]
        bias_here = None if bias is None else xla_static.take(bias[None], hidden, block)
        one = functools.partial(_group, ACTIVATIONS[activation])
        y, pull = jax.vjp(one, xla_static.take(x, rows, block), weights, bias_here)
        pieces.append((outs, y))
        pulls.append(pull)
    return xla_static.assemble(pieces, block), pulls


def _backward(layouts, activation, pulls, dy):
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


_mlp.defvjp(_forward, _backward)


def _group(activation, x, weights, bias):
    """One group: x [tokens, inputs]; weights in, out and perhaps of the gate; bias [1, hidden]."""
    weight_in, weight_out, *gate = weights
    hidden = xla_static.dot(x, weight_in, 1, 0).astype(x.dtype)
    hidden = hidden if bias is None else hidden + bias
    if gate:
        hidden = activation(xla_static.dot(x, gate[0], 1, 0).astype(x.dtype)) * hidden
    else:
        hidden = activation(hidden)
    return xla_static.dot(hidden, weight_out, 1, 0).astype(x.dtype)
