"""Generated tokens are the most likely or sampled next tokens of the model."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from decoded import BYTES, CONFIGS, DENSE, SPARSE
from marks import some
from small_models import shapes_of, tables_of

from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.evaluation import generate as generate_module
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.evaluation.generate import bucket, generate, generate_tokens
from sparse_dataflow.evaluation.sampling import Sampling
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError


def confident_model(config, seed=0):
    """Returns (params, tables) whose next token is certain and depends on the previous tokens."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if path[-1].key == "bias":  # A bias of the last norm favours the same token everywhere.
            return np.zeros(leaf.shape, np.float32)
        return rng.normal(size=leaf.shape).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes_of(config))
    return params, tables_of(config)


def draw_prompts(lengths, vocab_size=40, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


def greedy_tokens(config, prompts, count, context=16):
    params, tables = confident_model(config)
    weights = kv_cache.prepare(config, merged(params, tables))
    return list(zip(*generate_tokens(config, weights, prompts, count, context)))


@pytest.mark.parametrize("config", some(CONFIGS, "dense", "sparse", "gemma3"))
def test_greedy_tokens_are_the_most_likely_tokens(config):
    params, tables = confident_model(config)
    prompts = draw_prompts((1, 4, 6))
    new = greedy_tokens(config, prompts, 8)
    logits = jax.jit(
        lambda params, tokens: whole.logits(config, weights_of(config, params, tables), tokens)
    )
    for prompt, added in zip(prompts, new):
        # The model is causal (core/model/test_gpt.py), so one pass gives the logits of all steps.
        text = np.pad([*prompt, *added], (0, 16 - len(prompt) - 8))[None]
        best = np.argmax(logits(params, text)[0], axis=-1)[len(prompt) - 1 :][: len(added)]
        np.testing.assert_array_equal(added, best)
    assert len(np.unique(new)) > 2  # guards against a constant output


def test_a_continuation_does_not_depend_on_other_prompts_of_the_batch():
    prompts = draw_prompts((5, 2, 7))
    batch = greedy_tokens(DENSE, prompts, 4)
    assert [greedy_tokens(DENSE, [prompt], 4)[0] for prompt in prompts] == batch


def test_a_full_context_ends_only_its_row():
    new = greedy_tokens(DENSE, draw_prompts((3, 6)), 9, context=8)
    assert [row.index(None) if None in row else len(row) for row in new] == [5, 2]


@pytest.mark.parametrize(
    "sampling",
    some({"greedy": Sampling(), "sampled": Sampling(1.5, 20, 0.9, seed=3)}, "sampled"),
)
def test_tokens_do_not_depend_on_how_many_a_program_writes(monkeypatch, sampling):
    params, tables = confident_model(SPARSE)
    weights = kv_cache.prepare(SPARSE, merged(params, tables))
    written = {}
    for most, seconds in ((1, 1e9), (8, 0), (8, 1e9)):
        counts = []

        def decode(*arguments, counts=counts, decode_tokens=kv_cache.decode_tokens, **most):
            counts.append(int(arguments[-1]))
            return decode_tokens(*arguments, **most)

        monkeypatch.setattr(generate_module, "SECONDS_UNSEEN", seconds)
        monkeypatch.setattr(kv_cache, "most_tokens", lambda most=most: most)
        with monkeypatch.context() as patch:
            patch.setattr(kv_cache, "decode_tokens", decode)
            prompts = draw_prompts((2, 5, 9))
            tokens = [*generate_tokens(SPARSE, weights, prompts, 13, 16, sampling)]
        written[most, seconds] = tokens, counts
    (one, singly), (slow, slowly), (fast, at_once) = written.values()
    assert one == slow == fast
    assert singly == slowly == [1] * 12 and at_once == [1, 2, 4, 5]


def test_a_deep_model_on_a_cpu_compiles_equal_layers_once(monkeypatch):
    config = dataclasses.replace(DENSE, num_layers=4)
    prompts = draw_prompts((5, 9))
    whole_programs = greedy_tokens(config, prompts, 6)
    monkeypatch.setattr(kv_cache, "DEEP", 3)
    kv_cache._layers.cache_clear()
    before = kv_cache.prefill._cache_size(), kv_cache.decode_tokens._cache_size()
    assert greedy_tokens(config, prompts, 6) == whole_programs
    assert (kv_cache.prefill._cache_size(), kv_cache.decode_tokens._cache_size()) == before
    for function, argument, jit in (
        (kv_cache._read_prompt, 16, {}),
        (kv_cache._append_text, True, {"donate_argnums": 1}),
    ):
        programs = set(kv_cache._layers(config, function, argument, **jit))
        assert [program._cache_size() for program in programs] == [1]


@pytest.mark.slow
def test_prompts_of_all_lengths_compile_few_programs():
    config = dataclasses.replace(DENSE, max_len=128)
    before = kv_cache.prefill._cache_size(), kv_cache.decode_tokens._cache_size()
    for length in range(1, 60, 4):
        greedy_tokens(config, draw_prompts((length,)), 3, context=64)
    after = kv_cache.prefill._cache_size(), kv_cache.decode_tokens._cache_size()
    assert after[0] - before[0] <= 5 and after[1] - before[1] <= 3
    assert [bucket(n) for n in (1, 16, 17, 100)] == [16, 16, 32, 128]


@pytest.fixture(scope="module")
def trained():
    """A model with one token per byte."""
    config = dataclasses.replace(SPARSE, vocab_size=BYTES.vocab_size, max_len=32)
    params, tables = confident_model(config)
    training = TrainingConfig(sequence=32)
    return Model(Path(), "sparse", config, merged(params, tables), BYTES, 0, training, None, {})


def test_streamed_text_is_the_decoded_tokens(trained):
    prompts = [BYTES.encode("ab").tolist(), [], BYTES.encode("hello").tolist()]
    streamed = {0: "", 1: "", 2: ""}

    def on_token(index, text):
        streamed[index] += text

    continuations = generate(trained, prompts, max_new_tokens=12, on_token=on_token)
    for index, continuation in enumerate(continuations):
        raw = b"".join(map(BYTES.token_to_bytes, continuation.tokens))
        assert continuation.text == raw.decode("utf-8", "replace") == streamed[index]
        assert continuation.stopped_by in ("length", "end")


def test_an_empty_prompt_is_an_end_of_text(trained):
    empty, end_of_text = generate(trained, [[], [BYTES.eot_id]], max_new_tokens=12)
    assert empty == end_of_text


def test_a_stop_string_ends_the_continuation(trained):
    prompt = BYTES.encode("ab").tolist()
    (unstopped,) = generate(trained, [prompt], max_new_tokens=12)
    stop = unstopped.text[3:5]
    (stopped,) = generate(trained, [prompt], max_new_tokens=12, stop=[stop])
    assert stopped.stopped_by == "stop"
    assert stopped.text == unstopped.text[: unstopped.text.index(stop)]
    assert len(stopped.tokens) < len(unstopped.tokens)
    # A text is one stop string, and not each of its characters.
    assert generate(trained, [prompt], max_new_tokens=12, stop=stop) == [stopped]


def test_sampled_tokens_depend_on_the_seed_and_the_row(trained):
    def sampled(seed):
        continuations = generate(
            trained, [[5], [5]], max_new_tokens=12, temperature=50.0, top_k=200, seed=seed
        )
        return [continuation.tokens for continuation in continuations]

    assert sampled(3) == sampled(3) != sampled(4)
    assert sampled(3)[0] != sampled(3)[1]


def test_a_text_with_its_own_seed_does_not_depend_on_the_batch(trained):
    def sampled(prompts, seed):
        continuations = generate(trained, prompts, max_new_tokens=12, temperature=50.0, seed=seed)
        return [continuation.tokens for continuation in continuations]

    batch = sampled([[5], [5, 7], [5]], seed=range(2, 5))
    assert batch == [sampled([p], seed=[s])[0] for p, s in (([5], 2), ([5, 7], 3), ([5], 4))]
    assert batch[0] != batch[2]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], [2] * 32], {}, "Prompt 2 has 32 tokens .* context of 32; legal: 1 to 31"),
        ("ab", {}, "prompts is one text .* legal: a list"),
        ([[300]], {}, "token ids from 300 to 300; legal: 0 to 299"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens 0 .* legal: 1 or more"),
        ([[1]], {"stop": ["a", ""]}, "stop string is empty"),
        ([[1]], {"top_p": 2.0}, "top_p=2.0 is not legal"),
        ([[1]], {"seed": [1, 2]}, "2 seeds do not fit 1 prompts"),
    ],
)
def test_invalid_input_raises(trained, prompts, options, message):
    with pytest.raises(UserError, match=message):
        generate(trained, prompts, **{"max_new_tokens": 4} | options)


def test_no_prompts_give_no_continuations(trained):
    assert generate(trained, [], max_new_tokens=4) == []
