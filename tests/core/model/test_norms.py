"""A norm's gradient: equal to autodiff's, and of its input alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from marks import some

from sparse_dataflow.core.model.shard import normalise


@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("kind", [nnx.LayerNorm, nnx.RMSNorm])
def test_the_gradient_saves_the_input_alone_and_is_autodiffs(kind, dtype):
    norm = kind(32, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    norm.scale[...] = jnp.linspace(0.5, 2, 32)
    x, dy = jax.random.normal(jax.random.key(0), (2, 3, 5, 32), dtype)
    graph, parameters = nnx.split(norm)

    def pulled(apply):
        y, pullback = jax.vjp(lambda p, x: apply(nnx.merge(graph, p), x), parameters, x)
        saved = [leaf for leaf in jax.tree.leaves(pullback) if leaf.size == x.size]
        return (y, pullback(dy)), saved

    (y, gradients), saved = pulled(normalise)
    expected, saved_by_autodiff = pulled(lambda norm, x: norm(x))
    assert [leaf.dtype for leaf in saved] == [x.dtype]
    assert len(saved_by_autodiff) > 1
    tolerance = 1e-6 if dtype == "float32" else 2e-2
    for got, right in zip(jax.tree.leaves((y, gradients)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float32),
            np.asarray(right, np.float32),
            rtol=tolerance,
            atol=tolerance,
        )
    assert jax.jvp(lambda x: normalise(norm, x), (x,), (dy,))[1].shape == x.shape
