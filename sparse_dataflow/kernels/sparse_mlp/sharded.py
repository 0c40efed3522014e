"""The sparse MLP over a mesh: the hidden layer sharded over a tensor axis, tokens over data axes.

Each device computes and reads only its hidden blocks, so the fused kernels run unchanged.  Only y,
and dx in the backward pass, are summed over the tensor axis (arXiv 1909.08053, section 3).
"""

import functools

import jax
from jax.sharding import Mesh, PartitionSpec

from sparse_dataflow.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul.sharded import TensorParallel, check_mesh
from sparse_dataflow.kernels.sparse_mlp.api import sparse_mlp
from sparse_dataflow.sparsity.layout import LayoutTables


def parallel_sparse_mlp(
    x: jax.Array,
    values_in: jax.Array,
    bias_in: jax.Array,
    values_out: jax.Array,
    tables_in: LayoutTables,
    tables_out: LayoutTables,
    mesh: Mesh,
    axis: str,
    *,
    data_axes: tuple[str, ...] = (),
    implementation: str | None = None,
) -> jax.Array:
    """Compute gelu(x W_in + bias_in) W_out; differentiable in the first four arguments.

    Args:
      x: float [tokens, ..., in_features], tokens sharded over `data_axes`.
      values_in: stored blocks of W_in in the order of `cut_columns`, sharded over `axis`.
      bias_in: [hidden_features], sharded over `axis`.
      values_out: stored blocks of W_out in the order of `cut_rows`, sharded over `axis`.
      tables_in: `cut_columns(...).tables`.
      tables_out: `cut_rows(...).tables`.
      mesh: the devices.
      axis: the tensor axis.
      data_axes: axes that tokens are sharded over.
      implementation: as in `sparse_mlp`; it must accept traced tables.

    Returns:
      [tokens, ..., out_features] in x's dtype; sharded over `data_axes`, replicated over `axis`.

    Raises:
      UserError: if tables, tokens or axes do not fit the mesh.
    """
    for tables in (tables_in, tables_out):
        check_mesh(x, tables, mesh, axis, data_axes)
    if len(bias_in) % mesh.shape[axis]:
        raise UserError(
            f"bias_in has {len(bias_in)} features; legal: a multiple of {mesh.shape[axis]}, "
            f"the size of axis {axis!r}."
        )
    placement = _Mlp(mesh, axis, data_axes, implementation)
    return _parallel(placement, x, values_in, bias_in, values_out, (tables_in, tables_out))


class _Mlp(TensorParallel):
    """How the MLP is partitioned over a mesh."""

    @property
    def partition_specs(self):
        """Return the specs of (x, values_in, bias_in, values_out, tables)."""
        split = PartitionSpec(self.axis)
        return PartitionSpec(self.data_axes or None), split, split, split, split

    def run(self, x, values_in, bias_in, values_out, tables):
        """Compute one device's local share of y."""
        local_in, local_out = self.local_tables(tables)
        return sparse_mlp(
            x, values_in, bias_in, values_out, local_in, local_out, self.implementation
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _parallel(placement, *operands):
    local = lambda *operands: jax.lax.psum(placement.run(*operands), placement.axis)  # noqa: E731
    return placement.shard_map(local, placement.partition_specs, placement.partition_specs[0])(
        *operands
    )


def _forward(placement, *operands):
    return _parallel(placement, *operands), operands


def _backward(placement, operands, dy):
    def local(*arguments):
        *operands, tables, dy = arguments
        _, pullback = jax.vjp(lambda *operands: placement.run(*operands, tables), *operands)
        dx, *weights = pullback(dy)
        if placement.data_axes:
            weights = jax.lax.psum(weights, placement.data_axes)
        return jax.lax.psum(dx, placement.axis), *weights

    partition_specs = placement.partition_specs
    return *placement.shard_map(local, (*partition_specs, partition_specs[0]), partition_specs[:4])(
        *operands, dy
    ), None


_parallel.defvjp(_forward, _backward)
