"""The pluggable linear layer: dense, block-sparse, or block-sparse plus low-rank."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.kernels.block_sparse_matmul.api import block_sparse_matmul
from sparse_dataflow.kernels.hadamard.api import hadamard
from sparse_dataflow.models.groups import layer_linear
from sparse_dataflow.models.sizes import PROJECTIONS, ModelConfig
from sparse_dataflow.sparsity.layout import BlockLayout, LayoutTables
from sparse_dataflow.sparsity.patterns import make_layout

PROJECTION_OUTPUT = "projection_output"
"""Name under which a remat policy may keep every projection's result."""


def projection_layout(config: ModelConfig, projection: str, layer: int) -> BlockLayout:
    """The initial layout of one block-sparse projection of one layer.

    Raises:
      UserError: if the spec has no balanced layout; the legal values are named.
    """
    spec = layer_linear(config, projection, layer)
    offset = config.seed + layer * len(PROJECTIONS) + PROJECTIONS.index(projection)
    in_features, out_features = config.projection_shape(projection)
    return make_layout(spec.pattern, in_features, out_features, spec.block, spec.density, offset)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("tables", "norms"), meta_fields=("axes",)
)
@dataclasses.dataclass(frozen=True)
class Probe:
    """Tables of a projection whose dense gradient is asked for, block by block.

    Attributes:
      tables: the layout's.
      norms: float32 [in_blocks, out_blocks]; enters no result, and its "gradient" is the Euclidean
        norm of every block of xᵀ dy, the gradient that the weight would have if it were dense.
      axes: of `shard_map`, over which the rows of x are dealt out.
    """

    tables: LayoutTables
    norms: jax.Array
    axes: tuple[str, ...] = ()


class Linear(nnx.Module):
    """y = x W + b, with W stored as the config's LinearSpec of this projection says.

    Parameters, all float32:
      kernel [in, out] (dense), or values [nnz, block, block] (block-sparse; see BlockLayout);
      bias [out]; and, with rank r > 0, a_kernel [in, r], b_kernel [r, out] and gate [] of the
      gated low-rank term (arXiv 2112.00029, section 3.3), whose gate starts at 1 and b_kernel at 0.

    With `hadamard` the stored blocks read its transform of x, and the low-rank term x itself.

    Weights are drawn normal with variance gain² / (inputs that one output reads as stored).
    """

    def __init__(self, config: ModelConfig, projection: str, *, gain: float, rngs: nnx.Rngs):
        spec = config.linear(projection)
        in_features, out_features = config.projection_shape(projection)
        self.sparse = spec.kind == "block_sparse"
        shape: tuple[int, ...] = (in_features, out_features)
        reads: float = in_features
        if self.sparse:
            layout = projection_layout(config, projection, layer=0)
            shape = (layout.nnz, layout.block, layout.block)
            reads = in_features * layout.density
        weight = nnx.Param(_normal(rngs, shape, gain / math.sqrt(reads)))
        if self.sparse:
            self.values = weight
        else:
            self.kernel = weight
        self.bias = nnx.Param(jnp.zeros(out_features))
        self.rank, self.hadamard = spec.rank, spec.hadamard
        if spec.rank:
            self.a_kernel = nnx.Param(
                _normal(rngs, (in_features, spec.rank), 1 / math.sqrt(in_features))
            )
            self.b_kernel = nnx.Param(jnp.zeros((spec.rank, out_features)))
            self.gate = nnx.Param(jnp.ones(()))

    def __call__(
        self,
        x: jax.Array,
        tables: LayoutTables | Probe | None,
        reduce: Callable[[jax.Array], jax.Array] = lambda y: y,
    ) -> jax.Array:
        """[..., in] -> [..., out] in x's dtype.

        Args:
          x: the input, or the features of it that this part of the weight reads.
          tables: this layer's where it is sparse.
          reduce: sums the products of the parts of a weight that is cut by rows.
        """
        own = self.cast(x.dtype)
        read = hadamard(x, self.hadamard) if self.hadamard else x
        if isinstance(tables, Probe):
            y = block_sparse_matmul(read, own["values"], tables.tables)
            y = _with_gradient_norms(y, read, tables.norms, tables.axes)
        elif self.sparse and tables is not None:
            y = block_sparse_matmul(read, own["values"], tables)
        else:
            y = _matmul(x, own["kernel"])
        if self.rank:
            y += own["gate"] * _matmul(_matmul(x, own["a_kernel"]), own["b_kernel"])
        return checkpoint_name(reduce(y) + own["bias"], PROJECTION_OUTPUT)

    @property
    def plain_sparse(self) -> bool:
        """Block-sparse and nothing besides."""
        return self.sparse and not self.rank and not self.hadamard

    def cast(self, dtype: jnp.dtype) -> dict[str, jax.Array]:
        """The parameters by name, in the compute dtype."""
        params = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        return {name: leaf.astype(dtype) for name, leaf in params.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _with_gradient_norms(y, x, norms, axes):
    """`y`; see `Probe`."""
    return y


def _probe_forward(y, x, norms, axes):
    return y, (x, norms)


def _probe_backward(axes, saved, dy):
    x, norms = saved
    wide = jnp.promote_types(x.dtype, jnp.float32)
    gradient = lax.dot_general(
        x.reshape(-1, x.shape[-1]),
        dy.reshape(-1, dy.shape[-1]),
        (((0,), (0,)), ((), ())),
        preferred_element_type=wide,
    )
    if axes:
        gradient = lax.psum(gradient, axes)
    in_blocks, out_blocks = norms.shape
    blocks = gradient.reshape(in_blocks, len(gradient) // in_blocks, out_blocks, -1)
    found = jnp.sqrt(jnp.sum(jnp.square(blocks), axis=(1, 3)))
    return dy, jnp.zeros_like(x), found.astype(norms.dtype)


_with_gradient_norms.defvjp(_probe_forward, _probe_backward)


def _matmul(x, kernel):
    """x @ kernel over flattened tokens: a gradient that contracts two axes is slower on a CPU."""
    return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], -1)


def _normal(rngs, shape, scale):
    # Drawn as rows, which are the same numbers: LLVM takes ten times as long over loops that are as
    # short as a small block's side.
    rows = (shape[0], math.prod(shape[1:]))
    return (jax.random.normal(rngs.params(), rows, jnp.float32) * scale).reshape(shape)
