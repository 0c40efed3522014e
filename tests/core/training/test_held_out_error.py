"""The held-out loss has the standard error of a mean over its batches."""

import math
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core.training import held_out
from sparse_dataflow.core.training.held_out import BatchSums

WINDOWS = types.SimpleNamespace(total_tokens=640)
DATA = types.SimpleNamespace(mixture=())


def with_equal_counts(each):
    return [BatchSums(nats, 640 / len(each)) for nats in each]


@given(st.lists(st.floats(0.1, 50), min_size=2, max_size=30))
def test_the_error_is_that_of_a_sum_of_independent_batches(each):
    pairs = with_equal_counts(each)
    values = held_out.losses(DATA, lambda corpus: (WINDOWS, 2000), lambda batches: pairs)
    assert values["bits_per_byte"] == pytest.approx(sum(each) / math.log(2) / 2000)
    by_numpy = np.std(each, ddof=1) / math.sqrt(len(each)) * len(each) / math.log(2) / 2000
    assert values["bits_per_byte_error"] == pytest.approx(by_numpy, abs=1e-12)


@pytest.mark.parametrize("last", [1, 63, 64])
def test_a_smaller_last_batch_of_the_same_loss_has_no_spread(last):
    pairs = [BatchSums(2.0 * count, float(count)) for count in (64, 64, 64, last)]
    values = held_out.losses(DATA, lambda corpus: (WINDOWS, 2000), lambda batches: pairs)
    assert values["bits_per_byte_error"] == pytest.approx(0, abs=1e-12)


def test_one_batch_has_no_error():
    values = held_out.losses(
        DATA, lambda corpus: (WINDOWS, 2000), lambda batches: [BatchSums(3.0, 640.0)]
    )
    assert set(values) == {"loss", "bits_per_byte"}


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
def test_larger_differences_between_batches_have_a_larger_error(spread):
    nats = [with_equal_counts([10 - s, 10 + s]) for s in (spread, 2 * spread)]
    errors = [held_out.losses(DATA, lambda c: (WINDOWS, 9), lambda b, n=n: n) for n in nats]
    small, large = (values["bits_per_byte_error"] for values in errors)
    assert large == pytest.approx(2 * small)


SUMS = BatchSums(640, 640), BatchSums(960, 640)


@pytest.mark.parametrize("weights", [(0.75, 0.25), (0.5, 0.5), (0.1, 0.9)])
def test_the_loss_of_a_mixture_weighs_its_corpora(weights):
    corpora = [
        types.SimpleNamespace(
            name=name, weight=weight, windows=(WINDOWS, size), nats=[BatchSums(*nats)]
        )
        for name, weight, size, nats in zip("ab", weights, (2000, 500), SUMS)
    ]
    data = types.SimpleNamespace(mixture=corpora)
    next_corpora = iter(corpora)
    values = held_out.losses(data, lambda corpus: corpus.windows, lambda b: next(next_corpora).nats)
    loss = 1.0 * weights[0] + 1.5 * weights[1]
    token_bytes = (2000 * weights[0] + 500 * weights[1]) / 640
    assert (values["loss/a"], values["loss/b"]) == (1.0, 1.5)
    assert values["loss"] == pytest.approx(loss)
    assert values["bits_per_byte"] == pytest.approx(loss / token_bytes / math.log(2))


def test_the_accuracy_of_a_mixture_weighs_its_corpora():
    corpora = [
        types.SimpleNamespace(weight=weight, windows=(WINDOWS, 9), name=name, nats=[sums])
        for name, weight, sums in (
            ("a", 0.25, BatchSums(1.0, 640.0, 64.0)),
            ("b", 0.75, BatchSums(1.0, 640.0, 320.0)),
        )
    ]
    data, order = types.SimpleNamespace(mixture=corpora), iter(corpora)
    values = held_out.losses(data, lambda c: c.windows, lambda b: next(order).nats, masked=True)
    assert values["accuracy"] == pytest.approx(0.25 * 0.1 + 0.75 * 0.5)
