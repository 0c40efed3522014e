"""The block-sparse matmul in Mosaic GPU kernels for Hopper (H100, H200), all three products.

Tables are data in device memory, so a changed layout runs in the same program, and only stored
blocks are ever read or written.  Blocks of 128 and 256 fill the tensor cores.  Smaller ones cost
more.  Adjacent lines lie side by side until a tile is 128 wide (`pallas_hopper_tables`): those that
read the same blocks, as monarch's do, then read what a block of 128 reads.  Where supports differ
the missing blocks are multiplied as zeros; lines that share nothing cost up to twice (block 64) or
four times (block 32) the stored work, about what they would cost apart, when each stored block
reads its own tokens' features: with known tables the cheaper is chosen, traced ones always lie side
by side.  dW of block 32 multiplies 64 rows and keeps 32.  Nothing is padded in memory: TMA fills
what lies outside an array with zeros and writes none of it, so any number of tokens works.

float32 is multiplied as the six largest products of three bfloat16 parts a factor, which together
are as exact as float32, at a sixth of bfloat16's rate; wgmma alone would round it to tf32.  The
parts take one and a half times the memory of x and values, in dW three times; bias, activation and
residual are XLA's.

Traced tables of blocks below 128 are put side by side on the device, which is about ten short
kernels of XLA for each side of a weight; of known ones it is done while tracing.

With `plgpu.force_gpu_interpret_mode()` around the trace, the kernels run on a CPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels import tuned
from sparse_dataflow.kernels.block_sparse_matmul import fused
from sparse_dataflow.kernels.block_sparse_matmul import tuning_hopper as sizes
from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper_gradient import line_gradient
from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper_products import line_product
from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper_shapes import lines_of, spaces_of
from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper_tables import TERMS, split, terms_of
from sparse_dataflow.kernels.block_sparse_matmul.tuning_hopper import TuningConfig
from sparse_dataflow.kernels.dispatch import Shaped
from sparse_dataflow.kernels.gelu.api import through_gelu, value_and_derivative
from sparse_dataflow.kernels.tuned import Case, Space
from sparse_dataflow.sparsity.layout import LayoutTables

BLOCKS = (32, 64, 128, 256)
"""Legal blocks."""

DTYPES = ("bfloat16", "float32")
"""Legal dtypes of x and values."""

NEEDED_JAX = (0, 11)
"""The first jax whose Mosaic GPU has what the kernels use, and an interpreter for it."""


@dataclasses.dataclass(frozen=True)
class _Options(fused.Options):
    """What is fixed when the op is traced.

    Attributes:
      out_features: width of y.
    """

    out_features: int


def block_sparse_matmul(
    x: jax.Array,
    values: jax.Array,
    tables: LayoutTables,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    keep_preactivation: bool = True,
    tuning: TuningConfig | None = None,
) -> jax.Array:
    """activation(x W + bias) + residual, differentiable in x, values, bias and residual.

    One kernel forward.  Backward, dy times the activation's derivative is one elementwise pass of
    XLA, as both gradients read each of it many times; `input_gradient` fuses the derivative of
    the activation *before* this product instead, where it costs nothing.

    Args:
      x: bfloat16 or float32 [tokens, in_features].
      values: [nnz, block, block] in x's dtype, as `BlockLayout` orders them.
      tables: `BlockLayout.tables()`, concrete or traced.
      bias: [out_features], any float dtype.
      activation: None or "gelu" (tanh form, `kernels.gelu`; its tanh is the hardware's, right to
        about 11 bits, three more than bfloat16 holds; of float32 XLA's).
      residual: [tokens, out_features] in x's dtype.
      keep_preactivation: whether the backward pass finds the activation's input, or makes it
        again by another product; without an activation nothing is kept.
      tuning: tile sizes; None for `default_tuning`.

    Returns:
      [tokens, out_features] in x's dtype; sums, bias, activation and residual in float32.

    Raises:
      UserError: if there is a `refusal`, or the activation is unknown.
    """
    _refuse("block_sparse_matmul", refusal(x, values, tables))
    if activation not in (None, "gelu"):
        raise UserError(f"activation {activation!r} is unknown; legal: gelu, or None.")
    result = jax.ShapeDtypeStruct((len(x), len(tables.in_index) * values.shape[1]), x.dtype)
    _check_bias(bias, result)
    _check_alike("The residual", residual, result)
    if len(x) == 0:
        empty = jnp.zeros(result.shape, result.dtype)
        return empty if residual is None else empty + residual
    tuning = tuning or default_tuning(x, values, tables, residual=residual is not None)
    options = _Options(activation is not None, keep_preactivation, tuning, result.shape[1])
    lines = jax.tree.map(jnp.asarray, lines_of(tables, len(values), tuning))
    return _matmul(options, x, values, bias, residual, lines)


def value_and_preactivation(
    x: jax.Array,
    values: jax.Array,
    tables: LayoutTables,
    *,
    bias: jax.Array | None = None,
    tuning: TuningConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(gelu(z), z) of z = x W + bias in one kernel, for whoever writes the backward pass.

    Args:
      x: bfloat16 or float32 [tokens, in_features].
      values: [nnz, block, block] in x's dtype.
      tables: `BlockLayout.tables()`.
      bias: [out_features], any float dtype.
      tuning: tile sizes; None for `default_tuning`.

    Raises:
      UserError: if there is a `refusal`.
    """
    _refuse("value_and_preactivation", refusal(x, values, tables))
    result = jax.ShapeDtypeStruct((len(x), len(tables.in_index) * values.shape[1]), x.dtype)
    _check_bias(bias, result)
    if len(x) == 0:
        empty = jnp.zeros(result.shape, result.dtype)
        return empty, empty
    tuning = tuning or default_tuning(x, values, tables)
    options = _Options(True, True, tuning, result.shape[1])
    lines = lines_of(tables, len(values), options.tuning)
    return tuple(_product(options, x, values, bias, None, lines, keep=True))


def input_gradient(
    dy: jax.Array,
    values: jax.Array,
    tables: LayoutTables,
    *,
    preactivation: jax.Array | None = None,
    tuning: TuningConfig | None = None,
) -> jax.Array:
    """dy Wᵀ, times the GELU's derivative where the product's input was a GELU's value.

    Args:
      dy: [tokens, out_features] in x's dtype.
      values: [nnz, block, block] in x's dtype.
      tables: `BlockLayout.tables()`.
      preactivation: [tokens, in_features] in dy's dtype, the input of the GELU whose value this
        product multiplied; the result is then the gradient of that input.
      tuning: tile sizes; None for `default_tuning`.

    Returns:
      [tokens, in_features] in dy's dtype.

    Raises:
      UserError: if there is a `refusal`.
    """
    features = len(tables.out_index) * values.shape[1]
    x = jax.ShapeDtypeStruct((len(dy), features), dy.dtype)
    _refuse("input_gradient", refusal(x, values, tables))
    _check_alike("The pre-activation", preactivation, x)
    if len(dy) == 0:
        return jnp.zeros(x.shape, x.dtype)
    tuning = tuning or default_tuning(x, values, tables, derivative=preactivation is not None)
    lines = lines_of(tables, len(values), tuning)
    return _input_gradient(tuning, dy, values, lines, preactivation, features)


def weight_gradient(
    x: jax.Array,
    dy: jax.Array,
    tables: LayoutTables,
    *,
    accumulator: jax.Array | None = None,
    values: jax.ShapeDtypeStruct | None = None,
    tuning: TuningConfig | None = None,
) -> jax.Array:
    """xᵀ dy at the stored blocks, or accumulator + that, added as the sums are written.

    Args:
      x: bfloat16 or float32 [tokens, in_features].
      dy: [tokens, out_features] in x's dtype.
      tables: `BlockLayout.tables()`.
      accumulator: float32 [nnz, block, block], the sum over earlier micro-batches.
      values: shape and dtype of the gradient where there is no accumulator.
      tuning: tile sizes; None for `default_tuning`.

    Returns:
      Float32 with an accumulator, else in the values' dtype.

    Raises:
      UserError: if there is a `refusal`, the accumulator is not float32, or neither it nor the
        values are given.
    """
    if accumulator is not None:
        values = jax.ShapeDtypeStruct(accumulator.shape, x.dtype)
    if values is None:
        raise UserError("weight_gradient needs an accumulator, or the values' shape and dtype.")
    _refuse("weight_gradient", refusal(x, values, tables))
    if accumulator is not None and accumulator.dtype != jnp.float32:
        raise UserError(f"The accumulator is {accumulator.dtype}; legal: float32.")
    if len(x) == 0:
        return jnp.zeros(values.shape, values.dtype) if accumulator is None else accumulator
    tuning = tuning or default_tuning(x, values, tables, accumulate=accumulator is not None)
    lines = lines_of(tables, len(values), tuning)
    return _weight_gradient(tuning, x, dy, values, lines, accumulator)


def refusal(x: Shaped, values: Shaped, tables: LayoutTables) -> str:
    """Why these operands cannot run on the GPU compiled for, in words; empty where they can."""
    del tables  # Any layout runs: its tables lie in device memory.
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


def default_tuning(
    x: Shaped,
    values: Shaped,
    tables: LayoutTables,
    *,
    residual: bool = False,
    derivative: bool = False,
    accumulate: bool = False,
) -> TuningConfig:
    """Tile sizes for these shapes on the GPU compiled for.

    Args:
      x: [tokens, in_features]; only shapes are read.
      values: [nnz, block, block].
      tables: layout tables, concrete or traced.
      residual: whether the forward product reads one.
      derivative: whether the input's gradient is multiplied by an activation's derivative.
      accumulate: whether the values' gradient is added to an accumulator.
    """
    made = spaces_of(
        x, values, tables, residual=residual, derivative=derivative, accumulate=accumulate
    )
    tiles = tuned.fastest("block_sparse_matmul", made)
    return TuningConfig(**tiles, multiprocessors=sizes.multiprocessors())


def spaces(x: Shaped, values: Shaped, tables: LayoutTables) -> dict[Case, Space]:
    """What an autotuner may try for each product; arguments as in `default_tuning`."""
    return spaces_of(x, values, tables)


def _refuse(name, reason):
    if reason:
        raise UserError(f"{name} on Hopper GPUs: {reason}")


def _check_bias(bias, result):
    if bias is not None and bias.shape != result.shape[1:]:
        raise UserError(f"The bias has shape {bias.shape}; legal: {result.shape[1:]}.")


def _check_alike(name, array, result):
    if array is not None and (array.shape, array.dtype) != (result.shape, result.dtype):
        raise UserError(
            f"{name} is {array.dtype} {array.shape}; legal: {result.dtype} {result.shape}."
        )


def _not_hopper():
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        # A description has a name only.
        hopper = any(name in device.device_kind for name in ("H100", "H200", "H800", "H20"))
        kind = device.device_kind
    else:
        device = jax.devices()[0]
        kind = device.device_kind
        hopper = getattr(device, "compute_capability", None) == "9.0"
    return "" if hopper else f"this is {kind}; legal: GPUs of compute capability 9.0."


def _gradients(options, x, values, before, dy, lines):
    dz = dy
    if before is not None:
        # The barrier keeps XLA from making it once more, in float32, for the bias.
        dz = lax.optimization_barrier(through_gelu(dy, before))
    dvalues = _weight_gradient(options.tuning, x, dz, values, lines, None)
    dx = _input_gradient(options.tuning, dz, values, lines, None, x.shape[1])
    return dx, dvalues, dz, None


def _product(options, x, values, bias, residual, lines, keep):
    bias = None if bias is None else bias.astype(jnp.float32)
    run = functools.partial(
        line_product,
        tiles=options.tuning.forward,
        transposed=False,
        columns=options.out_features,
        multiprocessors=options.tuning.multiprocessors,
    )
    if x.dtype == jnp.float32:
        (y,) = run(*_terms(x, values, lines.forward), dtype=jnp.float32)
        before = y if bias is None else y + bias
        value = value_and_derivative(before)[0] if options.gelu else before
        return [value if residual is None else value + residual, *([before] if keep else [])]
    # With both, XLA adds the residual: a kernel keeps or reads one array beside its result.
    inside, after = (None, residual) if keep else (residual, None)
    y, *kept = run(
        x, values, lines.forward, bias=bias, gelu=options.gelu, residual=inside, keep=keep
    )
    return [y if after is None else y + after, *kept]


def _input_gradient(tuning, dy, values, lines, preactivation, features):
    run = functools.partial(
        line_product,
        tiles=tuning.input_gradient,
        transposed=True,
        columns=features,
        multiprocessors=tuning.multiprocessors,
    )
    if dy.dtype == jnp.float32:
        (dx,) = run(*_terms(dy, values, lines.input_gradient), dtype=jnp.float32)
        return dx if preactivation is None else through_gelu(dx, preactivation)
    return run(dy, values, lines.input_gradient, preactivation=preactivation)[0]


def _weight_gradient(tuning, x, dy, values, lines, accumulator):
    if x.dtype == jnp.float32:
        # Terms are summed like tokens.
        first, second = zip(*TERMS)
        x, dy = (
            jnp.concatenate([split(array)[part] for part in parts])
            for array, parts in ((x, first), (dy, second))
        )
    return line_gradient(
        x,
        dy,
        lines.weight_gradient,
        tuning.weight_gradient,
        result=jax.ShapeDtypeStruct(values.shape, values.dtype),
        accumulator=accumulator,
        multiprocessors=tuning.multiprocessors,
    )


def _terms(x, values, lines):
    """Operands of a product of bfloat16 numbers that is one of float32."""
    others = x.shape[1] // values.shape[1]
    lines = terms_of(lines, others, len(values))
    return jnp.concatenate(split(x), axis=1), jnp.concatenate(split(values)), lines


_matmul = fused.differentiable(_product, _gradients)
