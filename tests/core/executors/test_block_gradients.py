"""Block gradient norms equal those of the dense model, without its memory."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from small_models import arbitrary_params, arbitrary_weights, as_dense

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.executors.block_gradients import block_gradient_norms
from sparse_dataflow.runs.run_config import SIZES

PROJECTIONS = SIZES["nano"].projections

SPARSE = LinearSpec("block_sparse", "cyclic", density=0.25, block=8)
MODEL = ModelConfig(2, 64, 4, 128, vocab_size=40, max_len=8).with_linears(SPARSE)
RANKED = MODEL.with_linears(dataclasses.replace(SPARSE, rank=2), ["mlp_in"])
MIXED = ModelConfig(2, 64, 4, 128, 40, 8).with_linears(SPARSE, ["attn_out", "mlp_out"])
RANKED_MIXED = MIXED.with_linears(dataclasses.replace(SPARSE, rank=2), ["mlp_out"])


TOKENS = np.random.default_rng(1).integers(0, 40, (3, 9), np.int32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "remat"),
    [
        pytest.param(MODEL, "full", id="all-full"),
        pytest.param(RANKED_MIXED, "none", id="some-ranked-none"),
        pytest.param(RANKED, "none", id="ranked-none", marks=pytest.mark.nightly),
        pytest.param(MIXED, "none", id="some-none", marks=pytest.mark.nightly),
        pytest.param(MODEL, "none", id="all-none", marks=pytest.mark.nightly),
        pytest.param(RANKED, "full", id="ranked-full", marks=pytest.mark.nightly),
        pytest.param(MIXED, "full", id="some-full", marks=pytest.mark.nightly),
    ],
)
def test_norms_equal_those_of_the_dense_gradient(model, remat):
    weights = arbitrary_weights(model)
    probed = dataclasses.replace(model, remat=remat)
    norms = jax.jit(functools.partial(block_gradient_norms, probed))(
        weights, Batch.from_windows(TOKENS)
    )
    dense, dense_params = as_dense(model, arbitrary_params(model))
    metrics, gradients = jax.jit(
        lambda p: whole.loss_and_gradients(dense, p, (), Batch.from_windows(TOKENS))
    )(dense_params)
    assert metrics["loss"].number() > 0 and set(norms) == set(model.sparse_projections)
    for name, actual in norms.items():
        kernel = np.asarray(gradients["blocks"][name]["kernel"])
        in_blocks, out_blocks = (side // 8 for side in model.projection_shape(name))
        grid = kernel.reshape(2, in_blocks, 8, out_blocks, 8)
        expected = np.sqrt(np.square(grid).sum(axis=(2, 4)))
        assert expected.min() > 0
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6 * expected.max())


def test_no_array_is_larger_than_the_dense_gradient_of_a_projection(array_sizes):
    """With few tokens and a small vocabulary, weights are the largest arrays."""
    weights = arbitrary_weights(MODEL)
    sizes = array_sizes(
        functools.partial(block_gradient_norms, MODEL), weights, Batch.from_windows(TOKENS[:1])
    )
    largest = max(np.prod(MODEL.projection_shape(name)) for name in PROJECTIONS)
    stored = max(np.size(leaf) for leaf in jax.tree.leaves(arbitrary_params(MODEL)))
    assert stored < largest == max(sizes)
    layer = sum(np.prod(MODEL.projection_shape(name)) for name in PROJECTIONS)
    dense = [size for size in sizes if size > stored]
    # xᵀ dy of each projection and layer: as computed, reshaped to blocks and squared.
    assert sum(dense) <= 4 * layer * MODEL.num_layers
