"""Random operands of the sparse MLP, and its exact results."""

import jax.numpy as jnp
import numpy as np
from activation_formulas import FORMULAS

from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.layouts.patterns import make_layout


def mlp_layouts(pattern, ring=8, degree=2, wide=4, block=4, offsets=(2, 3)):
    """Return layouts of mlp_in and mlp_out: `ring` blocks outside, `wide` times as many inside."""
    outside, inside = ring * block, ring * wide * block
    return (
        make_layout(pattern, outside, inside, block, degree / ring, offsets[0]),
        make_layout(pattern, inside, outside, block, degree / ring, offsets[1]),
    )


def irregular(block, seed=0):
    """Return layouts of 3 to 5 to 4 blocks, with empty lines on both sides."""
    rng = np.random.default_rng(seed)
    masks = [rng.random(shape) < 0.5 for shape in ((3, 5), (5, 4))]
    masks[0][:, 1] = masks[1][2] = False
    masks[0][2] = masks[1][:, 3] = False
    return tuple(BlockLayout.from_mask(mask, block) for mask in masks)


def permuted_groups(block=3):
    """Return layouts of three unequal groups whose blocks lie at no stride."""
    inside, hidden, outside = map(np.array, ([0, 1, 1, 2, 0], [2, 0, 1, 0, 2, 2], [1, 0, 2]))
    masks = inside[:, None] == hidden, hidden[:, None] == outside
    return tuple(BlockLayout.from_mask(mask, block) for mask in masks)


def draw_operands(layouts, tokens, dtype, seed=0):
    """Return (x, values_in, bias_in, values_out) and a cotangent; activations near 1."""
    rng = np.random.default_rng(seed)
    first, second = layouts
    shapes = (
        (*tokens, first.in_features),
        (first.nnz, first.block, first.block),
        (first.out_features,),
        (second.nnz, second.block, second.block),
        (*tokens, second.out_features),
    )
    scales = (1, first.in_features**-0.5, 1, second.in_features**-0.5, 1)
    arrays = [(s * rng.normal(size=n)).astype(jnp.dtype(dtype)) for s, n in zip(scales, shapes)]
    return arrays[:-1], arrays[-1]


def exact(operands, dy, layouts, activation="gelu"):
    """Return the dense MLP's y and gradients, in float64."""
    x, values_in, bias, values_out = (np.asarray(a, np.float64) for a in operands)
    dy = np.asarray(dy, np.float64)
    flat, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    weight_in, weight_out = layouts[0].to_dense(values_in), layouts[1].to_dense(values_out)
    activate = FORMULAS[activation]
    pre = flat @ weight_in + bias
    hidden = activate(pre)
    step = 1e-30
    dpre = flat_dy @ weight_out.T * activate(pre + 1j * step).imag / step
    return (
        (hidden @ weight_out).reshape(dy.shape),
        (dpre @ weight_in.T).reshape(x.shape),
        layouts[0].from_dense(flat.T @ dpre),
        dpre.sum(0),
        layouts[1].from_dense(hidden.T @ flat_dy),
    )


def draw_gated(layouts, tokens, dtype, seed=0):
    """Return (x, values_in, values_gate, values_out) and a cotangent; no bias."""
    (x, values_in, _, values_out), dy = draw_operands(layouts, tokens, dtype, seed)
    values_gate = draw_operands(layouts, tokens, dtype, seed + 1)[0][1]
    return (x, values_in, values_gate, values_out), dy


def exact_gated(operands, dy, layouts, activation):
    """Return the dense gated MLP's y and gradients, in float64: three products."""
    x, *values = (np.asarray(a, np.float64) for a in operands)
    places = layouts[0], layouts[0], layouts[1]
    into, gate, out = (layout.to_dense(each) for layout, each in zip(places, values))
    dy, activate = np.asarray(dy, np.float64), FORMULAS[activation]
    up, z = x @ into, x @ gate
    slope = activate(z + 1e-30j).imag / 1e-30
    hidden, dhidden = up * activate(z), dy @ out.T
    dup, dz = dhidden * activate(z), dhidden * up * slope
    gradients = x.T @ dup, x.T @ dz, hidden.T @ dy
    return (
        hidden @ out,
        dup @ into.T + dz @ gate.T,
        *(layout.from_dense(each) for layout, each in zip(places, gradients)),
    )


TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 4e-2}


def assert_close(actual, right, dtype):
    for result, expected in zip(actual, right, strict=True):
        assert result.shape == expected.shape and result.dtype == jnp.dtype(dtype)
        atol = TOLERANCE[dtype] * max(1, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(np.asarray(result, np.float64), expected, atol=atol, rtol=0)
