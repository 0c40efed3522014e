"""The study of structure: equal FLOPs and equal trials for every arm, from a file."""

import collections
import dataclasses
import itertools
import math
import types
from pathlib import Path

import pytest

import experiments
from experiments.studies.structure import design, report
from experiments.studies.structure.search import MEASURE, TUNE, TUNING_SEED, Search
from experiments.studies.study import Study
from sparse_dataflow.core.config import settings
from sparse_dataflow.core.training.phases import run_flops
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.equal_cost import stored_parameters
from sparse_dataflow.runs.run_config import preset

KEPT = sorted((Path(experiments.__path__[0]) / "results").rglob("study.toml"))
TEXT = """
scale = "pico"
optimizers = ["adamw"]
trials = [6, 3, 1]
shares = [0.25, 0.5, 1.0]
rate_trials = 2
seeds = 2
tokens_per_weight = [5, 500]
[settings]
"model.vocab_size" = 257
"model.parametrization" = "supar"
[budgets]
small = 1e11
[space]
"model.num_layers" = [1, 2]
d_ff_ratio = [1, 2]
head_width = [16]
rate = [1e-3, 2e-3]
[arms.dense.settings]
"sparsity.projections" = []
[arms.dense.space]
"model.d_model" = [32, 48, 64]
[arms.sparse.space]
"model.d_model" = [32, 64, 96]
"sparsity.density" = [0.25, 0.5]
"sparsity.block" = [4]
"""


def read(tmp_path, text=TEXT):
    path = tmp_path / "study.toml"
    path.write_text(text)
    return design.read(path)


def search_of(each):
    config = settings.changed(preset(each.scale), each.settings).without_auto()
    return Search(Study(config, None, types.SimpleNamespace(vocab_size=257), None), each)


@pytest.fixture
def search(tmp_path):
    return search_of(read(tmp_path))


def fake_result(search, trial):
    """Returns a loss that is lowest at a width of 64 and at twice the rate of 1e-3."""
    variant = search.variant(trial)
    training = variant.training
    bits = 2 + abs(math.log2(variant.model.d_model / 64)) + 1 / training.steps
    bits += abs(math.log2(training.learning_rate / 2e-3)) / 10 + trial.seed % 7 / 1000
    tokens = training.steps * training.batch * training.sequence
    flops = run_flops(variant.model, variant.evolution, training)
    return {"bits_per_byte": bits, "tokens": tokens, "flops": flops, "seconds": 1.0,
            "step_seconds": 0.1}  # fmt: skip


def all_results(search, most=10**6):
    results = {}
    while len(results) < most:
        missing = [t for t in search.known(results) if search.name(t) not in results]
        if not missing:
            break
        results[search.name(missing[0])] = fake_result(search, missing[0])
    return results


def test_every_arm_has_equal_trials_and_every_training_the_flops_of_its_share(search):
    results = all_results(search)
    trials = {search.name(trial): trial for trial in search.known(results)}
    assert set(trials) == set(results) and len(trials) == search.total()
    counts = collections.Counter((t.cell.arm, t.role, t.share) for t in trials.values())
    for arm in search.design.arms:
        assert counts[arm, TUNE, 0.25] == 6 and counts[arm, TUNE, 0.5] == 3
        assert counts[arm, TUNE, 1.0] == 1 + 2 and counts[arm, MEASURE, 1.0] == 2
    for name, trial in trials.items():
        assert results[name]["flops"] == pytest.approx(trial.share * 1e11, rel=0.01)
        assert (trial.seed == TUNING_SEED) == (trial.role == TUNE)
        if trial.share == 1:
            weights = stored_parameters(search.variant(trial).model)
            assert 5 <= results[name]["tokens"] / weights <= 500
    assert search.left(results) == pytest.approx(0)


def test_the_best_of_a_rung_go_on_and_the_best_of_all_is_measured(search):
    results = all_results(search)
    for cell in search.cells:
        rungs = [search.stage(cell, stage, results) for stage in range(5)]
        for before, after in itertools.pairwise(rungs[:3]):
            bits = {t.model: results[search.name(t)]["bits_per_byte"] for t in before}
            lowest = sorted(bits, key=bits.__getitem__)[: len(after)]
            assert {t.model for t in after} == set(lowest)
        tuned = [*rungs[2], *rungs[3]]
        best = min(tuned, key=lambda t: results[search.name(t)]["bits_per_byte"])
        assert {(t.model, t.multiplier) for t in rungs[4]} == {(best.model, best.multiplier)}


def test_a_list_that_lost_its_end_goes_on_as_the_same_list(search):
    names = list(all_results(search))
    for count in (0, 3, len(names) // 2, len(names) - 1):
        saved = all_results(search, count)
        assert list(saved) == names[:count]


def test_an_unfinished_study_says_so_and_has_tables_and_a_picture(search, tmp_path):
    whole = all_results(search)
    for count in (1, len(whole) - 3, len(whole)):
        text = report.write(search, dict(list(whole.items())[:count]), tmp_path, "abacus")
        assert text.startswith("Unfinished") == (count < len(whole))
        assert (tmp_path / f"{report.NAME}.png").read_bytes().startswith(b"\x89PNG")
    assert "| sparse | 2." in text and "%" in text


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_kept_study_files_have_legal_models_of_every_arm(path):
    """Of the first budget; the others have larger models."""
    each = design.read(path)
    first = dict(list(each.budgets.items())[:1])
    search = search_of(dataclasses.replace(each, budgets=first, optimizers=each.optimizers[:1]))
    for cell in search.cells:
        assert len(set(search.candidates(cell))) == each.trials[0]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seeds = 2", "seedz = 2", "seedz is unknown; legal: .*seeds"),
        ("seeds = 2", "seeds = 0", "seeds=0 .*1 or more"),
        ("1e11", "-1", "budgets.small=-1 is not legal"),
        ('"model.num_layers"', '"model.layers"', "model.layers is unknown"),
        ("seeds = 2", 'rival = "thick"', "No arm is named thick"),
        ("[6, 3, 1]", "[3, 6, 1]", "fewer in each rung"),
        ("[6, 3, 1]", "[6, 1]", "equally many"),
        ("[1e-3, 2e-3]", "[0]", "space.rate has a value"),
    ],
)
def test_a_file_that_is_not_legal_is_refused_with_what_is(tmp_path, old, new, words):
    assert old in TEXT
    with pytest.raises(UserError, match=words):
        read(tmp_path, TEXT.replace(old, new))


def test_a_space_without_enough_legal_models_is_refused(tmp_path):
    search = search_of(read(tmp_path, TEXT.replace("[5, 500]", "[499, 500]")))
    with pytest.raises(UserError, match="legal models at the budget small"):
        search.candidates(search.cells[0])
