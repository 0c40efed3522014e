"""lm-eval's own tasks run by name where their data is there, and are named where it is not."""

import math

import pytest

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

import datasets
from lm_eval.tasks import TaskManager
from standard_tasks import load_dataset

from sparse_dataflow.evaluation import harness
from sparse_dataflow.evaluation.tasks import lm_eval_tasks
from sparse_dataflow.files.errors import UserError

METRICS = {"wikitext": "word_perplexity", "nq_open": "exact_match"}


@pytest.fixture(scope="module")
def manager():
    with harness.quiet():
        return TaskManager()


@pytest.mark.parametrize("shots", [0, 1])
def test_they_run_by_name(trained, manager, monkeypatch, shots):
    """The task's definition is lm-eval's, the data made up; all its kinds of request occur."""
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    names = [*lm_eval_tasks.STANDARD, "nq_open"]
    if shots:
        names.remove("wikitext")  # Its texts are no questions.
    tasks = {}
    for name in names:
        tasks |= lm_eval_tasks.by_name(name, manager, ())
    assert list(tasks) == names
    kinds = {task.OUTPUT_TYPE for task in tasks.values()}
    rolling = set() if shots else {"loglikelihood_rolling"}
    assert kinds == {"loglikelihood", "multiple_choice", "generate_until"} | rolling
    lm = harness.harness_lm(trained("sparse"))
    found = harness.evaluate(lm, tasks, shots)
    for name, score in found.items():
        assert (score.metric, score.items) == (METRICS.get(name, "acc"), 2)
        assert math.isfinite(score.value) and score.value >= 0
    assert lm.counts.requests >= 2 * len(names)


def test_data_that_is_not_reached_is_named_with_the_own_tasks(manager, monkeypatch):
    def unreachable(path, **kwargs):
        raise ConnectionError(f"Couldn't reach {path!r} on the Hub\nand more\nlines")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for name in lm_eval_tasks.STANDARD:
        with pytest.raises(UserError) as refused:
            lm_eval_tasks.by_name(name, manager, ("cloze", "last_word"))
        said = str(refused.value)
        assert f"data of the task {name} cannot be reached" in said and "\n" not in said
        assert "The tasks cloze, last_word need no network." in said and "lines" not in said
