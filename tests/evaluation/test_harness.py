"""What lm-eval is told about a model is what the model says."""

import types

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

from lm_eval.api.model import TemplateLM

from sparse_dataflow.evaluation import harness, scoring
from sparse_dataflow.evaluation.generate import generate
from sparse_dataflow.evaluation.harness import HarnessLM
from sparse_dataflow.evaluation.scoring import Counts
from sparse_dataflow.evaluation.tasks import lm_eval_tasks
from sparse_dataflow.evaluation.tasks.items import Item
from sparse_dataflow.parallel import whole


def asked(*args):
    return types.SimpleNamespace(args=args)


def remembering(into):
    def scorer(requests):
        into.extend(requests)
        return [(-float(sum(after)), False) for _, after in requests], Counts(len(requests))

    return scorer


@settings(max_examples=40)
@given(st.lists(st.tuples(st.text(max_size=20), st.text("ab \n", min_size=1, max_size=9)),
                min_size=1, max_size=4))  # fmt: skip
def test_text_becomes_the_tokens_that_lm_eval_would_make(tokenizer, pairs):
    pairs = [(a, b) for a, b in pairs if a.strip()] + [("", b) for _, b in pairs if b.strip()]
    mine, theirs = [], []
    requests = [asked(*pair) for pair in pairs]
    HarnessLM(tokenizer, 32, remembering(mine)).loglikelihood(requests)
    lm = HarnessLM(tokenizer, 32, remembering(theirs))
    TemplateLM.loglikelihood(lm, requests, disable_tqdm=True)
    assert mine == theirs and len(mine) == len(pairs)


def test_rolling_predicts_every_token_once(trained):
    model = trained("sparse")
    lm, encode = harness.harness_lm(model), model.tokenizer.encode
    logits_of = jax.jit(
        lambda tokens: whole.logits(model.model, model.params, model.tables, tokens)
    )
    texts = ["the abcd of " * n for n in (12, 40)]
    found = lm.loglikelihood_rolling([asked(text) for text in texts])
    for text, value in zip(texts, found):
        ids, total = [model.tokenizer.eot_id, *encode(text)], 0.0
        assert len(ids) > 33
        for start in range(0, len(ids) - 1, 32):
            # Windows of a whole context; the last reaches back to be as long.
            first = min(start, len(ids) - 33)
            tokens = np.array(ids[first : first + 33], np.int32)
            logs = np.asarray(jax.nn.log_softmax(logits_of(tokens[None, :-1])[0]))
            new = min(32, len(ids) - 1 - start)
            total += logs[np.arange(32), tokens[1:]][-new:].sum()
        np.testing.assert_allclose(value, total, rtol=2e-5)


def test_another_forward_is_used_as_given(trained):
    """As an executor or a mesh of another kind would come in."""
    model, calls = trained("dense"), []
    inner = scoring.forward_of(model)

    def forward(tokens, places):
        calls.append(tokens.shape)
        halves = np.split(tokens, 2)
        found = [inner(half, own[None]) for half, own in zip(halves, places)]
        return tuple(np.concatenate(parts) for parts in zip(*found))

    limits = scoring.Limits(32, 64, parts=2)
    requests = [asked("the abcd", " of the"), asked("", "the")]
    mine = harness.harness_lm(model, forward, limits).loglikelihood(requests)
    theirs = harness.harness_lm(model).loglikelihood(requests)
    assert calls and all(rows % 2 == 0 for rows, _ in calls)
    np.testing.assert_allclose([s for s, _ in mine], [s for s, _ in theirs], rtol=1e-5)


def test_generation_is_asked_by_equal_arguments(tokenizer):
    calls = []

    def writer(prompts, new_tokens, arguments):
        assert new_tokens == 16  # Half of the context, of the 256 that lm-eval would allow.
        calls.append((prompts, arguments))
        return [f"{arguments['until']}{len(prompt)}" for prompt in prompts]

    lm = HarnessLM(tokenizer, 32, remembering([]), writer)
    requests = [
        asked("the", {"until": "a"}),
        asked("of", {"until": "b"}),
        asked("", {"until": "a"}),
    ]
    written = lm.generate_until(requests)
    assert len(calls) == 2
    assert written == [f"a{len(tokenizer.encode('the'))}", f"b{len(tokenizer.encode('of'))}", "a1"]
    assert lm.generate_until([asked("the of " * 20, {"until": "c"})]) == ["c16"]
    assert (lm.counts.requests, lm.counts.truncated) == (4, 1)


def test_what_is_written_is_what_generate_writes(trained):
    model = trained("sparse")
    prompts = ["the abcd of", "of the"]
    arguments = {"until": [""], "max_gen_toks": 5}
    found = harness.harness_lm(model).generate_until([asked(p, arguments) for p in prompts])
    ids = [model.tokenizer.encode(prompt).tolist() for prompt in prompts]
    assert found == [c.text for c in generate(model, ids, max_new_tokens=5)]


ITEMS = [
    Item(f"question {i}:", tuple(f" answer {j}" for j in range(3)), i % 3, f"document {i % 4}")
    for i in range(12)
]


class Knowing:
    """Scores the right answer highest for the first `known` items."""

    def __init__(self, tokenizer, known):
        self.tokenizer, self.known, self.prompts = tokenizer, known, []

    def __call__(self, requests):
        scores = []
        for before, after in requests:
            prompt = self.tokenizer.decode(before)
            self.prompts.append(prompt)
            number = int(prompt.rsplit("question ")[-1].split(":")[0])
            right = self.tokenizer.decode(after) == f" answer {number % 3}"
            scores.append((float(right == (number < self.known)), False))
        return scores, Counts(len(scores))


@pytest.mark.parametrize("known", [0, 5, 12])
@pytest.mark.parametrize("shots", [0, 3])
def test_accuracy_item_by_item(tokenizer, known, shots):
    scorer = Knowing(tokenizer, known)
    task = lm_eval_tasks.of_items("mine", ITEMS)
    score = harness.evaluate(HarnessLM(tokenizer, 200, scorer), {"mine": task}, shots)["mine"]
    assert (score.metric, score.items) == ("acc", 12)
    assert score.value == score.values.mean()
    # One of two wrong answers is likeliest where the right one is not: never the right one.
    np.testing.assert_array_equal(score.values, np.arange(12) < known)
    for prompt in scorer.prompts:
        *examples, question = prompt.split("\n\n")
        assert len(examples) == shots and question not in {e.split(":")[0] for e in examples}
        for example in examples:
            number = int(example.split()[1].rstrip(":"))
            assert example == f"question {number}: answer {number % 3}"


def test_open_answers_are_right_where_greedy(tokenizer):
    items = [Item("a", (" the",), 0, "x"), Item("b", (" of",), 0, "y")]

    def scorer(requests):
        return [(-1.0, tokenizer.decode(b) == " of") for _, b in requests], Counts(len(requests))

    task = lm_eval_tasks.of_items("open", items)
    score = harness.evaluate(HarnessLM(tokenizer, 32, scorer), {"open": task}, 0)["open"]
    assert score.metric == "acc" and score.values.tolist() == [0.0, 1.0]
    limited = harness.evaluate(HarnessLM(tokenizer, 32, scorer), {"open": task}, 0, limit=1)
    assert limited["open"].items == 1
