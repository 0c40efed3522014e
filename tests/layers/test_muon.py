"""`optax.contrib.muon` orthogonalises stored blocks, with the line of docs/guide/layers.md."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sparse_dataflow as sd


def is_matrix(weight):
    return optax.contrib.MuonDimensionNumbers(-2, -1) if weight.ndim > 1 else None


@pytest.mark.parametrize("evolving", [False, True])
def test_each_stored_block_moves_by_an_orthogonal_matrix(evolving):
    layer = sd.BlockSparseLinear(32, 64, density=0.5, block=16, evolving=evolving, rngs=nnx.Rngs(0))
    transform = optax.contrib.muon(
        1.0, muon_weight_dimension_numbers=lambda params: jax.tree.map(is_matrix, params)
    )
    optimizer = nnx.Optimizer(layer, transform, wrt=nnx.Param)
    before = np.asarray(layer.values[...])
    x = jax.random.normal(jax.random.key(1), (64, 32))
    gradients = nnx.grad(lambda layer: jnp.sum(jnp.tanh(layer(x)) ** 2))(layer)
    optimizer.update(layer, gradients)
    moves = np.asarray(layer.values[...]) - before
    singular = np.linalg.svd(moves, compute_uv=False)
    # Newton-Schulz of optax ends between about 0.7 and 1.2.
    assert 0.5 < np.median(singular) < 1.3 and singular.max() < 1.5
    assert singular.shape == (len(before), 16)


def test_without_it_the_blocks_have_adam():
    layer = sd.BlockSparseLinear(32, 64, density=0.5, block=16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optax.contrib.muon(1.0), wrt=nnx.Param)
    before = np.asarray(layer.values[...])
    optimizer.update(layer, nnx.grad(lambda layer: jnp.sum(layer(jnp.ones((2, 32))) ** 2))(layer))
    moves = np.abs(np.asarray(layer.values[...]) - before)
    np.testing.assert_allclose(moves, moves.max(), rtol=1e-3)  # Adam moves every weight alike.
