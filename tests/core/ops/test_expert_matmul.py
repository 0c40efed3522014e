"""The expert product: each implementation against a loop over tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_dataflow.core.ops.expert_matmul import (
    expert_matmul_op as api,
)
from sparse_dataflow.core.ops.expert_matmul import (
    expert_tiles as tiles,
)
from sparse_dataflow.core.ops.expert_matmul import (
    plain_expert_matmul as reference,
)

IMPLEMENTATIONS = {"tiles": tiles.expert_matmul, "ragged": api.ragged}
LOOP = reference.expert_matmul


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(("count", "dtype"), [(1, "float32"), (3, "bfloat16")])
def test_products_and_gradients_are_those_of_the_loop(name, count, dtype):
    rng = np.random.default_rng(0)
    experts = jnp.array([0, 2, 2], jnp.int32)
    x, weights, dy = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((6, count, 5), (4, count, 5, 4), (6, count, 4))
    )

    def run(function):
        y, pullback = jax.vjp(lambda x, w: function(x, w, experts), x, weights)
        return y, *pullback(dy)

    tolerance = 2e-5 if dtype == "float32" else 5e-2
    results = (jax.jit(run, static_argnums=0)(f) for f in (IMPLEMENTATIONS[name], LOOP))
    for ours, expected in zip(*results):
        np.testing.assert_allclose(
            *map(np.float64, (ours, expected)), atol=tolerance, rtol=tolerance
        )
        assert ours.dtype == dtype


def test_experts_without_rows_have_no_gradient():
    experts, rows = jnp.array([0, 2], jnp.int32), jnp.ones((4, 1, 2))
    weights = jnp.ones((3, 1, 2, 2))
    for function in IMPLEMENTATIONS.values():
        gradient = jax.grad(lambda w, f=function: f(rows, w, experts).sum())(weights)
        np.testing.assert_array_equal(gradient[1], 0)
        assert np.all(gradient[0] != 0)


def test_cpu_program_multiplies_each_row_once():
    """The work does not grow with the number of experts."""

    def flops(count):
        shapes = [(64, 1, 32), (count, 1, 32, 32)]
        x, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        experts = jax.ShapeDtypeStruct((8,), jnp.int32)
        lowered = jax.jit(api.expert_matmul).lower(x, weights, experts)
        return lowered.as_text().count("dot_general"), lowered.compile().memory_analysis()

    few, many = flops(2), flops(64)
    assert few[0] == many[0] == 1
    assert few[1].temp_size_in_bytes == many[1].temp_size_in_bytes
