"""The pluggable linear layer: dense, block-sparse, low-rank, or a sum with a low-rank term."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.config.layer_groups import layer_linear
from sparse_dataflow.config.model import PRECISIONS, ModelConfig
from sparse_dataflow.config.projections import KEY_VALUE, ROW_PARALLEL, LinearSpec
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul.api import block_sparse_matmul
from sparse_dataflow.kernels.block_sparse_matmul.strips import in_squares
from sparse_dataflow.kernels.hadamard.api import hadamard
from sparse_dataflow.kernels.nonzero_rows.api import nonzero_rows_matmul
from sparse_dataflow.kernels.quantized import api as quantized
from sparse_dataflow.models.shard import WHOLE, Shard
from sparse_dataflow.sparsity.layout import BlockLayout, LayoutTables
from sparse_dataflow.sparsity.patterns import make_layout

PROJECTION_OUTPUT = "projection_output"
"""Checkpoint name of every projection's output, for remat policies."""


def projection_layout(config: ModelConfig, projection: str, layer: int) -> BlockLayout:
    """Returns the initial layout of one block-sparse projection of one layer.

    Raises:
      UserError: the spec has no balanced layout; names the legal values.
    """
    spec = layer_linear(config, projection, layer)
    names = config.projections
    offset = config.seed + layer * len(names) + names.index(projection)
    in_features, out_features = config.projection_shape(projection)
    shape = (in_features, out_features, spec.block, spec.density, offset)
    reads_residual = projection not in ROW_PARALLEL
    try:
        return with_room(make_layout(spec.pattern, *shape, reads_residual), spec)
    except UserError as error:
        raise UserError(
            f"{projection}: {error} Or leave {projection} dense: sparsity.projections names the "
            "others."
        ) from None


def with_room(layout: BlockLayout, spec: LinearSpec) -> BlockLayout:
    """Returns the layout with tables as wide as `LinearSpec.max_fan_out` asks."""
    if spec.max_fan_out == 1:
        return layout
    mean = layout.nnz / layout.in_blocks
    width = min(layout.out_blocks, math.ceil(spec.max_fan_out * mean))
    return dataclasses.replace(layout, max_fan_out=width)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("tables", "norms"), meta_fields=("axes", "shard")
)
@dataclasses.dataclass(frozen=True)
class Probe:
    """Layout tables of a projection, plus an input whose gradient is the dense block norms.

    Attributes:
      tables: tables of the layout.
      norms: float32 [in_blocks, out_blocks].  No result depends on it.  Its custom "gradient" is
        the Euclidean norm of every block of xᵀ dy, the gradient of the weight if it were dense.
      axes: `shard_map` axes over which the rows of x are sharded.
      shard: shard of a projection in KEY_VALUE, whose gradient is summed over its copies.
    """

    tables: LayoutTables
    norms: jax.Array
    axes: tuple[str, ...] = ()
    shard: Shard = WHOLE

    @classmethod
    def of(
        cls,
        tables: Mapping[str, LayoutTables],
        norms: Mapping[str, jax.Array],
        axes: tuple[str, ...],
        shard: Shard,
    ) -> "dict[str, Probe]":
        """Returns the probes of a block's projections, by name."""
        return {
            name: cls(table, norms[name], axes, shard if name in KEY_VALUE else WHOLE)
            for name, table in tables.items()
        }


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("tables", "level"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class InputThreshold:
    """Layout tables of a projection, plus a level up to which its inputs count as zeros.

    Activation sparsity without training: TEAL, arXiv 2408.14690, section 4.  A dense weight of one
    token reads only the rows of its other inputs; see `kernels.nonzero_rows`.

    Attributes:
      tables: tables of the layout; None for a dense weight.
      level: float32 [], jax or numpy, the largest magnitude that counts as zero.  Inputs are
        measured after a Hadamard transform, as the weight reads them.  The low-rank term reads all.
    """

    tables: LayoutTables | None
    level: Any

    def apply(self, x: jax.Array) -> jax.Array:
        """Returns x with zeros for the inputs up to the level; NaN stays."""
        return jnp.where(jnp.abs(x) <= self.level.astype(x.dtype), 0, x)

    def with_groups(self) -> "InputThreshold":
        """See `LayoutTables.with_groups`."""
        if self.tables is None:
            return self
        return dataclasses.replace(self, tables=self.tables.with_groups())


class Linear(nnx.Module):
    """y = x W + b, where the LinearSpec of this projection says how W is stored; b is optional.

    Parameters, all float32:
      kernel [in, out] (dense); or values [nnz, block, block] (block-sparse; see BlockLayout); or
      a_factor [in, r] and b_factor [r, out] (low_rank), whose product is W;
      bias [out], if the config's `biases` name it; and, with rank r > 0, a_kernel [in, r],
      b_kernel [r, out] and gate [] of the gated low-rank term (arXiv 2112.00029, section 3.3).  The
      gate starts at 1, b_kernel at 0; and, with a guide, guide [in, out] and guide_share []: y is
      the block-sparse product times 1 - guide_share, plus x guide times guide_share.

    With `hadamard`, the stored blocks multiply the Walsh-Hadamard transform of x; the low-rank term
    multiplies x itself, in the dtype of x.  The config's `precision` says how the other product is
    computed.

    Weights are drawn normal with variance gain² / (stored inputs of one output).  Of two factors,
    a_factor has variance r / in² and b_factor gain² / r, the spectral initialisation of structured
    weights (arXiv 2406.06248, section 3): each has a spectral norm of about the root of its outputs
    over its inputs.  So the product has about the spectral norm of a dense weight, and r / in times
    its variance.
    """

    def __init__(self, config: ModelConfig, projection: str, *, gain: float, rngs: nnx.Rngs):
        spec = config.linear(projection)
        in_features, out_features = config.projection_shape(projection)
        self.sparse, self.factor_rank = spec.kind == "block_sparse", config.factor_rank(projection)

        def draw(shape, fan_in):
            return nnx.Param(normal(rngs, shape, gain / math.sqrt(fan_in)))

        if self.sparse:
            layout = projection_layout(config, projection, layer=0)
            shape = (layout.nnz, layout.block, layout.block)
            self.values = draw(shape, in_features * layout.density)
        elif rank := self.factor_rank:
            scale = math.sqrt(rank) / in_features
            self.a_factor = nnx.Param(normal(rngs, (in_features, rank), scale))
            self.b_factor = draw((rank, out_features), rank)
        else:
            self.kernel = draw((in_features, out_features), in_features)
        if projection in config.biases:
            self.bias = nnx.Param(jnp.zeros(out_features))
        self.rank, self.hadamard = spec.rank, spec.hadamard
        self.precision, self.guided = config.precision, config.has_guide(projection)
        if self.guided:
            self.guide = nnx.Param(jnp.zeros((in_features, out_features)))
            self.guide_share = nnx.Param(jnp.ones(()))
        if spec.rank:
            self.a_kernel = nnx.Param(
                normal(rngs, (in_features, spec.rank), 1 / math.sqrt(in_features))
            )
            self.b_kernel = nnx.Param(jnp.zeros((spec.rank, out_features)))
            self.gate = nnx.Param(jnp.ones(()))

    def __call__(
        self,
        x: jax.Array,
        tables: LayoutTables | Probe | InputThreshold | None,
        reduce: Callable[[jax.Array], jax.Array] = lambda y: y,
    ) -> jax.Array:
        """Applies the layer: [..., in] -> [..., out], in the dtype of x.

        Args:
          x: the input, or its features for this shard of a weight that is cut by inputs.
          tables: layout tables of this layer; None for a dense weight.
          reduce: sums the partial products of a weight that is cut by inputs over its shards.
        """
        params = self.cast(x.dtype)
        mixed = hadamard(x, self.hadamard) if self.hadamard else x
        if has_zeros := isinstance(tables, InputThreshold):
            mixed, tables = tables.apply(mixed), tables.tables
        if isinstance(tables, Probe):
            y = block_sparse_matmul(mixed, params["values"], tables.tables)
            y = with_gradient_norms(y, mixed, tables.norms, tables.axes, tables.shard)
        elif self.sparse and tables is not None:
            values, tables = in_squares(params["values"], tables)
            y = block_sparse_matmul(mixed, values, tables, precision=self.precision)
        elif self.factor_rank:
            factor = _matmul(mixed, params["a_factor"], has_zeros=has_zeros)
            y = _matmul(factor, params["b_factor"])
        else:
            y = _matmul(mixed, params["kernel"], self.precision, has_zeros)
        if self.guided:
            share = self.guide_share[...]
            guide = _matmul(mixed, params["guide"], self.precision)
            y = (1 - share).astype(x.dtype) * y + share.astype(x.dtype) * guide
        if self.rank:
            y += params["gate"] * _matmul(_matmul(x, params["a_kernel"]), params["b_kernel"])
        return self.with_bias(reduce(y))

    def with_bias(self, y: jax.Array) -> jax.Array:
        """Adds the bias, if there is one, and names the projection's output for remat policies."""
        if hasattr(self, "bias"):
            y += self.bias[...].astype(y.dtype)
        return checkpoint_name(y, PROJECTION_OUTPUT)

    @property
    def plain_sparse(self) -> bool:
        """Whether the weight is block-sparse without low-rank term, Hadamard transform or guide."""
        return self.sparse and not (self.rank or self.hadamard or self.guided)

    def cast(self, dtype: jnp.dtype) -> dict[str, jax.Array]:
        """Returns the parameters by name, cast to `dtype`."""
        params = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        return {name: leaf.astype(dtype) for name, leaf in params.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def with_gradient_norms(
    y: jax.Array,
    x: jax.Array,
    norms: jax.Array,
    axes: tuple[str, ...] = (),
    shard: Shard = WHOLE,
) -> jax.Array:
    """Returns `y`, a product with `x`; see `Probe` for the gradient of `norms` and the others."""
    return y


def _probe_forward(y, x, norms, axes, shard):
    return y, (x, norms)


def _probe_backward(axes, shard, saved, dy):
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
    gradient = shard.sum_copies(gradient)
    in_blocks, out_blocks = norms.shape
    blocks = gradient.reshape(in_blocks, len(gradient) // in_blocks, out_blocks, -1)
    block_norms = jnp.sqrt(jnp.sum(jnp.square(blocks), axis=(1, 3)))
    return dy, jnp.zeros_like(x), block_norms.astype(norms.dtype)


with_gradient_norms.defvjp(_probe_forward, _probe_backward)


def _matmul(x, kernel, precision=PRECISIONS[0], has_zeros=False):
    """x @ kernel over flattened tokens, because contracting two axes is slower on a CPU."""
    rows = x.reshape(-1, x.shape[-1])
    if precision != PRECISIONS[0]:
        y = quantized.matmul(rows, kernel, precision)
    else:
        y = nonzero_rows_matmul(rows, kernel) if has_zeros else rows @ kernel
    return y.reshape(*x.shape[:-1], -1)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float) -> jax.Array:
    """Draws float32 normal numbers of standard deviation `scale`."""
    # Drawn as rows, which gives the same numbers: short inner loops over a small block compile to
    # slow code on a CPU.
    rows = (shape[0], math.prod(shape[1:]))
    return (jax.random.normal(rngs.params(), rows, jnp.float32) * scale).reshape(shape)
