"""Batched and bucketed scores equal the scores of single requests."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import some

from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.evaluation import scoring
from sparse_dataflow.evaluation.scoring import Limits, bucket_lengths, score
from sparse_dataflow.files.errors import UserError


def draw_requests(vocab, sizes, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda n: rng.integers(0, vocab, n).tolist()  # noqa: E731
    return [(draw(before), draw(after)) for before, after in sizes]


def naive(trained):
    """Returns score(before, after) -> (log-likelihood, greedy tokens) of one request.

    Pads all sequences to one length to compile one program; the model is causal
    (tests/core/model/test_gpt.py).
    """
    logits_of = jax.jit(
        lambda tokens: whole.logits(
            trained.model, weights_of(trained.model, trained.params), tokens
        )[0]
    )

    def score_single(before, after):
        tokens = np.array([*before, *after], np.int32)[-(trained.context + 1) :]
        inputs = np.zeros((1, trained.context), np.int32)
        inputs[0, : len(tokens) - 1] = tokens[:-1]
        logits = np.asarray(logits_of(inputs), np.float64)[: len(tokens) - 1][-len(after) :]
        logs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        return logs[np.arange(len(after)), after].sum(), logits.argmax(axis=1).tolist()

    return score_single


@pytest.mark.parametrize("variant", some(["dense", "sparse"], "sparse"))
def test_scores_equal_those_of_single_requests(trained, variant):
    model = trained(variant)
    score_single = naive(model)
    # Requests of one token, of the full context, and longer than the context.
    sizes = [(1, 1), (31, 1), (1, 31), (32, 1), (1, 32), (40, 7), (60, 32), (9, 3), (3, 9)]
    sizes += [(2 + 3 * i, 1 + i) for i in range(8)]
    requests = draw_requests(model.model.vocab_size, sizes)
    # Replaces the last continuations by greedy ones.
    for before, after in requests[-5:]:
        for i in range(len(after)):
            after[i] = score_single(before, after[: i + 1])[1][-1]
    scores, counts = score(
        scoring.single_device_forward(model), scoring.batch_limits(model), requests
    )
    expected = [score_single(*request) for request in requests]
    np.testing.assert_allclose([s for s, _ in scores], [e for e, _ in expected], 2e-5, 2e-4)
    greedy = [best == after for (_, best), (_, after) in zip(expected, requests)]
    assert [is_greedy for _, is_greedy in scores] == greedy and sum(greedy) >= 5
    assert (counts.requests, counts.truncated) == (len(sizes), 2)
    assert counts.tokens == sum(min(a + b - 1, 32) for a, b in sizes) <= counts.padded


@pytest.mark.parametrize(
    ("sequence", "tokens"), [(32, 8 * 32), (2048, 8192), (8192, 8192), (2**17, 2**17)]
)
def test_a_model_of_no_run_has_batches_of_bounded_tokens(trained, sequence, tokens):
    """The context of a model that people have may be as long as a batch should be."""
    model = trained("dense")
    training = dataclasses.replace(model.training, sequence=sequence, batch=8, micro_batches=1)
    imported = dataclasses.replace(model, training=training, record=None)
    assert scoring.batch_limits(imported).tokens == tokens
    recorded = dataclasses.replace(imported, record=object())
    assert scoring.batch_limits(recorded).tokens == 8 * sequence


def recording_forward(shapes):
    """Returns a forward that records shapes and returns each target's id as its loss."""

    def forward(tokens, places, targets):
        shapes.append((tokens.shape, places.shape))
        return targets.astype(np.float32), np.ones(targets.shape, bool)

    return forward


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 128)), max_size=200),
       st.sampled_from([1, 2, 4]))  # fmt: skip
def test_batches_have_few_shapes_and_scores_keep_the_order(sizes, shards):
    shapes, limits = [], Limits(context=128, tokens=512, shards=shards)
    requests = draw_requests(1000, sizes)
    scores, counts = score(recording_forward(shapes), limits, requests)
    assert [s for s, _ in scores] == [-float(sum(after)) for _, after in requests]
    assert len(set(shapes)) <= scoring.BUCKETS
    for (rows, width), (place_shards, _) in shapes:
        assert rows % shards == 0 and width <= 128 and place_shards == shards
    assert counts.truncated == sum(a + b > 129 for a, b in sizes)
    assert counts.padded == sum(rows * width for (rows, width), _ in shapes)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=30))
def test_what_another_request_begins_with_is_read_there(sizes):
    """Of two ids, many requests are the beginnings of others."""
    requests = draw_requests(2, sizes)
    read = {tuple([*before, *after][:-1]) for before, after in requests}
    alone = [a for a in read if not any(a == b[: len(a)] and a != b for b in read)]

    def forward(tokens, places, targets):
        """The loss of a token is a hash of what stands in front of it, and of itself."""
        width = tokens.shape[1]
        losses = [
            hash((*tokens[place // width, : place % width + 1].tolist(), int(target))) % 1000
            for place, target in zip(places[0], targets[0])
        ]
        return np.array([losses], np.float32), np.ones((1, len(losses)), bool)

    def loss(before, after):
        texts = ([*before, *after[: n + 1]] for n in range(len(after)))
        return sum(hash(tuple(text)) % 1000 for text in texts)

    scores, counts = score(forward, Limits(context=16, tokens=64), requests)
    assert [value for value, _ in scores] == [-loss(*request) for request in requests]
    assert counts.tokens == sum(map(len, alone))


def test_a_question_whose_choices_are_tokens_is_read_once(trained):
    model = trained("dense")
    forward, limits = scoring.single_device_forward(model), scoring.batch_limits(model)
    question = draw_requests(model.model.vocab_size, [(20, 1)])[0][0]
    choices = [(question, [choice]) for choice in (3, 5, 7, 9)]
    scores, counts = score(forward, limits, choices)
    assert (counts.requests, counts.tokens) == (4, 20)
    alone = [score(forward, limits, [choice])[0][0] for choice in choices]
    np.testing.assert_allclose([s for s, _ in scores], [s for s, _ in alone], rtol=1e-5)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=8, max_size=200), st.sampled_from([1, 2]))
def test_batches_of_one_length_score_similar_numbers_of_tokens(scored, shards):
    shapes, limits = [], Limits(context=32, tokens=256, shards=shards)
    score(recording_forward(shapes), limits, draw_requests(9, [(33 - n, n) for n in scored]))
    largest = max(count for _, (_, count) in shapes)
    # Shards differ by less than the largest request; sizes are rounded up to multiples of 16.
    assert largest < sum(scored) / (shards * len(shapes)) + max(scored) + 16


def test_a_pass_over_all_lengths_compiles_few_programs(trained):
    model, compiled = trained("sparse"), []
    forward, limits = scoring.single_device_forward(model), scoring.batch_limits(model)
    sizes = [(before, after) for before in range(1, 33) for after in (1, 5, 11)]

    def note(name, *_, **metadata):
        if name.endswith("backend_compile_duration"):
            compiled.append(metadata)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        score(forward, limits, draw_requests(model.model.vocab_size, sizes))
        first = len(compiled)
        score(forward, limits, draw_requests(model.model.vocab_size, sizes, seed=1))
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert 1 <= first <= scoring.BUCKETS
    assert len(compiled) == first


@settings(max_examples=60)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=12), st.integers(1, 4))
def test_bucket_lengths_minimise_padding(lengths, max_buckets):
    buckets = bucket_lengths(lengths, 64, max_buckets)
    rounded = [-(-n // 2) * 2 for n in lengths]

    def padded(buckets):
        return sum(min(b for b in buckets if b >= n) for n in rounded)

    def best(count):
        choices = itertools.combinations(sorted(set(rounded)), count)
        return min(padded(choice) for choice in choices if max(choice) == max(rounded))

    assert len(buckets) <= max_buckets and padded(buckets) == best(len(buckets))
    # Enough buckets for at most a tenth of padding, and no more.
    max_tokens = 1.1 * sum(lengths)
    is_limit = len(buckets) == min(max_buckets, len(set(rounded)))
    assert padded(buckets) <= max_tokens or is_limit
    assert len(buckets) == 1 or best(len(buckets) - 1) > max_tokens


def test_invalid_requests_raise():
    forward, limits = recording_forward([]), Limits(8, 64)
    with pytest.raises(UserError, match=r"continuation of 9 tokens .* context of 8"):
        score(forward, limits, [([1], [1] * 9)])
    for request in (([], [1]), ([1], [])):
        with pytest.raises(UserError, match="without tokens"):
            score(forward, limits, [([1], [1]), request])
    assert score(forward, limits, []) == ([], scoring.Counts())
