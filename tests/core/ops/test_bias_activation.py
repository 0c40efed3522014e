"""Bias and activation against formulas in float64; the kernels against the same, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activation_formulas import FORMULAS
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples, some
from simulated_triton import simulated_triton

from sparse_dataflow.core.config.activations import fused_names
from sparse_dataflow.core.ops.bias_activation import bias_activation_op
from sparse_dataflow.core.ops.bias_activation.bias_activation_op import bias_activation
from sparse_dataflow.files.errors import UserError


def drawn(seed, rows, features, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = (*rows, features), (features,), (*rows, features)
    return [jnp.asarray(2 * rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("implementation", bias_activation_op.IMPLEMENTATIONS)
@settings(max_examples=examples(4), deadline=None)
@given(
    seed=st.integers(0, 99),
    rows=st.sampled_from([(16,), (3, 16), (2, 80), (48,)]),
    features=st.sampled_from([64, 192, 512]),
    name=st.sampled_from(fused_names()),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_values_and_gradients_are_those_of_float64(
    implementation, seed, rows, features, name, dtype
):
    x, bias, dy = drawn(seed, rows, features, dtype)
    with simulated_triton():
        y, pull = jax.vjp(lambda x, bias: bias_activation(x, bias, name, implementation), x, bias)
        dx, dbias = pull(dy)
    assert {a.dtype for a in (y, dx, dbias)} == {jnp.dtype(dtype)}
    x, bias, dy = (np.asarray(a, np.float64) for a in (x, bias, dy))
    step = 1e-30j
    total = x + bias
    slope = FORMULAS[name](total + step).imag / 1e-30
    # XLA rounds x + bias too.
    eps = (12 if implementation == "xla" else 4) * float(jnp.finfo(dtype).eps)
    size = 1 + total**2
    assert np.all(np.abs(np.asarray(y, float) - FORMULAS[name](total)) <= eps * size)
    assert np.all(np.abs(np.asarray(dx, float) - dy * slope) <= eps * size * (1 + np.abs(dy)))
    right, terms = ((dy * slope).reshape(-1, features).sum(0), np.abs(dy).reshape(-1, features))
    bound = eps * ((1 + np.abs(bias)) ** 2 * 40 + terms.sum(0))
    assert np.all(np.abs(np.asarray(dbias, float) - right) <= bound)


@pytest.mark.parametrize("name", some(fused_names(), "gelu"))
def test_forward_mode_agrees_with_the_reference(name):
    operands, tangents = drawn(1, (32,), 128)[:2], drawn(2, (32,), 128)[:2]
    results = []
    for implementation in bias_activation_op.IMPLEMENTATIONS:
        with simulated_triton():
            results.append(
                jax.jvp(
                    lambda x, b, i=implementation: bias_activation(x, b, name, i),
                    operands,
                    tangents,
                )
            )
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "features", "dtype", "name", "words"),
    [
        (17, 128, "float32", "gelu", "17 x 128"),
        (32, 96, "bfloat16", "gelu", "32 x 96"),
        (32, 128, "float16", "relu", "float16"),
        (32, 128, "float32", "gelu_exact", "gelu_exact"),
    ],
)
def test_what_kernels_do_not_run_is_refused_with_the_legal_values(
    rows, features, dtype, name, words
):
    x, bias, _ = drawn(0, (rows,), features, dtype)
    with simulated_triton():
        with pytest.raises(UserError, match=words):
            bias_activation(x, bias, name, "pallas_triton")
        assert bias_activation(x, bias, name).shape == x.shape
