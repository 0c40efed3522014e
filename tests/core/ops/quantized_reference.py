"""Quantised products in numpy float64: what qwix's scales and roundings must give."""

import ml_dtypes
import numpy as np

LARGEST = {"int8": 127.5, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""dtype -> number to which the largest magnitude of a row is scaled."""
ERRORS = {
    "int8": (0.0, 0.5),
    "float8_e4m3fn": (2.0**-4, 2.0**-10),
    "float8_e5m2": (2.0**-3, 2.0**-17),
}
"""dtype -> rounding error, relative to the number and absolute for a scale of 1."""
TYPES = {"int8": ("int8", "int8"), "fp8": ("float8_e4m3fn", "float8_e5m2")}
"""Precision -> dtypes of values and gradients."""


def rounded(array, dtype, axis):
    """Returns (array on the grid of its rows, largest change that one ulp of the scale can make).

    A number half way between two neighbours may go to either, because a compiler may divide by the
    scale as a product with its reciprocal.
    """
    array = np.asarray(array, np.float32)
    scale = np.abs(array).max(axis=axis, keepdims=True) / np.float32(LARGEST[dtype])
    scale = np.where(scale < 2.0**-63, np.float32(1), scale)

    def on_grid(numbers):
        if dtype == "int8":
            return np.clip(np.round(numbers), -128, 127)
        limit = np.float32(LARGEST[dtype])
        narrow = np.clip(numbers, -limit, limit).astype(getattr(ml_dtypes, dtype))
        return narrow.astype(np.float64)

    ratio = array / scale
    grid = on_grid(ratio)
    near = [np.abs(on_grid(ratio * np.float32(1 + e)) - grid) for e in (-3e-7, 3e-7)]
    return grid * scale.astype(np.float64), np.maximum(*near) * scale


def product(a, b, dtypes):
    """Returns (a @ b with rounded rows of a and columns of b, tolerance of each element)."""
    (a, a_slack), (b, b_slack) = rounded(a, dtypes[0], 1), rounded(b, dtypes[1], 0)
    magnitude = np.abs(a) @ np.abs(b)
    slack = a_slack @ np.abs(b) + np.abs(a) @ b_slack + a_slack @ b_slack
    return a @ b, slack + 1e-5 * magnitude


def exact_product(a, b, dtypes):
    """Returns (a @ b, largest possible difference of `product` from it in each element)."""

    def errors(array, dtype, axis):
        array = np.abs(np.asarray(array, np.float64))
        scale = array.max(axis=axis, keepdims=True) / LARGEST[dtype]
        relative, absolute = ERRORS[dtype]
        return array, np.maximum(relative * array, absolute * scale) * (1 + 1e-5)

    exact = a, b
    (a, a_error), (b, b_error) = errors(a, dtypes[0], 1), errors(b, dtypes[1], 0)
    return np.float64(exact[0]) @ np.float64(
        exact[1]
    ), a_error @ b + a @ b_error + a_error @ b_error


def three_products(x, weight, dy, groups, precision, multiply=product):
    """Returns both results of `multiply` for y, dx and dweight, group by group.

    `groups` has (input features, output features) of each dense rectangle of the weight.
    """
    value, gradient = TYPES[precision]
    results = [np.zeros((2, *shape)) for shape in (dy.shape, x.shape, weight.shape)]
    for inputs, outputs in groups:
        own_x, own_dy, own_w = x[:, inputs], dy[:, outputs], weight[np.ix_(inputs, outputs)]
        for result, index, *operands in (
            (results[0], np.s_[:, :, outputs], own_x, own_w, (value, value)),
            (results[1], np.s_[:, :, inputs], own_dy, own_w.T, (gradient, value)),
            (results[2], (slice(None), *np.ix_(inputs, outputs)), own_x.T, own_dy,
             (value, gradient)),
        ):  # fmt: skip
            result[index] = multiply(*operands)
    return results
