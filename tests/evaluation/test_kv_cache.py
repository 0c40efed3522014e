"""Prefill and decoding give the logits of one pass over the complete text."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoded import CONFIGS, DENSE, SPARSE
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples, some
from places import ROOT
from small_models import arbitrary_params, tables_of

import sparse_dataflow as sd
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.projection import arrays
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.weights.weight import Linear
from sparse_dataflow.evaluation import decoded_form, kv_cache
from sparse_dataflow.planner.decoding import decoding_bytes
from sparse_dataflow.runs.variants import variant

ROWS, WIDTH, CACHE = 3, 8, 16


MOST_DIFFERENT = (
    "dense", "by depth", "llama", "blocks", "near blocks", "qwen3", "gemma2", "gemma3", "pythia",
    "smollm3", "yarn",
)  # fmt: skip
"""Configs that have between them what a cache depends on: heads, windows, rotations, layouts."""

decode_token = jax.jit(kv_cache.decode_token, static_argnames="config")


def random_model(config, seed=0):
    """Returns (params, tables) with nonzero parameters."""
    return arbitrary_params(config, seed, 0.3), tables_of(config)


@pytest.mark.parametrize("config", some(CONFIGS, *MOST_DIFFERENT))
def test_incremental_logits_equal_those_of_the_complete_text(config):
    params, tables = random_model(config)
    weights = kv_cache.prepare(config, merged(params, tables))
    whole_logits = jax.jit(
        lambda params, tokens: whole.logits(config, weights_of(config, params, tables), tokens)
    )

    @settings(max_examples=examples(10))
    @given(
        lengths=st.lists(st.integers(1, WIDTH), min_size=ROWS, max_size=ROWS),
        seed=st.integers(0, 99),
    )
    def check(lengths, seed):
        rng = np.random.default_rng(seed)
        text = rng.integers(0, config.vocab_size, (ROWS, CACHE), np.int32)
        expected = np.asarray(whole_logits(params, text))
        positions = np.asarray(lengths, np.int32)
        # Pads with a constant: the text itself would hide a read of the padding.
        prompts = np.where(np.arange(WIDTH) < positions[:, None], text[:, :WIDTH], 7)
        logits, caches = kv_cache.prefill(config, weights, prompts, positions, cache_tokens=CACHE)
        rows = np.arange(ROWS)
        for _ in range(CACHE - WIDTH):
            np.testing.assert_allclose(logits, expected[rows, positions - 1], rtol=2e-4, atol=2e-4)
            tokens = text[rows, positions]
            logits, caches = decode_token(config, weights, caches, tokens, positions)
            positions = positions + 1
        np.testing.assert_allclose(logits, expected[rows, positions - 1], rtol=2e-4, atol=2e-4)

    check()


@pytest.mark.parametrize(
    ("rows", "new", "at"), some([(1, 1, 7), (1, 3, 4), (2, 1, 5), (3, 2, 0)], 2, 3)
)
def test_caches_with_room_are_written_as_others(rows, new, at):
    params, tables = random_model(DENSE)
    weights = kv_cache.prepare(DENSE, merged(params, tables))
    rng = np.random.default_rng(at)
    shape = rows, DENSE.kv_heads, 8, DENSE.head_width
    keys, values = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    caches = (kv_cache.LayerCache(keys, values),) * DENSE.num_layers
    tokens = rng.integers(0, DENSE.vocab_size, (rows, new), np.int32)
    arguments = DENSE, weights, caches, tokens, np.full(rows, at, np.int32)
    decode = jax.jit(kv_cache.decode_text, static_argnums=(0, 5))
    plain, with_room = (decode(*arguments, has_room) for has_room in (False, True))
    for right, array in zip(*map(jax.tree.leaves, (plain, with_room)), strict=True):
        np.testing.assert_allclose(array, right, rtol=1e-5, atol=1e-5)


def test_a_cache_has_the_blocks_that_later_tokens_can_read():
    config = CONFIGS["near blocks"]
    weights = kv_cache.prepare(config, merged(*random_model(config)))
    prompts, lengths = np.full((2, 4), 3, np.int32), np.array([4, 1], np.int32)
    _, caches = kv_cache.prefill(config, weights, prompts, lengths, cache_tokens=CACHE)
    # A global block, the last and the one before, of 2 tokens each.
    assert {cache.keys.shape[2] for cache in caches} == {6}
    assert {cache.tokens for cache in caches} == {CACHE}


def test_logits_depend_on_the_position():
    """Guards the test above against being vacuous."""
    params, tables = random_model(DENSE)
    weights = kv_cache.prepare(DENSE, merged(params, tables))
    prompts, lengths = np.full((1, 4), 3, np.int32), np.array([4], np.int32)
    _, caches = kv_cache.prefill(DENSE, weights, prompts, lengths, cache_tokens=8)
    right = decode_token(DENSE, weights, caches, np.array([5]), np.array([4]))[0]
    wrong = decode_token(DENSE, weights, caches, np.array([5]), np.array([5]))[0]
    assert np.abs(np.asarray(right) - wrong).max() > 1e-2


@pytest.mark.parametrize("pattern", some(["monarch", "random"], "random"))
@pytest.mark.parametrize("rows", some([1, 2, 32], 2))
def test_a_gpu_decodes_without_kernels_and_without_tables_of_equal_groups(
    monkeypatch, pattern, rows
):
    """Each kernel would be compiled by itself in every layer; tables would be arguments."""
    config = DENSE.with_linears(LinearSpec("block_sparse", pattern, density=0.5, block=8))
    model_weights = merged(*random_model(config))
    tokens = np.arange(rows, dtype=np.int32)
    cache = jnp.zeros((rows, config.kv_heads, 4, config.head_width))
    caches = (kv_cache.LayerCache(cache, cache),) * config.num_layers
    arguments = caches, tokens, np.zeros_like(tokens)
    expected, _ = decode_token(config, kv_cache.prepare(config, model_weights), *arguments)
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    weights = kv_cache.prepare(config, model_weights)
    dense_shapes = jax.eval_shape(lambda: kv_cache.random_weights(DENSE, 0))
    tables = 4 * len(config.projections) * config.num_layers if pattern == "random" else 0
    assert len(jax.tree.leaves(weights)) == len(jax.tree.leaves(dense_shapes)) + tables
    decode = lambda *each: kv_cache.decode_token(config, *each)  # noqa: E731
    assert "pallas_call" not in str(jax.make_jaxpr(decode)(weights, *arguments))
    logits, _ = jax.jit(decode)(weights, *arguments)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


def test_weights_are_cast_once():
    config = dataclasses.replace(SPARSE, compute_dtype="bfloat16")
    weights = kv_cache.prepare(config, merged(*random_model(config)))
    floats = [a for a in jax.tree.leaves(weights) if not np.issubdtype(a.dtype, np.integer)]
    assert {str(leaf.dtype) for leaf in floats} == {"bfloat16"}
    assert len(weights.layers) == config.num_layers


@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("config", some(CONFIGS, "low rank", "llama", "gemma2"))
def test_decoding_bytes_are_those_of_the_weights_and_caches(monkeypatch, config, dtype):
    monkeypatch.setattr(decoded_form, "_refusal", lambda: "there is no kernel")
    config = dataclasses.replace(config, compute_dtype=dtype)
    weights = kv_cache.random_weights(config, seed=0)
    # The cost model neglects positions, norms, gates and side networks.
    leaves = [weights.embed["tokens"]]
    for layer in weights.layers:
        linears = (linear for linear in layer.values() if isinstance(linear, Linear))
        leaves += [a for each in linears for name, a in arrays(each).items() if name != "gate"]
    read = sum(leaf.nbytes for leaf in leaves)
    assert decoding_bytes(config, batch=1, cached=0) == read
    size = jnp.dtype(dtype).itemsize
    cached = 2 * config.num_layers * 3 * 7 * config.kv_heads * config.head_width * size
    assert decoding_bytes(config, batch=3, cached=7) == read + cached


def test_zeros_save_the_bytes_of_long_rows_of_dense_weights_for_one_text():
    config = dataclasses.replace(SPARSE, d_ff=256).with_linears(LinearSpec(), ("mlp_in", "qkv"))
    read = decoding_bytes(config, batch=1, cached=0)
    saved = read - decoding_bytes(config, 1, 0, activation_sparsity=0.25)
    assert saved == config.num_layers * 32 * 256 * 4 / 4
    assert decoding_bytes(config, 2, 0, activation_sparsity=0.25) == decoding_bytes(config, 2, 0)


def test_zeros_save_the_bytes_of_long_rows_of_the_first_factor():
    wide = ModelConfig(1, 1024, 8, 4096, vocab_size=8, max_len=8)
    config = wide.with_linears(LinearSpec("low_rank", density=0.5), ("attn_out",))
    config = config.with_linears(LinearSpec("block_sparse", "monarch", 0.5, 64), ("qkv",))
    assert config.inner_width("attn_out") == 256
    read, less = (decoding_bytes(config, 1, 0, activation_sparsity=s) for s in (0, 0.5))
    dense = 2 * 1024 * 4096  # mlp_in and mlp_out.
    assert read - less == 4 * 0.5 * (1024 * 256 + dense)


def test_equal_layers_are_traced_once(monkeypatch):
    config = dataclasses.replace(DENSE, num_layers=5, seed=123)
    params, tables = random_model(config)
    weights = kv_cache.prepare(config, merged(params, tables))
    traced, block = [], kv_cache.gpt.block
    monkeypatch.setattr(
        kv_cache.gpt, "block", lambda *args, **more: traced.append(1) or block(*args, **more)
    )
    tokens, positions = np.zeros((1, WIDTH), np.int32), np.array([WIDTH], np.int32)
    _, caches = kv_cache.prefill(config, weights, tokens, positions, cache_tokens=CACHE)
    decode_token(config, weights, caches, tokens[:, 0], positions)
    assert len(traced) == 2 and len(caches) == 5


def test_the_page_has_the_bytes_of_a_switch_between_models_of_the_13b():
    config = sd.preset("13b").change(model__compute_dtype="bfloat16")
    copied = {}
    for name in ("dense", "sparse"):
        model = variant(config, name).model
        tables = stacks.stored_layouts(model)
        weights = jax.eval_shape(
            lambda key, model=model, tables=tables: kv_cache.prepare(
                model, merged(gpt.init(model, key), tables)
            ),
            jax.random.key(0),
        )
        copied[name] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
    page = (ROOT / "docs/evidence/performance.md").read_text()
    [(dense, sparse, ratio)] = re.findall(
        r"a\s+dense\s+switch\s+copies\s+([\d.]+)\s+GB,\s+and\s+a\s+sparse\s+one\s+([\d.]+)\s+GB,"
        r"\s+a\s+ratio\s+of\s+\*\*([\d.]+)\*\*",
        page,
    )
    assert (dense, sparse) == (f"{copied['dense'] / 1e9:.2f}", f"{copied['sparse'] / 1e9:.2f}")
    assert ratio == f"{copied['dense'] / copied['sparse']:.2f}"
