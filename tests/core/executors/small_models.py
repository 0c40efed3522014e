"""A small model with a layer of each kind, random params and tokens, and a comparison."""

import dataclasses
import functools

import jax
import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.model import gpt, stacks

DENSE = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=40, max_len=12)
SPARSE = LinearSpec("block_sparse", "butterfly", density=0.25, block=4)
# One of each kind: dense, sparse, dense + low-rank, sparse + low-rank.
MODEL = dataclasses.replace(
    DENSE,
    linears={
        "attn_out": dataclasses.replace(SPARSE, hadamard=8),
        "mlp_in": LinearSpec(rank=2),
        "mlp_out": dataclasses.replace(SPARSE, rank=2),
    },
)


@functools.cache
def shapes(config):
    return jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))


def arbitrary_params(config, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: 0.2 * rng.normal(size=leaf.shape).astype(np.float32), shapes(config)
    )


def tokens_of(config, batch=4, length=11, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length), np.int32)


def tables_of(config):
    return stacks.layout_tables(stacks.layouts(config))


def assert_same(actual, expected, tolerance=2e-5):
    for path, leaf in jax.tree_util.tree_leaves_with_path(actual):
        twin = expected
        for key in path:
            twin = twin[getattr(key, "key", getattr(key, "idx", None))]
        scale = np.abs(leaf).max()
        assert np.all(np.isfinite(leaf)) and scale > 0, path
        np.testing.assert_allclose(
            leaf, twin, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path)
        )
