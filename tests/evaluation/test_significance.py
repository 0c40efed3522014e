"""Errors grow with the likeness inside documents, and no difference is found where none is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sparse_dataflow.evaluation.significance import estimate, paired

VALUES = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=40)


@given(VALUES)
def test_documents_of_one_item_give_the_usual_error(values):
    found = estimate(values, range(len(values)))
    assert found.mean == pytest.approx(np.mean(values))
    assert found.error == pytest.approx(stats.sem(values), abs=1e-9)
    assert (found.items, found.documents) == (len(values), len(values))


@given(VALUES, st.integers(2, 5))
def test_an_item_asked_twice_is_no_new_evidence(values, copies):
    once = estimate(values, range(len(values)))
    names = np.repeat(np.arange(len(values)), copies)
    again = estimate(np.repeat(values, copies), names)
    assert again.error == pytest.approx(once.error, abs=1e-9)


def test_the_paired_test_is_students():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.3, 1, 50), rng.normal(0, 1, 50)
    found, known = paired(a, b, range(50)), stats.ttest_rel(a, b)
    assert found.p == pytest.approx(known.pvalue)
    interval = known.confidence_interval()
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert paired(b, a, range(50)).difference == -found.difference


def test_it_seldom_finds_what_is_not_there():
    """Two alike models, twelve documents whose items go together."""
    rng, found = np.random.default_rng(0), 0
    documents = np.repeat(np.arange(12), 20)
    for _ in range(400):
        hard = np.repeat(rng.normal(size=12), 20)
        found += paired(hard + rng.normal(size=240), rng.normal(size=240), documents).p < 0.05
    assert found < 0.09 * 400


def test_one_document_tells_no_error():
    found = paired([1.0, 0.0], [0.0, 0.0], ["same", "same"])
    assert (found.difference, found.low, found.p) == (0.5, None, None)
    assert paired([1.0, 1.0], [1.0, 1.0], ["a", "b"]).p == 1.0
    assert paired([1.0, 1.0], [0.0, 0.0], ["a", "b"]).p is None
