"""Scores over seeds: intervals by hand, members of --models, and one small table by the command."""

import importlib.util

import numpy as np
import pytest
from scipy import stats

from sparse_dataflow.files.errors import UserError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="the extra eval is not installed"
)


@pytest.fixture(scope="module")
def task_table():
    from experiments.studies import task_table

    return task_table


def test_one_seed_has_the_interval_of_a_paired_t_test(task_table):
    first, second = np.random.default_rng(0).normal(size=(2, 40))
    measured = task_table.difference([first], [second], range(40))
    expected = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert measured.interval == pytest.approx((expected.low, expected.high))


def test_items_without_variance_leave_the_interval_of_the_seeds(task_table):
    apart = np.array([0.1, 0.3, 0.2])
    measured = task_table.difference(np.repeat(apart[:, None], 9, 1), np.zeros((3, 9)), range(9))
    expected = stats.ttest_1samp(apart, 0).confidence_interval(0.95)
    assert measured.mean == pytest.approx(0.2)
    assert measured.interval == pytest.approx((expected.low, expected.high))


def test_intervals_hold_the_true_difference_as_often_as_they_say(task_table):
    rng, covered = np.random.default_rng(1), 0
    for _ in range(300):
        # A seed shifts all of its items; an item is harder for both models.
        shift, hard = rng.normal(0, 0.1, (2, 4, 1)), rng.normal(size=50)
        values = 0.5 + hard + shift + rng.normal(0, 0.5, (2, 4, 50))
        low, high = task_table.difference(values[0] + 0.2, values[1], range(50)).interval
        covered += low < 0.2 < high
    assert 0.93 <= covered / 300 <= 1.0


def test_an_average_over_tasks_keeps_the_seeds_together(task_table):
    seeds = np.array([0.0, 0.2])
    brackets = task_table.Difference(0.1, seeds, 0.04, 30)
    measured = task_table.average([brackets] * 4)
    assert measured.seeds == pytest.approx(seeds) and measured.items == pytest.approx(0.01)


def test_the_printed_interval_of_shares_ends_where_no_difference_is_larger(task_table):
    told = {"difference": -0.2, "low": -2.741, "high": 2.341}
    assert task_table._points(told) == "-20.0 (-100.0 to +100.0)"


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ("sparse=a", "one of them must be dense"),
        ("dense=a,dense=b,sparse=a", "2 of dense, 1 of sparse"),
        ("dense=a,b", "'b'"),
        ("dense=,sparse=a", "'dense='"),
    ],
)
def test_models_that_cannot_be_compared_are_refused(task_table, models, words):
    with pytest.raises(UserError, match=r"legal|must be|as many seeds") as error:
        task_table.given(models)
    assert words in str(error.value)


def test_models_of_several_seeds_are_paired_in_their_order(task_table):
    seeds = task_table.given("dense=A:dense, sparse=A ,dense=B:dense,sparse=B,pruned=X,pruned=Y")
    assert seeds == [
        {"dense": ("A", "dense"), "sparse": ("A", ""), "pruned": ("X", "")},
        {"dense": ("B", "dense"), "sparse": ("B", ""), "pruned": ("Y", "")},
    ]
    assert task_table.given("") is None


def result(losses, right, chance=0.5):
    """An evaluation of two models with one task; `right` is the share of 100 items."""
    models = {
        name: {"value": share, "values": [float(i < 100 * share) for i in range(100)]}
        for name, share in right.items()
    }
    task = {
        "task": "brackets", "shots": 0, "metric": "acc", "items": 100, "documents": 100,
        "item_documents": list(range(100)), "chance": chance, "baselines": {}, "models": models,
    }  # fmt: skip
    loss = {"documents": 9, "models": {name: {"value": value} for name, value in losses.items()}}
    return {"rows": [loss, task]}


def test_the_last_lines_say_where_scores_begin_to_differ(task_table):
    losses = {"dense": 2.0, "sparse": 2.3, "narrow": 2.05}
    right = {"dense": 0.9, "sparse": 0.6, "narrow": 0.9}
    table = task_table.summary([result(losses, right)] * 2)
    text = task_table.as_text(table)
    assert "Scores differ from a loss difference of +0.300 nats a token: sparse" in text
    assert "| brackets | 0 | 50% | 90.0% | -30.0" in text
    assert table["losses"]["narrow"]["difference"] == pytest.approx(0.05)
    unable = task_table.summary([result(losses, right, chance=0.95)])
    assert "above chance in no task" in unable["notes"][0] and not unable["averages"]
