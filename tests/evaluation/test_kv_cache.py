"""A prompt at once and then token by token gives the logits of the whole text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoded import CONFIGS, DENSE, SPARSE
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.models import gpt
from sparse_dataflow.parallel import whole
from sparse_dataflow.planning import cost

ROWS, WIDTH, CACHE = 3, 8, 16


read_token = jax.jit(kv_cache.read_token, static_argnames="config")


def drawn(config, seed=0):
    """Arbitrary parameters, none of them zero, and tables."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))
    params = jax.tree.map(lambda s: rng.normal(size=s.shape, scale=0.3).astype("f4"), shapes)
    return params, gpt.layout_tables(gpt.layouts(config))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_incremental_logits_are_those_of_the_whole_text(config):
    params, tables = drawn(config)
    weights = kv_cache.prepare(config, params, tables)
    whole_logits = jax.jit(lambda params, tokens: whole.logits(config, params, tables, tokens))

    @settings(max_examples=10)
    @given(
        lengths=st.lists(st.integers(1, WIDTH), min_size=ROWS, max_size=ROWS),
        seed=st.integers(0, 99),
    )
    def check(lengths, seed):
        rng = np.random.default_rng(seed)
        text = rng.integers(0, config.vocab_size, (ROWS, CACHE), np.int32)
        expected = np.asarray(whole_logits(params, text))
        positions = np.asarray(lengths, np.int32)
        # What pads a prompt is any token; here the text itself would be cheating.
        prompts = np.where(np.arange(WIDTH) < positions[:, None], text[:, :WIDTH], 7)
        found, caches = kv_cache.read_prompts(
            config, weights, prompts, positions, cache_tokens=CACHE
        )
        rows = np.arange(ROWS)
        for _ in range(CACHE - WIDTH):
            np.testing.assert_allclose(found, expected[rows, positions - 1], rtol=2e-4, atol=2e-4)
            tokens = text[rows, positions]
            found, caches = read_token(config, weights, caches, tokens, positions)
            positions = positions + 1
        np.testing.assert_allclose(found, expected[rows, positions - 1], rtol=2e-4, atol=2e-4)

    check()


def test_a_wrong_position_is_seen():
    """The test above can fail: the same token one place later has other logits."""
    params, tables = drawn(DENSE)
    weights = kv_cache.prepare(DENSE, params, tables)
    prompts, lengths = np.full((1, 4), 3, np.int32), np.array([4], np.int32)
    _, caches = kv_cache.read_prompts(DENSE, weights, prompts, lengths, cache_tokens=8)
    right = read_token(DENSE, weights, caches, np.array([5]), np.array([4]))[0]
    wrong = read_token(DENSE, weights, caches, np.array([5]), np.array([5]))[0]
    assert np.abs(np.asarray(right) - wrong).max() > 1e-2


def test_weights_are_cast_once():
    config = dataclasses.replace(SPARSE, compute_dtype="bfloat16")
    weights = kv_cache.prepare(config, *drawn(config))
    floats = [a for a in jax.tree.leaves(weights) if not np.issubdtype(a.dtype, np.integer)]
    assert {str(leaf.dtype) for leaf in floats} == {"bfloat16"}
    assert len(weights.layers) == config.num_layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_bytes_that_a_token_reads_are_those_of_the_weights(config, dtype):
    config = dataclasses.replace(config, compute_dtype=dtype)
    weights = kv_cache.random_weights(config, seed=0)
    # Of positions one row is read, and of norms and gates too little to count.
    leaves = [weights.embed["tokens"]]
    for params, _ in weights.layers:
        leaves += [
            leaf
            for name, module in params.items()
            if "norm" not in name
            for part, leaf in module.items()
            if part != "gate"
        ]
    read = sum(leaf.nbytes for leaf in leaves)
    assert cost.decoding_bytes(config, batch=1, cached=0) == read
    size = jnp.dtype(dtype).itemsize
    cached = 2 * config.num_layers * 3 * 7 * config.d_model * size
    assert cost.decoding_bytes(config, batch=3, cached=7) == read + cached
