"""lm-eval gets the log-likelihoods and texts of the model."""

import importlib.util
import types

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import some

from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.evaluation import scoring
from sparse_dataflow.evaluation.generate import generate
from sparse_dataflow.evaluation.scoring import Counts
from sparse_dataflow.evaluation.tasks.items import Item

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="the extra eval is not installed"
)


def make_request(*args):
    return types.SimpleNamespace(args=args)


def recording(log):
    def scorer(requests):
        log.extend(requests)
        return [(-float(sum(after)), False) for _, after in requests], Counts(len(requests))

    return scorer


@settings(max_examples=40)
@given(st.lists(st.tuples(st.text(max_size=20), st.text("ab \n", min_size=1, max_size=9)),
                min_size=1, max_size=4))  # fmt: skip
def test_text_is_tokenised_as_in_lm_eval(harness, tokenizer, pairs):
    pairs = [(a, b) for a, b in pairs if a.strip()] + [("", b) for _, b in pairs if b.strip()]
    tokenised, expected = [], []
    requests = [make_request(*pair) for pair in pairs]
    harness.HarnessLM(tokenizer, 32, recording(tokenised)).loglikelihood(requests)
    lm = harness.HarnessLM(tokenizer, 32, recording(expected))
    harness.TemplateLM.loglikelihood(lm, requests, disable_tqdm=True)
    for number, ((a, b), (before, after)) in enumerate(zip(pairs, expected)):
        if not after:  # The continuation merges into the last token of its context.
            expected[number] = before, tokenizer.encode(a[len(a.rstrip()) :] + b).tolist()
    assert tokenised == expected and len(tokenised) == len(pairs)


def test_a_choice_that_merges_into_its_context_is_scored_by_itself(harness, trained):
    model = trained("sparse")
    encode, letters = model.tokenizer.encode, "abcdefgh"
    first, second = next((a, b) for a in letters for b in letters if len(encode(a + b)) == 1)
    lm = harness.harness_lm(model)
    alone = lm.loglikelihood([make_request(first, second)])
    batch = lm.loglikelihood([make_request(first, choice) for choice in (second, " the")])
    forward, limits = scoring.single_device_forward(model), scoring.batch_limits(model)
    request = encode(first).tolist(), encode(second).tolist()
    expected, _ = scoring.score(forward, limits, [request])
    assert alone[0][0] == pytest.approx(expected[0][0], rel=1e-5) and expected[0][0] < 0
    assert batch[0][0] == pytest.approx(expected[0][0], rel=1e-5)


def test_rolling_predicts_every_token_once(harness, trained):
    model = trained("sparse")
    lm, encode = harness.harness_lm(model), model.tokenizer.encode
    logits_of = jax.jit(
        lambda tokens: whole.logits(model.model, weights_of(model.model, model.params), tokens)
    )
    texts = ["the abcd of " * n for n in (12, 40)]
    values = lm.loglikelihood_rolling([make_request(text) for text in texts])
    for text, value in zip(texts, values):
        ids, total = [model.tokenizer.eot_id, *encode(text)], 0.0
        assert len(ids) > 33
        for start in range(0, len(ids) - 1, 32):
            # All windows have the full context length; the last one starts earlier to reach it.
            first = min(start, len(ids) - 33)
            tokens = np.array(ids[first : first + 33], np.int32)
            logs = np.asarray(jax.nn.log_softmax(logits_of(tokens[None, :-1])[0]))
            new = min(32, len(ids) - 1 - start)
            total += logs[np.arange(32), tokens[1:]][-new:].sum()
        np.testing.assert_allclose(value, total, rtol=2e-5)


def test_a_custom_forward_is_used(harness, trained):
    model, calls = trained("dense"), []
    inner = scoring.single_device_forward(model)

    def forward(tokens, places, targets):
        calls.append(tokens.shape)
        shards = zip(np.split(tokens, 2), places, targets)
        outputs = [inner(rows, where[None], after[None]) for rows, where, after in shards]
        return tuple(map(np.concatenate, zip(*outputs)))

    limits = scoring.Limits(32, 64, shards=2)
    requests = [make_request("the abcd", " of the"), make_request("", "the")]
    scores = harness.harness_lm(model, forward, limits).loglikelihood(requests)
    expected = harness.harness_lm(model).loglikelihood(requests)
    assert calls and all(rows % 2 == 0 for rows, _ in calls)
    np.testing.assert_allclose([s for s, _ in scores], [s for s, _ in expected], rtol=1e-5)


def test_generation_is_batched_by_equal_arguments(harness, tokenizer):
    calls = []

    def generator(prompts, new_tokens, arguments):
        assert new_tokens == 16  # half of the context, although lm-eval allows 256
        calls.append((prompts, arguments))
        return [f"{arguments['until']}{len(prompt)}" for prompt in prompts]

    lm = harness.HarnessLM(tokenizer, 32, recording([]), generator)
    requests = [
        make_request("the", {"until": "a"}),
        make_request("of", {"until": "b"}),
        make_request("", {"until": "a"}),
    ]
    texts = lm.generate_until(requests)
    assert len(calls) == 2
    assert texts == [f"a{len(tokenizer.encode('the'))}", f"b{len(tokenizer.encode('of'))}", "a1"]
    assert lm.generate_until([make_request("the of " * 20, {"until": "c"})]) == ["c16"]
    assert (lm.counts.requests, lm.counts.truncated) == (4, 1)


@pytest.mark.parametrize(
    "limit",
    some(["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"], "max_gen_toks"),
)
def test_generated_texts_are_those_of_generate(harness, trained, limit):
    model = trained("sparse")
    prompts = ["the abcd of", "of the"]
    arguments = {"until": [""], limit: 5}
    texts = harness.harness_lm(model).generate_until([make_request(p, arguments) for p in prompts])
    ids = [model.tokenizer.encode(prompt).tolist() for prompt in prompts]
    assert texts == [c.text for c in generate(model, ids, max_new_tokens=5)]


ITEMS = [
    Item(f"question {i}:", tuple(f" answer {j}" for j in range(3)), i % 3, f"document {i % 4}")
    for i in range(12)
]


class PartlyCorrect:
    """Scores the correct answer highest for the first `correct` items."""

    def __init__(self, tokenizer, correct):
        self.tokenizer, self.correct, self.prompts = tokenizer, correct, []

    def __call__(self, requests):
        scores = []
        for before, after in requests:
            prompt = self.tokenizer.decode(before)
            self.prompts.append(prompt)
            number = int(prompt.rsplit("question ")[-1].split(":")[0])
            is_answer = self.tokenizer.decode(after) == f" answer {number % 3}"
            scores.append((float(is_answer == (number < self.correct)), False))
        return scores, Counts(len(scores))


@pytest.mark.parametrize("correct", [0, 5, 12])
@pytest.mark.parametrize("shots", [0, 3])
def test_accuracy_per_item(harness, lm_eval_tasks, tokenizer, correct, shots):
    scorer = PartlyCorrect(tokenizer, correct)
    task = lm_eval_tasks.make_task("custom", ITEMS)
    lm = harness.HarnessLM(tokenizer, 200, scorer)
    scores = harness.evaluate(lm, {"custom": task}, shots)["custom"]
    assert list(scores) == ["acc"]
    score = scores["acc"]
    assert score.items == 12 and not score.lower_is_better
    assert score.value == score.values.mean()
    np.testing.assert_array_equal(score.values, np.arange(12) < correct)
    for prompt in scorer.prompts:
        *examples, question = prompt.split("\n\n")
        assert len(examples) == shots and question not in {e.split(":")[0] for e in examples}
        for example in examples:
            number = int(example.split()[1].rstrip(":"))
            assert example == f"question {number}: answer {number % 3}"


def test_open_answers_are_correct_where_greedy(harness, lm_eval_tasks, tokenizer):
    items = [Item("a", (" the",), 0, "x"), Item("b", (" of",), 0, "y")]

    def scorer(requests):
        return [(-1.0, tokenizer.decode(b) == " of") for _, b in requests], Counts(len(requests))

    task = lm_eval_tasks.make_task("open", items)
    lm = harness.HarnessLM(tokenizer, 32, scorer)
    scores = harness.evaluate(lm, {"open": task}, 0)["open"]
    assert list(scores) == ["acc"] and scores["acc"].values.tolist() == [0.0, 1.0]
    limited = harness.evaluate(lm, {"open": task}, 0, limit=1)
    assert limited["open"]["acc"].items == 1
