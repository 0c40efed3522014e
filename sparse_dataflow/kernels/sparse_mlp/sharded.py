"""The sparse MLP over a mesh: its hidden layer cut over a tensor axis, tokens over data axes.

Each device makes and reads hidden blocks of its own, so the fused kernels run as they are, and the
only thing summed over the tensor axis is y, in the backward pass dx (arXiv 1909.08053, section 3).
"""

import functools

import jax
from jax.sharding import Mesh, PartitionSpec

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul.sharded import Cut, check_mesh
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
    """gelu(x W_in + bias_in) W_out, differentiable in its first four arguments.

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
      implementation: as in `sparse_mlp`, of those that take traced tables.

    Returns:
      [tokens, ..., out_features] in x's dtype, sharded over `data_axes`, equal along `axis`.

    Raises:
      UserError: if tables, tokens or axes do not fit the mesh.
    """
    for tables in (tables_in, tables_out):
        check_mesh(x, tables, mesh, axis, data_axes)
    if len(bias_in) % mesh.shape[axis]:
        raise UserError(f"bias_in has {len(bias_in)} features; legal: those that W_in makes.")
    cut = _Mlp(mesh, axis, data_axes, implementation)
    return _parallel(cut, x, values_in, bias_in, values_out, (tables_in, tables_out))


class _Mlp(Cut):
    """How the MLP is."""

    @property
    def specs(self):
        """Of (x, values_in, bias_in, values_out, tables)."""
        held = PartitionSpec(self.axis)
        return PartitionSpec(self.data_axes or None), held, held, held, held

    def run(self, x, values_in, bias_in, values_out, tables):
        """A device's own part."""
        own_in, own_out = self.own(tables)
        return sparse_mlp(x, values_in, bias_in, values_out, own_in, own_out, self.implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _parallel(cut, *operands):
    local = lambda *operands: jax.lax.psum(cut.run(*operands), cut.axis)  # noqa: E731
    return cut.over_mesh(local, cut.specs, cut.specs[0])(*operands)


def _forward(cut, *operands):
    return _parallel(cut, *operands), operands


def _backward(cut, operands, dy):
    def local(*given):
        *operands, tables, dy = given
        _, pullback = jax.vjp(lambda *operands: cut.run(*operands, tables), *operands)
        dx, *weights = pullback(dy)
        if cut.data_axes:
            weights = jax.lax.psum(weights, cut.data_axes)
        return jax.lax.psum(dx, cut.axis), *weights

    specs = cut.specs
    return *cut.over_mesh(local, (*specs, specs[0]), specs[:4])(*operands, dy), None


_parallel.defvjp(_forward, _backward)
