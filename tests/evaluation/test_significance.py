"""Clustered standard errors and paired_difference tests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sparse_dataflow.evaluation.significance import (
    clustered_mean,
    paired_difference,
    share_interval,
)

VALUES = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=40)


@given(VALUES)
def test_documents_of_one_item_give_the_usual_error(values):
    result = clustered_mean(values, range(len(values)))
    assert result.mean == pytest.approx(np.mean(values))
    assert result.error == pytest.approx(stats.sem(values), abs=1e-9)
    assert (result.items, result.documents) == (len(values), len(values))


@given(VALUES, st.integers(2, 5))
def test_duplicate_items_of_a_document_do_not_reduce_the_error(values, copies):
    single = clustered_mean(values, range(len(values)))
    documents = np.repeat(np.arange(len(values)), copies)
    duplicated = clustered_mean(np.repeat(values, copies), documents)
    assert duplicated.error == pytest.approx(single.error, abs=1e-9)


def test_the_paired_test_is_students_t_test():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.3, 1, 50), rng.normal(0, 1, 50)
    result, reference = paired_difference(a, b, range(50)), stats.ttest_rel(a, b)
    assert result.p == pytest.approx(reference.pvalue)
    interval = reference.confidence_interval()
    assert (result.low, result.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert paired_difference(b, a, range(50)).difference == -result.difference


def test_more_items_of_the_same_documents_give_no_degrees_of_freedom():
    rng, documents = np.random.default_rng(0), np.arange(6)
    a, b = rng.normal(0.3, 1, 6), rng.normal(0, 1, 6)
    once = paired_difference(a, b, documents)
    often = paired_difference(*(np.repeat(each, 5) for each in (a, b, documents)))
    assert (often.low, often.high, often.p) == pytest.approx((once.low, once.high, once.p))


def test_the_false_positive_rate_is_controlled_under_clustering():
    rng, positives = np.random.default_rng(0), 0
    documents = np.repeat(np.arange(12), 20)
    for _ in range(400):
        document_effect = np.repeat(rng.normal(size=12), 20)
        first, second = document_effect + rng.normal(size=240), rng.normal(size=240)
        positives += paired_difference(first, second, documents).p < 0.05
    assert positives < 0.09 * 400


def test_undefined_statistics_are_none():
    result = paired_difference([1.0, 0.0], [0.0, 0.0], ["same", "same"])
    assert (result.difference, result.low, result.p) == (0.5, None, None)
    assert paired_difference([1.0, 1.0], [1.0, 1.0], ["a", "b"]).p is None
    assert paired_difference([1.0, 1.0], [0.0, 0.0], ["a", "b"]).p is None


@pytest.mark.parametrize("documents", [2, 10, 40, 1000])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_where_no_item_differs_the_interval_is_the_rule_of_three(documents, value):
    """The largest rate that shows no difference in n documents with a probability of 5%."""
    same = np.full(2 * documents, value)
    result = paired_difference(same, same, np.arange(2 * documents) // 2, bounded=True)
    assert (result.difference, result.p) == (0.0, None)
    assert result.high == -result.low == min(1.0, 3 / documents)
    if documents >= 10:
        assert (1 - result.high) ** documents == pytest.approx(0.05, abs=0.025)
    unbounded = paired_difference(same, same, np.arange(2 * documents) // 2)
    assert (unbounded.low, unbounded.high, unbounded.p) == (None, None, None)


def test_items_that_differ_and_cancel_have_students_interval():
    a, b = np.array([1.0, 0.0] * 8), np.array([0.0, 1.0] * 8)
    result = paired_difference(a, b, range(16), bounded=True)
    assert result.difference == 0 and result.high > 3 / 16 and result.p == pytest.approx(1.0)


@given(st.integers(1, 300), st.data())
def test_the_interval_of_a_share_is_wilsons_where_items_are_independent(items, data):
    right = data.draw(st.integers(0, items))
    values = np.arange(items) < right
    error = clustered_mean(values, range(items)).error
    # The error of `clustered_mean` has n - 1 in it, so it stands for one item fewer.
    count = items - 1 if 0 < right < items else items
    low, high = share_interval(right / items, error, items, items)
    reference = stats.binomtest(right, items).proportion_ci(method="wilson")
    if count == items:
        assert (low, high) == (pytest.approx(reference.low), pytest.approx(reference.high))
    assert 0 <= low <= right / items <= high <= 1 and high - low > 0
    assert high - low >= reference.high - reference.low - 1e-9


@pytest.mark.parametrize(
    "share, documents, low, high",
    [(1.0, 3, 0.4385, 1.0), (0.0, 3, 0.0, 0.5615), (1.0, 10, 0.7225, 1.0), (0.0, 1, 0.0, 0.7935)],
)
def test_items_that_are_all_right_leave_an_interval(share, documents, low, high):
    """Values of the table of Newcombe (1998), or n / (n + 1.96^2) by hand."""
    interval = share_interval(share, 0.0, 10 * documents, documents)
    assert interval == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_items_of_few_documents_have_a_wider_interval():
    values = np.repeat([1.0, 0.0, 1.0, 0.0], 50)
    width = []
    for documents in (range(200), np.repeat(range(4), 50)):
        result = clustered_mean(values, documents)
        low, high = share_interval(0.5, result.error, 200, result.documents)
        width.append(high - low)
    assert width[1] > 4 * width[0]
