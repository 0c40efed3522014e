"""Drafts change the time of a text, and neither a greedy text nor the distribution of texts."""

import collections
import dataclasses
import itertools
import types

import jax
import numpy as np
import pytest
import scipy.stats
from decoded import BYTES, CONFIGS, DENSE, SPARSE
from marks import some

from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.stacks import ModelWeights
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.evaluation.drafts import Draft
from sparse_dataflow.evaluation.generate import generate_tokens
from sparse_dataflow.evaluation.sampling import Sampler, Sampling
from sparse_dataflow.files.errors import UserError


def drawn_weights(config, seed, scale=1.0):
    shapes = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        value = rng.normal(size=leaf.shape, scale=scale).astype(np.float32)
        return 0 * value if path[-1].key == "bias" else value

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    tables = stacks.stored_layouts(config)
    return kv_cache.prepare(config, ModelWeights(params, tables))


def texts(config, weights, prompts, count, draft=None, sampling=None, context=16):
    return [*zip(*generate_tokens(config, weights, prompts, count, context, sampling, draft=draft))]


PROMPTS = [[3], [1, 2, 3, 4], [7, 7, 2, 5, 9, 1]]


@pytest.mark.parametrize("name", some(["dense", "sparse", "llama", "gemma2", "gemma3"], "gemma3"))
@pytest.mark.parametrize("tokens", some([1, 4], 4))
def test_greedy_texts_are_those_without_drafts(name, tokens):
    config = CONFIGS[name]
    weights = drawn_weights(config, 0)
    expected = texts(config, weights, PROMPTS, 12)
    for draft_config, seed in ((config, 0), (SPARSE, 5)):  # Accepts all; accepts few.
        draft = Draft(draft_config, drawn_weights(draft_config, seed), tokens)
        assert texts(config, weights, PROMPTS, 12, draft) == expected
        share = draft.accepted / draft.drafted
        assert share > 0.95 if seed == 0 else share < 0.5


def test_a_full_context_ends_only_its_row_with_drafts_too():
    weights = drawn_weights(DENSE, 0)
    draft = Draft(DENSE, weights, 3)
    expected = texts(DENSE, weights, PROMPTS, 9, context=8)
    assert texts(DENSE, weights, PROMPTS, 9, draft, context=8) == expected
    assert expected[2][-1] is None


@pytest.mark.slow
def test_a_sampled_text_does_not_depend_on_other_texts_of_the_batch():
    weights, sampling = drawn_weights(DENSE, 0), Sampling(1.3, seed=(4, 5, 6))
    draft = lambda: Draft(SPARSE, drawn_weights(SPARSE, 1), 3)  # noqa: E731
    together = texts(DENSE, weights, PROMPTS, 8, draft(), sampling)
    for prompt, seed, text in zip(PROMPTS, sampling.seed, together, strict=True):
        alone = dataclasses.replace(sampling, seed=(seed,))
        assert texts(DENSE, weights, [prompt], 8, draft(), alone) == [text]


TINY = dataclasses.replace(DENSE, num_layers=1, d_model=8, num_heads=2, d_ff=8, vocab_size=4)


@pytest.mark.parametrize(
    "sampling",
    some({"all": Sampling(0.8), "some": Sampling(1.2, top_k=3, top_p=0.95)}, "some"),
)
def test_sampled_texts_have_the_distribution_of_the_model(sampling):
    """Chi-squared over all texts of three tokens after the first, of four tokens each."""
    weights = drawn_weights(TINY, 0, 0.4)
    other = drawn_weights(TINY, 9, 0.4)
    number, length = 4096, 4
    draft = Draft(TINY, other, 2)
    seeded = dataclasses.replace(sampling, seed=tuple(range(number)))
    counts = collections.Counter(texts(TINY, weights, [[1]] * number, length, draft, seeded))
    assert 0.2 < draft.accepted / draft.drafted < 0.95

    every = np.array([*itertools.product(range(4), repeat=length)], np.int32)
    sampler = Sampler.of(sampling, len(every))
    at = np.full(len(every), 1, np.int32)
    logits, caches = kv_cache.prefill(
        TINY, weights, np.ones((len(every), 1), np.int32), at, cache_tokens=8
    )
    expected = np.ones(len(every))
    for i in range(length):
        chances = np.asarray(sampler.probabilities(logits), np.float64)
        expected *= chances[np.arange(len(every)), every[:, i]]
        logits, caches = kv_cache.decode_token(TINY, weights, caches, every[:, i], at + i)
    observed = np.array([counts[tuple(text)] for text in every.tolist()])
    assert observed[expected == 0].sum() == 0
    common = number * expected >= 5
    rare = [observed[~common].sum()], [number * expected[~common].sum()]
    observed, expected = (
        np.append(each[common], rest)
        for each, rest in zip((observed, number * expected), rare, strict=True)
    )
    some = expected > 0
    total = expected[some].sum()
    assert total == pytest.approx(number, rel=1e-4)
    chi = scipy.stats.chisquare(observed[some], expected[some] * observed[some].sum() / total)
    assert chi.pvalue > 1e-3
    # The draft alone writes other texts: the test can tell distributions apart.
    draft_counts = collections.Counter(texts(TINY, other, [[1]] * number, length, sampling=seeded))
    wrong = np.array([draft_counts[tuple(text)] for text in every.tolist()])[common]
    assert np.abs(wrong - observed[: common.sum()]).sum() > number / 10


def test_a_draft_of_another_vocabulary_or_a_shorter_context_is_refused():
    def model(context=16, tokenizer=BYTES):
        return types.SimpleNamespace(folder="RUN", context=context, tokenizer=tokenizer)

    other = types.SimpleNamespace(content_hash="other")
    with pytest.raises(UserError, match="has another tokenizer than RUN; legal: a model with"):
        Draft.of(model(tokenizer=other), model())
    with pytest.raises(UserError, match="a context of 8 tokens; legal: 16 or more"):
        Draft.of(model(8), model())


def test_a_round_that_is_longer_than_the_context_is_refused():
    model = types.SimpleNamespace(folder="RUN", context=16, tokenizer=BYTES)
    with pytest.raises(UserError, match=r"16 tokens drafted at a time .* RUN; legal: 1 to 15"):
        Draft.of(model, model, 16)
