"""The products of a block-sparse MLP as one op, so that a kernel may fuse them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.core.config.activations import ACTIVATIONS, fused_names
from sparse_dataflow.core.config.remat import PROJECTION_OUTPUT
from sparse_dataflow.core.layouts.layout import BlockLayout, LayoutTables, index_tables
from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.core.ops.bias_activation.bias_activation_op import bias_activation
from sparse_dataflow.core.ops.block_sparse_matmul import matmul_op as matmul
from sparse_dataflow.core.ops.block_sparse_matmul import xla_few_rows
from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import block_sparse_matmul
from sparse_dataflow.core.ops.dispatch import Implementation, Op
from sparse_dataflow.files.errors import UserError


class Operands(NamedTuple):
    """Operands of activation(x W_in + bias) W_out, or (activation(x W_gate) * x W_in) W_out.

    Attributes:
      x: float [tokens, in_features].
      values_in: stored blocks of W_in, [nnz, block, block].
      bias_in: [hidden_features], or None.
      values_out: stored blocks of W_out.
      tables_in: layout of W_in, and of W_gate; see `block_sparse_matmul`.
      tables_out: layout of W_out.
      values_gate: stored blocks of W_gate, or None.
      activation: name of a fused one in `config.activations`.
    """

    x: jax.Array
    values_in: jax.Array
    bias_in: Any
    values_out: jax.Array
    tables_in: LayoutTables
    tables_out: LayoutTables
    values_gate: jax.Array | None = None
    activation: str = "gelu"

    @property
    def hidden(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the hidden layer."""
        features = len(self.tables_in.in_index) * self.values_in.shape[-1]
        return jax.ShapeDtypeStruct((*self.x.shape[:-1], features), self.x.dtype)

    def activation_refusal(self) -> str:
        """Returns why kernels do not compute the activation; empty if they do."""
        if ACTIVATIONS[self.activation].fused:
            return ""
        return f"the activation is {self.activation}; legal: {', '.join(fused_names())}."

    def plain_refusal(self) -> str:
        """Returns why the MLP has a gate, no bias or no fused activation; empty if it is plain."""
        plain = self.values_gate is None and self.bias_in is not None
        return self.activation_refusal() if plain else "it has a product with a bias, and no gate."


def sparse_mlp_refusal(mlp: Operands) -> str:
    """Return why this cannot run the operands; empty if it can."""
    return mlp.plain_refusal()


def run_sparse_mlp(mlp: Operands) -> jax.Array:
    """Compute the MLP of x [..., in_features]."""
    hidden = block_sparse_matmul(mlp.x, mlp.values_in, mlp.tables_in)
    # A remat policy may keep the product and compute the activation again.
    hidden = checkpoint_name(hidden, PROJECTION_OUTPUT)
    hidden = bias_activation(hidden, mlp.bias_in, mlp.activation)
    return block_sparse_matmul(hidden, mlp.values_out, mlp.tables_out)


OP = Op(
    __package__,
    {
        "products": Implementation("mlp_op"),
        "pallas_tpu_grouped": Implementation(".chips.tpu.grouped_mlp", "tpu", partitioned=False),
        "pallas_tpu": Implementation(".chips.tpu.mlp", "tpu", partitioned=False),
        "pallas_hopper": Implementation(".chips.hopper.mlp", "gpu", partitioned=False),
        "xla_static": Implementation("mlp_xla_static", "cpu"),
    },
    fallback=("products",),
)
"""An implementation has `run_sparse_mlp(operands)`, for `Operands` of at least one token, and
`sparse_mlp_refusal`.  If it has tiles, it takes them as `tuning`."""

IMPLEMENTATIONS = tuple(OP.implementations)


def sparse_mlp(
    x: jax.Array,
    values_in: jax.Array,
    bias_in: jax.Array,
    values_out: jax.Array,
    layout_in: BlockLayout | LayoutTables,
    layout_out: BlockLayout | LayoutTables,
    implementation: str | None = None,
    tuning: object = None,
    *,
    activation: str = "gelu",
) -> jax.Array:
    """Compute activation(x W_in + bias_in) W_out; differentiable in the first four arguments.

    Args:
      x: float [..., in_features].
      values_in: stored blocks of W_in, [nnz, block, block].
      bias_in: [hidden_features].
      values_out: stored blocks of W_out.
      layout_in: of W_in; see `block_sparse_matmul`.
      layout_out: of W_out.
      implementation: one of IMPLEMENTATIONS, or None to choose by platform and layouts.
        "products" runs two block-sparse matmuls; "pallas_tpu_grouped" keeps the hidden layer of
        equal groups in VMEM; "pallas_tpu" and "pallas_hopper" fuse the activation and its
        derivative into the products; "xla_static" runs group by group, of
        concrete tables whose groups of W_out each read the hidden features of one group of W_in.
      tuning: tile sizes of a named implementation, or None for its heuristic's.
      activation: name of a fused one in `config.activations`.

    Returns:
      [..., out_features] in x's dtype.

    Raises:
      UserError: if shapes disagree, the activation is not fused, or a named implementation cannot
        run.
    """
    tables = _checked(x, (values_in, values_out), (layout_in, layout_out))
    flat = x.reshape(-1, x.shape[-1])
    mlp = Operands(
        flat, values_in, bias_in, values_out, tables[0], tables[1], activation=activation
    )
    if reason := mlp.activation_refusal():
        raise UserError(f"{reason[0].upper()}{reason[1:]}")
    if bias_in.shape != (legal := mlp.hidden.shape[1:]):
        raise UserError(f"bias_in has shape {bias_in.shape}; legal: {legal}.")
    if implementation is None:
        # A GPU multiplies groups by dense products of the vendor's library.
        grouped = dispatch.on(platforms.LIBRARY_GROUPS) and all(each.groups for each in tables)
        implementation = OP.choose(
            [] if grouped or _few_rows(x) else OP.platform_implementations(), mlp
        )
    else:
        OP.check(implementation, mlp)
    return _run(implementation, x, mlp, tuning)


def gated_sparse_mlp(
    x: jax.Array,
    values: Sequence[jax.Array],
    layouts: Sequence[BlockLayout | LayoutTables],
    activation: str,
) -> jax.Array | None:
    """Compute (activation(x W_gate) * x W_in) W_out as one op; None if no implementation has it.

    "pallas_tpu_grouped" and "xla_static" have it.  The layouts of W_gate and W_in must be equal.

    Args:
      x: float [..., in_features].
      values: stored blocks of W_gate, W_in and W_out, [nnz, block, block] each.
      layouts: of W_gate, W_in and W_out; see `block_sparse_matmul`.
      activation: name of one in `config.activations`.

    Returns:
      [..., out_features] in x's dtype, differentiable in x and values.

    Raises:
      UserError: if shapes disagree.
    """
    values_gate, values_in, values_out = values
    # Few rows are bound by the bytes of the weights, and each of the three products has a form for
    # that.
    if _few_rows(x):
        return None
    tables_gate, tables_in, tables_out = _checked(x, values, layouts)
    # Both products read the same inputs in the kernel.
    if values_gate.shape != values_in.shape or not _equal_layouts(tables_gate, tables_in):
        return None
    flat = x.reshape(-1, x.shape[-1])
    stored = values_in, None, values_out, tables_in, tables_out, values_gate
    mlp = Operands(flat, *stored, activation=activation)
    name = OP.choose(OP.platform_implementations(), mlp)
    return None if name in OP.fallback else _run(name, x, mlp)


def _run(name, x, mlp, tuning=None):
    if mlp.x.shape[0] == 0:
        features = len(mlp.tables_out.in_index) * mlp.values_out.shape[-1]
        return jnp.zeros((*x.shape[:-1], features), x.dtype)
    # Single products take x with all of its axes, kernels take rows.
    mlp = mlp._replace(x=x) if name == "products" else mlp
    tiles = {} if tuning is None else {"tuning": tuning}
    y = OP.load(name).run_sparse_mlp(mlp, **tiles)
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


def _checked(x, values, layouts):
    """Checks the weights into the hidden layer and the last one, out of it.

    Returns:
      The tables of the layouts, with the groups of concrete ones.
    """
    tables = [index_tables(layout) for layout in layouts]
    features = len(tables[0].in_index) * values[0].shape[-1]
    hidden = jax.ShapeDtypeStruct((0, features), x.dtype)
    inputs = [x] * (len(values) - 1) + [hidden]
    concrete = [matmul.check_operands(*each) for each in zip(inputs, values, tables)]
    return [
        each._replace(groups=layout.groups) if layout else each
        for layout, each in zip(concrete, tables)
    ]


def _few_rows(x):
    """Whether the platform has other products for so few rows of x [..., features]."""
    few = dispatch.at_most(math.prod(x.shape[:-1]), xla_few_rows.FEW_ROWS)
    return few and dispatch.on(platforms.FEW_ROWS)
