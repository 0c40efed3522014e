"""The loop that studies share: every run once, in order, whenever a process ends."""

import json

import pytest

from experiments.studies import engine, study
from sparse_dataflow.files.errors import UserError


class Killed(Exception):
    """A process that ends within a training."""


def growing(trained, kill_at=None):
    """Returns the function `known_runs` of a list that grows with its results: three trials, then
    two more runs that follow from the best one."""

    def run(name, bits):
        def train(where, compiled):
            if len(trained) == kill_at:
                raise Killed
            trained.append(name)
            return {"bits_per_byte": bits}

        return engine.Run(name, train, {"bits": bits}, name)

    def known(results):
        first = [run(f"trial_{n}", 3.0 - n % 2) for n in range(3)]
        yield from first
        if all(each.name in results for each in first):
            best = min(first, key=lambda each: results[each.name]["bits_per_byte"])
            yield from (run(f"{best.name}/seed_{seed}", 2.0) for seed in range(2))

    return known


NAMES = ["trial_0", "trial_1", "trial_2", "trial_1/seed_0", "trial_1/seed_1"]


@pytest.mark.parametrize("kill_at", range(5))
def test_a_study_that_is_killed_anywhere_trains_the_rest_alone(tmp_path, kill_at):
    trained = []
    with pytest.raises(Killed):
        engine.train_all(tmp_path, growing(trained, kill_at))
    assert trained == NAMES[:kill_at]
    results = engine.train_all(tmp_path, growing(trained))
    assert trained == NAMES == list(results)
    lines = [json.loads(line) for line in (tmp_path / engine.LINES).read_text().splitlines()]
    assert [line["name"] for line in lines] == NAMES
    assert all(line["bits"] == line["result"]["bits_per_byte"] for line in lines)


def test_a_result_whose_line_was_not_written_is_not_trained_again(tmp_path):
    (tmp_path / "trial_0").mkdir()
    study.keep_result(tmp_path / "trial_0", {"bits_per_byte": 3.0})
    trained = []
    engine.train_all(tmp_path, growing(trained))
    assert trained == NAMES[1:]


def test_a_training_that_was_stopped_ends_the_study_without_a_line(tmp_path):
    runs = [engine.Run("only", lambda where, compiled: None)]
    assert engine.train_all(tmp_path, lambda results: runs) is None
    assert not (tmp_path / engine.LINES).exists()


@pytest.mark.parametrize("text", ["{", '{"name": 1, "result": {"bits_per_byte": 1}}', '{"a": 1}'])
def test_damaged_lines_are_refused(tmp_path, text):
    (tmp_path / engine.LINES).write_text(text + "\n")
    with pytest.raises(UserError, match="damaged"):
        engine.read_lines(tmp_path / engine.LINES)
