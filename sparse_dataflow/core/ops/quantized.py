"""Products of 8-bit operands with scales, by the library qwix.

Each operand of a product has one scale for each row that the product sums: its largest magnitude
is the largest 8-bit number.  Scales are drawn from the operands of every product anew, so there is
no state.  The sums are int32 or float32, and are multiplied by both scales.

The backward pass quantises its operands along the axes that it sums.  No scale thus depends on
another token's activations in the forward pass, nor on weights of another output.
"""

import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.files.errors import UserError


class Types(NamedTuple):
    """8-bit dtypes of a precision.

    Attributes:
      value: of activations and weights.
      gradient: of gradients of outputs.
    """

    value: str
    gradient: str


TYPES = {
    "fp8": Types("float8_e4m3fn", "float8_e5m2"),
    "int8": Types("int8", "int8"),
}
"""Precision in `config.model.PRECISIONS` -> its dtypes."""


def library() -> Any:
    """Imports qwix.

    Raises:
      UserError: it is not installed.
    """
    try:
        return importlib.import_module("qwix")
    except ImportError as error:
        raise UserError(
            f"model.precision={' and '.join(TYPES)} need the package qwix: pip install "
            "'sparse_dataflow[quantized]'; legal without it: compute_dtype."
        ) from error


def dot_general(
    a: jax.Array,
    b: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    dtypes: tuple[str, str],
) -> jax.Array:
    """Multiplies two arrays whose rows are rounded to 8 bits; the result has the dtype of `a`.

    Args:
      a: float array.
      b: float array.
      dimension_numbers: as in `lax.dot_general`; each operand has one scale for all elements along
        its contracted axes.
      dtypes: 8-bit dtypes of `a` and `b`.
    """
    qwix = library()

    def quantized(operand, contracted, dtype):
        kept = [axis for axis in range(operand.ndim) if axis not in contracted]
        # bfloat16 has too few bits for scales, and for numbers that are then rounded again.
        wide = operand.astype(jnp.promote_types(operand.dtype, jnp.float32))
        return qwix.quantize(wide, dtype, channelwise_axes=kept)

    operands = map(quantized, (a, b), dimension_numbers[0], dtypes)
    return qwix.dot_general(*operands, dimension_numbers).astype(a.dtype)


def matmul(x: jax.Array, weight: jax.Array, precision: str) -> jax.Array:
    """Multiplies x [tokens, inputs] and weight [inputs, outputs] in a precision of TYPES.

    Both products of the backward pass are quantised too.
    """
    return _matmul(precision, x, weight)


def _value(precision, x, weight):
    value = TYPES[precision].value
    return dot_general(x, weight, (((1,), (0,)), ((), ())), (value, value))


def _backward(precision, saved, dy):
    x, weight = saved
    value, gradient = TYPES[precision]
    dx = dot_general(dy, weight, (((1,), (1,)), ((), ())), (gradient, value))
    dweight = dot_general(x, dy, (((0,), (0,)), ((), ())), (value, gradient))
    return dx, dweight.astype(weight.dtype)


_matmul = derivatives.bilinear(_value, _backward)
