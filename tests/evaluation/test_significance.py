"""Clustered standard errors and paired_difference tests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sparse_dataflow.evaluation.significance import clustered_mean, paired_difference

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
    assert paired_difference([1.0, 1.0], [1.0, 1.0], ["a", "b"]).p == 1.0
    assert paired_difference([1.0, 1.0], [0.0, 0.0], ["a", "b"]).p is None
