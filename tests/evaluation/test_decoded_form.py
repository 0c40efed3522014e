"""Masked weights are decoded as rows on a CPU, with the logits of the whole weights."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoded import DENSE
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import arbitrary_params, tables_of

from sparse_dataflow.commands.models.generate import Writer
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.weights.block_sparse import BlockSparse
from sparse_dataflow.core.weights.masked import Masked
from sparse_dataflow.core.weights.rows import Rows
from sparse_dataflow.evaluation import decoded_form, kv_cache
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner.decoding import decoding_bytes

WIDTH, CACHE = 6, 12
decode_token = jax.jit(kv_cache.decode_token, static_argnames="config")


def model(outputs=8, density=0.5, block=1, dtype="float32", layers=2):
    spec = LinearSpec("masked", density=density, block=block, block_outputs=outputs)
    shape = dataclasses.replace(DENSE, num_layers=layers, compute_dtype=dtype)
    return shape.with_linears(spec)


def blocks(side):
    return DENSE.with_linears(LinearSpec("block_sparse", "random", density=0.5, block=side))


def params_of(config, seed):
    """Returns nonzero parameters; masks are those that a run begins with."""
    drawn = gpt.init(config, jax.random.key(seed))
    masks = {path: leaf for path, leaf in jax.tree.leaves_with_path(drawn) if leaf.dtype == bool}
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.asarray(masks.get(path, leaf)), arbitrary_params(config, seed, 0.3)
    )


def stored(weights):
    """Returns the stored weights of all projections."""
    linears = itertools.chain(*(layer.items() for layer in weights.layers))
    return {type(module.weight) for _, module in linears if hasattr(module, "weight")}


@pytest.fixture(params=["native", "xla"])
def how(request, monkeypatch, compiled_kernels):
    """Products with rows by each implementation; a process has one choice of its own."""
    why = compiled_kernels or dispatch.sharding_refusal()
    if request.param == "native" and why:
        pytest.skip(why)
    monkeypatch.setattr(decoded_form, "_refusal", lambda: "")
    jax.clear_caches()
    with dispatch.without(*["row_matmul"] * (request.param != "native")):
        yield request.param
    jax.clear_caches()


def uneven(params, seed, outputs):
    """Returns parameters in whose masks groups of outputs have lost some of their rows, or all."""
    rng = np.random.default_rng(seed)

    def fewer(path, leaf):
        if path[-1].key != "mask":
            return leaf
        *stack, inputs, width = leaf.shape
        stays = rng.random((*stack, inputs, width // outputs)) < rng.choice([0, 0.5, 1])
        return leaf & stays.repeat(outputs, -1)

    return jax.tree_util.tree_map_with_path(fewer, params)


def logits(config, weights, seed, batch):
    """Returns the logits of a prompt and of a token after it, [2, batch, vocabulary]."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, config.vocab_size, (batch, CACHE), np.int32)
    lengths = rng.integers(1, WIDTH + 1, batch).astype(np.int32)
    first, caches = kv_cache.prefill(config, weights, text[:, :WIDTH], lengths, cache_tokens=CACHE)
    following, _ = decode_token(config, weights, caches, text[:, 0], lengths)
    return np.stack([first, following])


def test_logits_are_those_of_the_whole_weights(how):
    @settings(max_examples=3)
    @given(
        case=st.sampled_from([(1, 8, "float32"), (2, 16, "float32"), (1, 32, "bfloat16")]),
        density=st.sampled_from([0.25, 0.5]),
        batch=st.sampled_from([1, 9]),
        seed=st.integers(0, 99),
        even=st.booleans(),
    )
    def check(case, density, batch, seed, even):
        block, outputs, dtype = case
        config = model(outputs, density, block, dtype, layers=1)
        params = params_of(config, seed)
        params = params if even else uneven(params, seed, outputs)
        rows = kv_cache.prepare(config, params)
        assert stored(rows) == {Rows}
        whole = kv_cache.prepare(config, params, "dense")
        assert stored(whole) == {Masked}
        tolerance = {"float32": 3e-4, "bfloat16": 0.1}[dtype]
        expected = logits(config, whole, seed, batch)
        scale = max(1, np.abs(expected).max())
        difference = np.abs(logits(config, rows, seed, batch) - expected).max()
        assert difference <= tolerance * scale
        rounded = kv_cache.prepare(config, params, "int8")
        int8 = [leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(rounded)]
        assert sum(int8) == 1 + len(config.projections)
        assert np.abs(logits(config, rounded, seed, batch) - expected).max() <= 0.1 * scale

    check()


@pytest.mark.parametrize("form", ["auto", "int8", "rows"])
def test_each_form_of_rows_compiles_the_kernels(monkeypatch, form):
    """A form that a user names has them even if no model was prepared before."""
    calls: list[None] = []
    monkeypatch.setattr(decoded_form, "_refusal", lambda: calls.append(None) or "")
    config = model()
    kv_cache.prepare(config, params_of(config, 0), form)
    assert calls


@pytest.mark.parametrize("config", [DENSE, blocks(4), model(4), model(1), model(4, block=4)])
def test_weights_that_are_not_rows_are_refused_by_name_alone(config):
    model_weights = merged(params_of(config, 0), tables_of(config))
    with pytest.raises(UserError, match=r"no masks of rows .* legal: auto, dense"):
        kv_cache.prepare(config, model_weights, "rows")


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("projection", ["qkv", "mlp_out"])
def test_a_mask_of_other_entries_stays_whole(monkeypatch, layer, projection):
    monkeypatch.setattr(decoded_form, "_refusal", lambda: "")
    config = model()
    params = params_of(config, 0)
    mask = params["blocks"][projection]["mask"].copy()
    mask[layer, 3] = np.arange(mask.shape[-1]) % 2 == 0
    params["blocks"][projection]["mask"] = mask
    weights = kv_cache.prepare(config, params)
    for number, each in enumerate(weights.layers):
        is_whole = each[projection].weight.inputs is None
        assert is_whole == (number == layer)
    with pytest.raises(UserError, match=f"mask of {projection} in layer {layer} is not of rows"):
        kv_cache.prepare(config, params, "rows")


@pytest.mark.parametrize("block", [8, 16])
def test_blocks_are_decoded_as_rows(how, block):
    config = dataclasses.replace(blocks(block), num_layers=1)
    model_weights = merged(params_of(config, 0), tables_of(config))
    rows = kv_cache.prepare(config, model_weights)
    assert stored(rows) == {Rows}
    whole = kv_cache.prepare(config, model_weights, "dense")
    assert stored(whole) == {BlockSparse}
    expected = logits(config, whole, 0, 3)
    np.testing.assert_allclose(logits(config, rows, 0, 3), expected, 3e-4, 3e-4)
    rounded = kv_cache.prepare(config, model_weights, "int8")
    assert np.abs(logits(config, rounded, 0, 3) - expected).max() <= 0.1 * np.abs(expected).max()


def test_another_form_is_refused():
    with pytest.raises(UserError, match="form 'sparse' is unknown; legal: auto, rows, dense, int8"):
        kv_cache.prepare(model(), params_of(model(), 0), "sparse")


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_other_platforms_decode_whole_weights(monkeypatch, platform):
    monkeypatch.setattr(dispatch, "platform", lambda: platform)
    model_weights = params_of(model(), 0)
    assert stored(kv_cache.prepare(model(), model_weights)) == {Masked}
    with pytest.raises(UserError, match=f"Rows run on CPUs, and this is {platform}"):
        kv_cache.prepare(model(), model_weights, "rows")


def test_a_refused_kernel_is_said_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(decoded_form.cache, "FOLDER", tmp_path / "cache")
    monkeypatch.setattr(
        decoded_form.kernels, "build", lambda folder: f"no compiler for {folder.parent.name}"
    )
    monkeypatch.setattr(dispatch, "sharding_refusal", lambda: "")
    decoded_form._first_refusal.cache_clear()
    try:
        for _ in range(2):
            weights = kv_cache.prepare(model(), params_of(model(), 0))
    finally:
        decoded_form._first_refusal.cache_clear()
    [line] = capsys.readouterr().err.splitlines()
    assert "weights for decoding: products by XLA, because no compiler for kernels" in line
    assert stored(weights) == {Masked}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_dense_model_has_the_same_logits_as_rows(how, tied, positions):
    config = dataclasses.replace(DENSE, tied_embeddings=tied, positions=positions, num_layers=1)
    model_weights = params_of(config, 0)
    rows = kv_cache.prepare(config, model_weights)
    assert stored(rows) == {Rows}
    whole = kv_cache.prepare(config, model_weights, "dense")
    expected = logits(config, whole, 0, 3)
    np.testing.assert_allclose(logits(config, rows, 0, 3), expected, 3e-4, 3e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [model(8), model(16), blocks(8)])
def test_decoding_bytes_are_those_of_the_rows(monkeypatch, config, dtype):
    monkeypatch.setattr(decoded_form, "_refusal", lambda: "")
    config = dataclasses.replace(config, compute_dtype=dtype)
    model_weights = merged(params_of(config, 0), tables_of(config))
    weights = kv_cache.prepare(config, model_weights)
    linears = [m for layer in weights.layers for m in layer.values() if hasattr(m, "weight")]
    read = config.vocab_size * config.d_model * jnp.dtype(dtype).itemsize
    read += sum(leaf.nbytes for leaf in jax.tree.leaves(linears))
    assert decoding_bytes(config, 1, 0, rows=True) == read


def test_a_model_for_prompts_is_prepared_once(trained):
    writer = Writer(trained("dense"))
    assert writer.prepared() is writer.prepared() is not None
