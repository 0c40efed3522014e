"""Continuations are what the model itself says next, token by token."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from decoded import BYTES, CONFIGS, DENSE, SPARSE

from sparse_dataflow.evaluation import generate as generate_module
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.evaluation.generate import bucket, generate, new_tokens
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.models import gpt
from sparse_dataflow.parallel import whole


def decided(config, seed=0):
    """Parameters, and tables, of a model that is sure of its next token, so that rounding settles
    nothing, and says another one after other tokens."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if path[-1].key == "bias":  # The last norm's would name one token everywhere.
            return np.zeros(leaf.shape, np.float32)
        return rng.normal(size=leaf.shape).astype(np.float32)

    shapes = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(draw, shapes)
    return params, gpt.layout_tables(gpt.layouts(config))


def draw_prompts(lengths, vocab_size=40, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


def continued(config, prompts, count, context=16):
    params, tables = decided(config)
    weights = kv_cache.prepare(config, params, tables)
    return list(zip(*new_tokens(config, weights, prompts, count, context)))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_token_is_the_most_likely_one(config):
    params, tables = decided(config)
    prompts = draw_prompts((1, 4, 6))
    new = continued(config, prompts, 8)
    logits = jax.jit(lambda params, tokens: whole.logits(config, params, tables, tokens))
    for prompt, added in zip(prompts, new):
        # No logit sees a later token (tests/models/test_gpt.py), so one pass tells every step's.
        text = np.pad([*prompt, *added], (0, 16 - len(prompt) - 8))[None]
        best = np.argmax(logits(params, text)[0], axis=-1)[len(prompt) - 1 :][: len(added)]
        np.testing.assert_array_equal(added, best)
    assert len(np.unique(new)) > 2  # One token said again and again would prove little.


def test_a_prompt_is_continued_by_itself_whatever_its_neighbours():
    prompts = draw_prompts((5, 2, 7))
    together = continued(DENSE, prompts, 4)
    assert [continued(DENSE, [prompt], 4)[0] for prompt in prompts] == together


def test_a_full_context_ends_a_row_and_not_the_others():
    new = continued(DENSE, draw_prompts((3, 6)), 9, context=8)
    assert [row.index(None) if None in row else len(row) for row in new] == [5, 2]


@pytest.mark.slow
def test_prompts_of_all_lengths_run_in_a_few_programs():
    config = dataclasses.replace(DENSE, max_len=128)
    before = kv_cache.read_prompts._cache_size(), generate_module._read_token._cache_size()
    for length in range(1, 60, 4):
        continued(config, draw_prompts((length,)), 3, context=64)
    after = kv_cache.read_prompts._cache_size(), generate_module._read_token._cache_size()
    assert after[0] - before[0] <= 5 and after[1] - before[1] <= 3
    assert [bucket(n) for n in (1, 16, 17, 100)] == [16, 16, 32, 128]


@pytest.fixture(scope="module")
def trained():
    """What `generate` reads of a trained model, over a vocabulary of single bytes."""
    config = dataclasses.replace(SPARSE, vocab_size=BYTES.vocab_size, max_len=32)
    params, tables = decided(config)
    return types.SimpleNamespace(
        model=config, params=params, tables=tables, tokenizer=BYTES, context=32
    )


def test_a_continuation_is_text_and_its_tokens(trained):
    prompts = [BYTES.encode("ab").tolist(), [], BYTES.encode("hello").tolist()]
    told = {0: "", 1: "", 2: ""}

    def tell(number, text):
        told[number] += text

    found = generate(trained, prompts, max_new_tokens=12, on_token=tell)
    for number, continuation in enumerate(found):
        raw = b"".join(map(BYTES.bytes_of, continuation.tokens))
        assert continuation.text == raw.decode("utf-8", "replace") == told[number]
        assert continuation.stopped_by in ("length", "end")
    # Nothing before a document is its end.
    alone = generate(trained, [[BYTES.eot_id]], max_new_tokens=12)
    assert alone[0] == found[1]


def test_a_stop_string_ends_it(trained):
    prompt = BYTES.encode("ab").tolist()
    (free,) = generate(trained, [prompt], max_new_tokens=12)
    stop = free.text[3:5]
    (stopped,) = generate(trained, [prompt], max_new_tokens=12, stop=[stop])
    assert stopped.stopped_by == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]
    assert len(stopped.tokens) < len(free.tokens)


def test_draws_are_those_of_the_seed(trained):
    def drawn(seed):
        found = generate(
            trained, [[5], [5]], max_new_tokens=12, temperature=50.0, top_k=200, seed=seed
        )
        return [continuation.tokens for continuation in found]

    assert drawn(3) == drawn(3) != drawn(4)
    assert drawn(3)[0] != drawn(3)[1]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], [2] * 32], {}, "Prompt 2 has 32 tokens, and the model sees 32 at once.* 1 to 31"),
        ([[300]], {}, "tokens from 300 to 300; legal: 0 to 299"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens 0 .* legal: 1 or more"),
        ([[1]], {"stop": ["a", ""]}, "stop string is empty"),
        ([[1]], {"top_p": 2.0}, "top_p 2.0"),
    ],
)
def test_bad_input_is_named(trained, prompts, options, message):
    with pytest.raises(UserError, match=message):
        generate(trained, prompts, **{"max_new_tokens": 4} | options)


def test_no_prompts_are_no_work(trained):
    assert generate(trained, [], max_new_tokens=4) == []
