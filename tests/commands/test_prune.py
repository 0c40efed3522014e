"""`sd.prune` of language models: every target by one function, and what it refuses."""

import dataclasses

import jax
import numpy as np
import pytest
from marks import some

import sparse_dataflow as sd
from sparse_dataflow.commands.prune_language_model import ROWS
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.model import stacks
from sparse_dataflow.data.tokenizer_library import Identity
from sparse_dataflow.runs.variants import variant


def dense(**change):
    config = sd.preset("pico").dense().change(model__num_layers=1, model__d_model=64, **change)
    model = sd.init(config, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * 2, model.params)  # Far from the identity.
    return dataclasses.replace(model, params=params)


MODEL = dense()
TOKENS = [np.random.default_rng(n).integers(0, 512, (8, 32)) for n in range(4)]
OTHERS = np.random.default_rng(9).integers(0, 512, (4, 32))


def error(pruned, model=MODEL):
    exact = np.asarray(sd.logits(model, OTHERS))
    return np.linalg.norm(sd.logits(pruned, OTHERS) - exact)


@pytest.mark.parametrize("block", some([16, "1x16", 1, "2:4", "narrow"], "1x16", "narrow"))
def test_every_target_is_a_model_that_is_saved_and_loaded(block, tmp_path):
    pruned = sd.prune(MODEL, TOKENS, block=block)
    nothing = dataclasses.replace(MODEL, params={**MODEL.params, "blocks": jax.tree.map(
        np.zeros_like, MODEL.params["blocks"])})  # fmt: skip
    assert error(pruned.model) < error(nothing)
    again = sd.load(sd.save(pruned.model, tmp_path / "model"))
    assert again.model == pruned.model.model
    np.testing.assert_allclose(
        sd.logits(again, OTHERS), sd.logits(pruned.model, OTHERS), rtol=1e-5, atol=1e-5
    )
    for name, mask in pruned.masks.items():
        assert mask.shape == (1, *MODEL.model.projection_shape(name))
        assert mask.mean() == 0.5
    if block == "narrow":
        assert pruned.model.model.d_ff == MODEL.model.d_ff // 2
    elif block == 16:
        assert set(pruned.model.model.sparse_projections) == set(MODEL.model.projections)
    else:
        assert set(pruned.model.model.masked_projections) == set(MODEL.model.projections)
        kernel = np.asarray(pruned.model.params["blocks"]["mlp_in"]["kernel"])
        assert not kernel[~pruned.masks["mlp_in"]].any()


@pytest.mark.parametrize(("density", "heads"), [(0.5, 4), (0.9, 6), (0.25, 2)])
def test_hidden_features_make_up_for_heads_that_are_rounded(density, heads):
    model = dense(model__num_heads=6, model__num_kv_heads=2, model__head_dim=16, model__d_ff=192)
    narrow = sd.prune(model, TOKENS, density=density, block="narrow").model.model
    assert (narrow.num_heads, narrow.kv_heads) == (heads, 2)

    def stored(config):  # The keys and values stay.
        return sum(a * b for a, b in map(config.projection_shape, config.projections)) - 64 * 64

    feature = 2 * 64
    assert stored(narrow) == pytest.approx(density * stored(model.model), abs=feature)


@pytest.mark.parametrize("density", [0.01, 0.74])
def test_a_narrow_model_has_at_least_one_and_no_more_features_than_the_model(density):
    model = dense(model__num_heads=2, model__num_kv_heads=2, model__d_ff=64)
    narrow = sd.prune(model, TOKENS, density=density, block="narrow").model.model
    assert 1 <= narrow.d_ff <= 64 and narrow.num_heads == 1


@pytest.mark.parametrize("pattern", some(["monarch", "shuffle"], "monarch"))
def test_a_pattern_has_its_layouts_and_the_fit_of_moved_features(pattern):
    pruned = sd.prune(MODEL, TOKENS, block=16, density=0.25, pattern=pattern)
    assert pruned.model.model.linear("mlp_in").pattern == pattern
    layouts = stacks.layouts_of(pruned.model.model, pruned.model.params)
    assert layouts == model_layouts.layouts(pruned.model.model)
    for name, mask in pruned.masks.items():
        assert np.array_equal(mask[0, ::16, ::16], layouts[name][0].mask)
    # Drawn weights have no better blocks than others; the fit alone has to pay.
    dense = {**MODEL.params, "blocks": jax.tree.map(np.zeros_like, MODEL.params["blocks"])}
    assert error(pruned.model) < error(dataclasses.replace(MODEL, params=dense))


@pytest.mark.slow
def test_others_can_be_pruned_in_another_shape_later(tmp_path):
    mlp = lambda name, _: name.startswith("mlp")  # noqa: E731
    first = sd.prune(MODEL, TOKENS, block=16, where=mlp).model
    both = sd.prune(first, TOKENS, block="1x16", where=lambda *each: not mlp(*each)).model
    assert set(both.model.sparse_projections) == {"mlp_in", "mlp_out"}
    assert set(both.model.masked_projections) == {"qkv", "attn_out"}
    for name in ("values", "bias"):
        arrays = [each.params["blocks"]["mlp_in"][name] for each in (first, both)]
        if name == "values":
            assert np.array_equal(*arrays)
    assert sd.load(sd.save(both, tmp_path / "model")).model == both.model


@pytest.mark.parametrize("block", some([1, "1x16", "16x1"], "1x16"))
def test_a_run_begins_with_masks_of_two_densities(block, tmp_path):
    model = MODEL
    for name, density in (("mlp_in", 0.5), ("mlp_out", 0.25)):
        model = sd.prune(
            model, TOKENS, block=block, density=density, where=lambda n, _, name=name: n == name
        ).model
    config = sd.preset(sd.save(model, tmp_path / "model"))
    assert config.sparsity.budget == "mlp_out:0.25"
    linears = dict(variant(config, "sparse", MODEL.model.vocab_size).model.linears)
    assert {name: spec.density for name, spec in linears.items()} == {
        "mlp_in": 0.5, "mlp_out": 0.25,
    }  # fmt: skip


@pytest.mark.slow
def test_finer_shapes_lose_less():
    errors = [error(sd.prune(MODEL, TOKENS, block=block).model) for block in (1, "1x16", 16)]
    assert errors == sorted(errors)


def test_a_folder_is_loaded_and_texts_are_tokenized(tmp_path):
    folder = sd.save(MODEL, tmp_path / "model")
    texts = ["def main():\n    return 1\n" * 20, "import os\n" * 60]
    pruned = sd.prune(folder, texts, where=lambda name, shape: name == "mlp_in", block=16)
    assert pruned.model.model.sparse_projections == ("mlp_in",)
    assert list(pruned.errors) == ["layer 1, mlp_in"]
    assert "1 projections, 50.0% of their weights" in repr(pruned)


def test_texts_are_the_documents_of_training():
    tokenizer = dataclasses.replace(MODEL.tokenizer, identity=Identity(prefix=(7,)))
    model = dataclasses.replace(MODEL, tokenizer=tokenizer)
    texts = [f"def main({number}):\n    return {number}\n" * 9 for number in range(4)]
    ids = np.concatenate([[7, *tokenizer.encode(text), tokenizer.eot_id] for text in texts])
    width = model.context
    rows = ids[: len(ids) // width * width].reshape(-1, width)
    ours, theirs = (
        sd.prune(model, batches, where=lambda name, shape: name == "mlp_in", block=16)
        for batches in (texts, [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)])
    )
    assert ours.errors == theirs.errors


INFINITE = dataclasses.replace(MODEL, params=jax.tree.map(np.array, MODEL.params))
INFINITE.params["blocks"]["mlp_out"]["kernel"][0, 3, 5] = np.nan
SHARED = dataclasses.replace(
    MODEL, model=dataclasses.replace(MODEL.model, num_layers=2, shared_layers=True)
)
SPARSE = dataclasses.replace(MODEL, model=MODEL.model.with_linears(LinearSpec("block_sparse")))


@pytest.mark.parametrize(
    ("model", "batches", "options", "words"),
    [
        (MODEL, [TOKENS[0] * 100], {}, r"ids from \d+ to \d+; legal: 0 to 511"),
        (MODEL, [np.zeros((2, 9999), int)], {}, r"sequences of 9999 tokens; legal: at most"),
        (MODEL, [TOKENS[0] / 2], {}, r"A batch is float64 .* legal: integers"),
        (MODEL, [TOKENS[0][0]], {}, r"A batch is int64 of shape \(32,\); legal: integers"),
        (MODEL, [TOKENS[0][:1, :4]], {}, r"fewer than 10 tokens"),
        (MODEL, ["text", TOKENS[0]], {}, r"A batch is .* or only texts"),
        (MODEL, [""], {}, r"fewer than 10 tokens"),
        (MODEL, None, {}, r"not a list of batches"),
        (MODEL, TOKENS, {"density": 0.4}, r"qkv: Density 0.4 has no"),
        (MODEL, TOKENS, {"density": 1}, r"^density=1; legal: above 0 and below 1"),
        (MODEL, TOKENS, {"density": 1.5, "block": "narrow"}, r"^density=1.5; legal: above 0"),
        (MODEL, TOKENS, {"density": -1, "block": "narrow"}, r"^density=-1; legal: above 0"),
        (MODEL, TOKENS, {"density": 0, "block": "2:4"}, r"^density=0; legal: above 0"),
        (SHARED, TOKENS, {}, r"^All layers share one block; legal"),
        (MODEL, TOKENS, {"where": lambda *_: False}, r"selects no projection; legal: qkv"),
        (MODEL, TOKENS, {"call": lambda *_: None}, r"call is for nnx models"),
        (SPARSE, TOKENS, {}, r"qkv has block-sparse weights already; legal: dense.*--to=DIR"),
        (SPARSE, TOKENS, {"block": "narrow"}, r"qkv has block-sparse weights already"),
        (MODEL, TOKENS, {"block": 48}, r"^qkv: .* In Python `where` leaves it out"),
        (MODEL, TOKENS, {"density": 0.4, "block": "1x16"}, r"^qkv: Density 0.4 has no .* 1/64"),
        (MODEL, TOKENS, {"density": 0.3, "block": "2:4"}, r"^qkv: density=0.3 with block=2:4"),
        (MODEL, TOKENS, {"block": "1x5"}, r"^qkv: Groups of 1x5 do not divide a 64 x 192"),
        (MODEL, TOKENS, {"pattern": "random"}, r"pattern='random' .* monarch and shuffle"),
        (MODEL, TOKENS, {"pattern": "monarch", "block": 1}, r"legal: .*, of square blocks"),
        (MODEL, TOKENS, {"rounds": 0}, r"rounds=0; legal: 1 or more, or None"),
        (INFINITE, TOKENS, {}, r"^layer 1 gives activations that are not finite; legal"),
        (3, TOKENS, {}, r"model is a int; legal: sd.Model"),
        ("/no/such/folder", TOKENS, {}, r"."),
    ],
)
def test_what_cannot_be_pruned_is_one_sentence(model, batches, options, words):
    with pytest.raises(sd.UserError, match=words):
        sd.prune(model, batches, **options)
