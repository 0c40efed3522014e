"""Scores in batches and buckets are those of each request by itself."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.evaluation import scoring
from sparse_dataflow.evaluation.scoring import Limits, bucket_lengths, score
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.parallel import whole


def draw_requests(vocab, sizes, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda n: rng.integers(0, vocab, n).tolist()  # noqa: E731
    return [(draw(before), draw(after)) for before, after in sizes]


def naive(trained):
    """alone(request): log-softmax of the full logits of one sequence by itself.

    Sequences are padded to one length, so that one program is compiled; no logit sees a later token
    (tests/models/test_gpt.py).
    """
    logits_of = jax.jit(
        lambda tokens: whole.logits(trained.model, trained.params, trained.tables, tokens)[0]
    )

    def alone(before, after):
        tokens = np.array([*before, *after], np.int32)[-(trained.context + 1) :]
        inputs = np.zeros((1, trained.context), np.int32)
        inputs[0, : len(tokens) - 1] = tokens[:-1]
        logits = np.asarray(logits_of(inputs), np.float64)[: len(tokens) - 1][-len(after) :]
        logs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        return logs[np.arange(len(after)), after].sum(), logits.argmax(axis=1).tolist()

    return alone


@pytest.mark.parametrize("variant", ["dense", "sparse"])
def test_agrees_with_each_request_by_itself(trained, variant):
    model = trained(variant)
    alone = naive(model)
    # Of one token, of the whole context, and cut on the left.
    sizes = [(1, 1), (31, 1), (1, 31), (32, 1), (1, 32), (40, 7), (60, 32), (9, 3), (3, 9)]
    sizes += [(2 + 3 * i, 1 + i) for i in range(8)]
    requests = draw_requests(model.model.vocab_size, sizes)
    # Let some continuations be what greedy decoding writes.
    for before, after in requests[-5:]:
        for i in range(len(after)):
            after[i] = alone(before, after[: i + 1])[1][-1]
    scores, counts = score(scoring.forward_of(model), scoring.limits_of(model), requests)
    expected = [alone(*request) for request in requests]
    np.testing.assert_allclose([s for s, _ in scores], [e for e, _ in expected], 2e-5, 2e-4)
    greedy = [best == after for (_, best), (_, after) in zip(expected, requests)]
    assert [is_greedy for _, is_greedy in scores] == greedy and sum(greedy) >= 5
    assert (counts.requests, counts.truncated) == (len(sizes), 2)
    assert counts.tokens == sum(min(a + b - 1, 32) for a, b in sizes) <= counts.padded


def counting(shapes):
    """A forward that remembers shapes and scores each target by its own value."""

    def forward(tokens, places):
        shapes.append((tokens.shape, places.shape))
        targets = tokens[:, 1:].reshape(len(places), -1)
        found = np.take_along_axis(targets, places, axis=1).astype(np.float32)
        return found, np.ones(found.shape, bool)

    return forward


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 128)), max_size=200),
       st.sampled_from([1, 2, 4]))  # fmt: skip
def test_few_shapes_and_every_answer_in_its_place(sizes, parts):
    shapes, limits = [], Limits(context=128, tokens=512, parts=parts)
    requests = draw_requests(1000, sizes)
    scores, counts = score(counting(shapes), limits, requests)
    assert [s for s, _ in scores] == [-float(sum(after)) for _, after in requests]
    assert len(set(shapes)) <= scoring.BUCKETS
    for (rows, width), (rows_of, places) in shapes:
        assert rows % parts == 0 and width <= 129
        assert rows_of == parts and places <= rows // parts * (width - 1)
    assert counts.truncated == sum(a + b > 129 for a, b in sizes)
    assert counts.padded == sum(rows * (width - 1) for (rows, width), _ in shapes)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=8, max_size=200), st.sampled_from([1, 2]))
def test_batches_of_a_length_score_about_as_many_tokens(scored, parts):
    shapes, limits = [], Limits(context=32, tokens=256, parts=parts)
    score(counting(shapes), limits, draw_requests(9, [(33 - n, n) for n in scored]))
    most = max(places for _, (_, places) in shapes)
    # Dealt out by size, hands differ by less than the largest request; shapes are rounded.
    assert most < sum(scored) / (parts * len(shapes)) + max(scored) + 16


def test_a_pass_over_every_length_compiles_a_few_programs(trained):
    model, compiled = trained("sparse"), []
    forward, limits = scoring.forward_of(model), scoring.limits_of(model)
    sizes = [(before, after) for before in range(1, 33) for after in (1, 5, 11)]

    def note(name, *_, **about):
        if name.endswith("backend_compile_duration"):
            compiled.append(about)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        score(forward, limits, draw_requests(model.model.vocab_size, sizes))
        first = len(compiled)
        score(forward, limits, draw_requests(model.model.vocab_size, sizes, seed=1))
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert 1 <= first <= scoring.BUCKETS
    assert len(compiled) == first  # Other tokens of these lengths need none.


@settings(max_examples=60)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=12), st.integers(1, 4))
def test_bucket_lengths_pad_the_least(lengths, most):
    found = bucket_lengths(lengths, 64, most)
    rounded = [-(-n // 2) * 2 for n in lengths]

    def padded(buckets):
        return sum(min(b for b in buckets if b >= n) for n in rounded)

    def best(n):
        choices = itertools.combinations(sorted(set(rounded)), n)
        return min(padded(choice) for choice in choices if max(choice) == max(rounded))

    assert len(found) <= most and padded(found) == best(len(found))
    # One more would have been worth it, or there is none; one fewer would not have been enough.
    enough = 1.1 * sum(lengths)
    assert padded(found) <= enough or len(found) == min(most, len(set(rounded)))
    assert len(found) == 1 or best(len(found) - 1) > enough


def test_what_cannot_be_scored_is_named():
    forward, limits = counting([]), Limits(8, 64)
    with pytest.raises(UserError, match=r"continuation of 9 tokens .* sees 8"):
        score(forward, limits, [([1], [1] * 9)])
    with pytest.raises(UserError, match="no token"):
        score(forward, limits, [([], [1])])
    assert score(forward, limits, []) == ([], scoring.Counts())
