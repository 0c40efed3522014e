"""Tasks of lm-eval by name, with fake data or without a network."""

import importlib.util
import math

import pytest

from sparse_dataflow.files.errors import UserError

METRICS = {"wikitext": "word_perplexity", "nq_open": "exact_match"}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="the extra eval is not installed"
)


@pytest.fixture(scope="module")
def manager(harness, lm_eval_tasks):
    with harness.quiet():
        return lm_eval_tasks.TaskManager()


@pytest.mark.parametrize("shots", [0, 1])
def test_standard_tasks_run_with_all_request_types(
    harness, lm_eval_tasks, trained, manager, monkeypatch, shots
):
    from standard_tasks import load_dataset

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    names = [*lm_eval_tasks.STANDARD, "nq_open"]
    if shots:
        names.remove("wikitext")  # scores whole texts, so it has no examples
    tasks = {}
    for name in names:
        tasks |= lm_eval_tasks.load_tasks(name, manager, ())
    assert list(tasks) == names
    kinds = {task.OUTPUT_TYPE for task in tasks.values()}
    rolling = set() if shots else {"loglikelihood_rolling"}
    assert kinds == {"loglikelihood", "multiple_choice", "generate_until"} | rolling
    lm = harness.harness_lm(trained("sparse"))
    for name, score in harness.evaluate(lm, tasks, shots).items():
        assert (score.metric, score.items) == (METRICS.get(name, "acc"), 2)
        assert math.isfinite(score.value) and score.value >= 0
    assert lm.counts.requests >= 2 * len(names)


def test_without_network_the_error_names_the_builtin_tasks(lm_eval_tasks, manager, monkeypatch):
    def unreachable(path, **kwargs):
        raise ConnectionError(f"Couldn't reach {path!r} on the Hub\nand more\nlines")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    for name in lm_eval_tasks.STANDARD:
        with pytest.raises(UserError) as error:
            lm_eval_tasks.load_tasks(name, manager, ("cloze", "last_word"))
        message = str(error.value)
        assert f"data of the task {name} cannot be downloaded" in message and "\n" not in message
        assert "The tasks cloze, last_word need no network." in message and "lines" not in message
