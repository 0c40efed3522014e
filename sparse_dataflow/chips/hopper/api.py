"""The block-sparse matmul in Mosaic GPU kernels for Hopper (H100, H200): all three products.

Tables are data in device memory: changing the layout does not recompile.  Only stored blocks are
read or written.  Blocks of 128 and 256 fill the tensor cores.  For smaller blocks, adjacent lines
are merged until a tile is 128 wide (`hopper.tables`).  Merged lines with equal supports, as
in monarch, read as much as a block of 128.  If supports differ, missing blocks are multiplied as
zeros: up to twice (block 64) or four times (block 32) the stored work.  Concrete tables are merged
only if that is cheaper, traced tables always.  dW of block 32 computes 64 rows and drops 32.
TMA reads zeros outside an array and writes nothing there, so tokens need not fill a tile.  Mosaic
GPU (jax 0.12) takes more than eight rows by eights alone: other numbers of tokens are padded.

float32 is computed as six products of three bfloat16 components per factor, as exact as float32, at
a sixth of bfloat16's rate; wgmma alone would round to tf32.  The components take 1.5 times the
memory of x and values, three times in dW.  XLA computes the epilogue: bias and activation.

Traced tables of blocks below 128 are merged on the device, in about ten short XLA kernels for each
side of a weight.  Concrete tables are merged at trace time.

Inside `plgpu.force_gpu_interpret_mode()` the kernels run on a CPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.chips.hopper.gradient import line_gradient
from sparse_dataflow.chips.hopper.products import line_product
from sparse_dataflow.chips.hopper.shapes import build_line_tables, default_tuning
from sparse_dataflow.chips.hopper.tables import TERMS, expand_terms, split_float32
from sparse_dataflow.chips.hopper.tuning import TuningConfig
from sparse_dataflow.core.layouts.layout import LayoutTables
from sparse_dataflow.core.ops.activation import times_derivative, value_and_derivative
from sparse_dataflow.core.ops.block_sparse_matmul import fused
from sparse_dataflow.core.ops.dispatch import Shaped
from sparse_dataflow.files.errors import UserError

BLOCKS = (32, 64, 128, 256)
"""Legal block sides."""

DTYPES = ("bfloat16", "float32")
"""Legal dtypes of x and values."""

ROWS = 8
"""More rows of an array than this are a multiple of it; see `_by_eights`."""

NEEDED_JAX = (0, 11)
"""First jax version whose Mosaic GPU supports these kernels and interprets them."""


def block_sparse_matmul(
    x: jax.Array,
    values: jax.Array,
    tables: LayoutTables,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    tuning: TuningConfig | None = None,
) -> jax.Array:
    """Compute activation(x W + bias); differentiable in x, values and bias.

    The forward pass is one kernel.  In the backward pass XLA multiplies dy by the activation's
    derivative, because both gradients read the result many times.  `input_gradient` can fuse the
    derivative of the activation *before* this product.

    Args:
      x: as in `api.block_sparse_matmul`, also `values`, the stored blocks, and their `tables`.
        `block_sparse_matmul_refusal` of the three is empty.
      bias: [out_features], any float dtype.
      activation: name of a fused one in `config.activations`, or None.  bfloat16 uses the
        hardware's tanh, exact to about 11 bits; float32 uses XLA's.
      tuning: tile sizes; None for `default_tuning`.

    Returns:
      [tokens, out_features] in x's dtype; sums, bias and activation in float32.
    """
    tuning = tuning or default_tuning(x, values, tables)
    out_features = len(tables.in_index) * values.shape[1]
    options = fused.Options(activation, tuning, out_features)
    lines = jax.tree.map(jnp.asarray, build_line_tables(tables, len(values), tuning))
    return _matmul(options, x, values, bias, lines)


def value_and_preactivation(
    x: jax.Array, values: jax.Array, tables: LayoutTables, *, bias: jax.Array, activation: str
) -> tuple[jax.Array, jax.Array]:
    """Compute (activation(z), z) with z = x W + bias in one kernel; not differentiable.

    Takes arguments that `block_sparse_matmul` accepts, of at least one token.

    Returns:
      Two arrays [tokens, out_features] in x's dtype.
    """
    tuning = default_tuning(x, values, tables)
    options = fused.Options(activation, tuning, len(tables.in_index) * values.shape[1])
    lines = build_line_tables(tables, len(values), tuning)
    return tuple(_product(options, x, values, bias, lines, keep=True))


def input_gradient(
    dy: jax.Array,
    values: jax.Array,
    tables: LayoutTables,
    *,
    activation: str | None = None,
    preactivation: jax.Array | None = None,
    tuning: TuningConfig | None = None,
) -> jax.Array:
    """Compute dx = dy Wᵀ, or the gradient of what an activation made x from.

    Args:
      dy: [tokens, out_features] in x's dtype, of at least one token.
      values: see `block_sparse_matmul`, also for `tables` and `tuning`.
      activation: name of a fused one, of which x is the output; None for none.
      preactivation: [tokens, in_features] in dy's dtype, its input; the result is its gradient.

    Returns:
      [tokens, in_features] in dy's dtype.

    Raises:
      UserError: if `preactivation` has another shape or dtype, or comes without `activation`.
    """
    if (activation is None) != (preactivation is None):
        raise UserError("activation and preactivation belong together; legal: both, or neither.")
    features = len(tables.out_index) * values.shape[1]
    x = jax.ShapeDtypeStruct((len(dy), features), dy.dtype)
    z = x if preactivation is None else preactivation
    if (z.shape, z.dtype) != (x.shape, x.dtype):
        raise UserError(f"The pre-activation is {z.dtype} {z.shape}; legal: {x.dtype} {x.shape}.")
    tuning = tuning or default_tuning(x, values, tables, derivative=preactivation is not None)
    lines = build_line_tables(tables, len(values), tuning)
    return _input_gradient(tuning, dy, values, lines, features, activation, preactivation)


def weight_gradient(
    x: jax.Array, dy: jax.Array, tables: LayoutTables, *, values: Shaped
) -> jax.Array:
    """Compute xᵀ dy at the stored blocks.

    Args:
      x: see `block_sparse_matmul`, also for `tables`; at least one token.
      dy: [tokens, out_features] in x's dtype.
      values: shape and dtype of the gradient.

    Returns:
      [nnz, block, block] in the values' dtype.
    """
    tuning = default_tuning(x, values, tables)
    lines = build_line_tables(tables, len(values), tuning)
    return _weight_gradient(tuning, x, dy, values, lines)


def block_sparse_matmul_refusal(x: Shaped, values: Shaped, tables: LayoutTables) -> str:
    """Return why the target GPU cannot run these operands; empty if it can."""
    del tables  # Every layout is supported.
    if jax.__version_info__ < NEEDED_JAX:
        return f"this is jax {jax.__version__}; legal: {'.'.join(map(str, NEEDED_JAX))} or newer."
    if reason := _not_hopper():
        return reason
    block = values.shape[-1]
    if block not in BLOCKS:
        return f"block {block} does not fit the tiles; legal: {', '.join(map(str, BLOCKS))}."
    if x.dtype != values.dtype or x.dtype not in DTYPES:
        return f"x is {x.dtype} and values are {values.dtype}; legal: {', '.join(DTYPES)}."
    return ""


def _not_hopper():
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        # An abstract device has no compute capability.
        hopper = any(name in device.device_kind for name in ("H100", "H200", "H800", "H20"))
    else:
        device = jax.devices()[0]
        hopper = getattr(device, "compute_capability", None) == "9.0"
    kind = device.device_kind
    return "" if hopper else f"this is {kind}; legal: GPUs of compute capability 9.0."


def _gradients(options, x, values, preactivation, dy, lines):
    dz = dy
    if preactivation is not None:
        # The barrier keeps XLA from recomputing dz in float32 for the bias.
        dz = lax.optimization_barrier(times_derivative(options.activation, dy, preactivation))
    dvalues = _weight_gradient(options.tuning, x, dz, values, lines)
    dx = _input_gradient(options.tuning, dz, values, lines, x.shape[1])
    return dx, dvalues, dz, None


def _product(options, x, values, bias, lines, keep):
    bias = None if bias is None else bias.astype(jnp.float32)
    run = functools.partial(
        _line_product,
        tiles=options.tuning.forward,
        transposed=False,
        columns=options.out_features,
        multiprocessors=options.tuning.multiprocessors,
    )
    if x.dtype == jnp.float32:
        # The kernel sums products of components; XLA applies bias and activation to the float32
        # sum.
        (y,) = run(*_terms(x, values, lines.forward), dtype=jnp.float32)
        preactivation = y if bias is None else y + bias
        value = preactivation
        if options.activation is not None:
            value = value_and_derivative(options.activation, preactivation)[0]
        return [value, *([preactivation] if keep else [])]
    return run(
        x,
        values,
        lines.forward,
        bias=bias,
        activation=options.activation,
        with_preactivation=keep,
    )


def _input_gradient(tuning, dy, values, lines, features, activation=None, preactivation=None):
    run = functools.partial(
        _line_product,
        tiles=tuning.input_gradient,
        transposed=True,
        columns=features,
        multiprocessors=tuning.multiprocessors,
    )
    if dy.dtype == jnp.float32:
        (dx,) = run(*_terms(dy, values, lines.input_gradient), dtype=jnp.float32)
        return dx if preactivation is None else times_derivative(activation, dx, preactivation)
    return run(
        dy, values, lines.input_gradient, activation=activation, preactivation=preactivation
    )[0]


def _weight_gradient(tuning, x, dy, values, lines):
    if x.dtype == jnp.float32:
        # Concatenated terms are summed like tokens.
        first, second = zip(*TERMS)
        x, dy = (
            jnp.concatenate([split_float32(array)[component] for component in components])
            for array, components in ((x, first), (dy, second))
        )
    return line_gradient(
        _by_eights(x),
        _by_eights(dy),
        lines.weight_gradient,
        tuning.weight_gradient,
        result=jax.ShapeDtypeStruct(values.shape, values.dtype),
        multiprocessors=tuning.multiprocessors,
    )


def _line_product(x, *operands, preactivation=None, **options):
    preactivation = None if preactivation is None else _by_eights(preactivation)
    results = line_product(_by_eights(x), *operands, preactivation=preactivation, **options)
    return [result[: len(x)] for result in results]


def _by_eights(array):
    """Pad the rows of an array with zeros, as Mosaic GPU needs them."""
    missing = 0 if len(array) <= ROWS else -len(array) % ROWS
    return jnp.pad(array, ((0, missing), (0, 0))) if missing else array


def _terms(x, values, lines):
    """Return bfloat16 operands whose product is the float32 product."""
    others = x.shape[1] // values.shape[1]
    lines = expand_terms(lines, others, len(values))
    return jnp.concatenate(split_float32(x), axis=1), jnp.concatenate(split_float32(values)), lines


_matmul = fused.differentiable(_product, _gradients)
