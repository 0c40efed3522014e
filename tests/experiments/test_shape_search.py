"""The search of a shape for a budget."""

import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest
from exit_status import exit_status

from experiments import shape_search
from experiments.studies.serving_cost import arms, candidates, runs, shape_law, shapes, study
from experiments.studies.serving_cost.candidates import Budget
from experiments.studies.serving_cost.options import SHARED, NarrowOptions
from sparse_dataflow.core.training import cost
from sparse_dataflow.planner.decoding import decoding_bytes
from sparse_dataflow.runs.equal_cost import stored_parameters

ARMS = ("narrow", "wide_2", "wide_4", "pruned_2", "pruned_4", "experts_8")
SHAPES = ((1, 16, 64), (2, 16, 32), (2, 16, 64), (2, 16, 128), (2, 24, 96), (3, 16, 64))
NO_LIMIT = math.inf


def planted(model, weights, tokens):
    """A law whose best depth is 2 and whose best d_ff / d_model is 4."""
    depth, ratio = math.log2(model.num_layers), math.log2(model.d_ff / model.d_model)
    loss = 1.5 + 30 * weights**-0.5 + 900 * tokens**-0.5
    return loss * math.exp(0.05 * (depth - 1) ** 2 + 0.03 * (ratio - 2) ** 2)


def write_study(folder, excess=0.02, **changes):
    """Writes a folder of experiments.serving_cost with losses of `planted`."""
    options = NarrowOptions(**changes)
    folder.mkdir()
    settings = {name: getattr(options, name) for name in SHARED}
    (folder / "settings.json").write_text(json.dumps(settings))
    narrow, lines = study.narrow_model(options), []
    for name in ARMS:
        arm = arms.ARMS[name]
        for length in (40, 160):
            steps = study.narrow_steps(narrow, length, options.batch)
            course = arms.course(narrow, arm, steps, 10, options.batch)
            model = arms.shape(narrow, arm)
            tokens = course.steps * options.batch * options.sequence
            loss = planted(model, course.mean_weights, tokens)
            loss *= 1 + excess * bool(arm.pruned) - 0.3 * bool(arm.experts)
            line = {
                "arm": name, "optimizer": "muon", "schedule": "linear", "length": length,
                "multiplier": 1.0, "seed": 0, "held_out": loss, "tuning": loss, "tokens": tokens,
                "flops": course.flops, "mean_weights": course.mean_weights,
                "served_flops": sum(arms.served_sections(arms.served_model(narrow, arm)).values()),
                "stored_weights": stored_parameters(arms.served_model(narrow, arm)),
            }  # fmt: skip
            lines.append(json.dumps(line))
    (folder / "runs.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("studies")
    return [
        write_study(root / "_".join(map(str, shape)), layers=layers, width=width, hidden=hidden)
        for shape in SHAPES
        for layers, width, hidden in [shape]
    ]


@pytest.fixture(scope="module")
def studies(folders):
    return shape_law.read(folders, "muon")


def search(folders, *flags):
    return exit_status(shape_search, f"--studies={','.join(map(str, folders))}", *flags)


def test_a_planted_law_of_shapes_is_recovered(studies):
    assert studies.error < 1e-3
    for layers, width, hidden in ((2, 20, 60), (3, 20, 80), (1, 28, 84)):
        model = candidates.studies_model(studies, layers, width, hidden)
        weights = stored_parameters(model)
        predicted = studies.law.loss([weights], [2e6], [model])[0]
        assert predicted == pytest.approx(planted(model, weights, 2e6), rel=2e-3)


def test_the_excess_of_a_way_of_pruning_is_measured(studies):
    [pruning] = studies.prunings
    assert np.expm1(pruning.excesses) == pytest.approx(0.02, abs=2e-3)
    assert pruning.error < 2e-3


def test_the_excess_is_that_of_the_results_of_like_shape_density_and_length(studies):
    [pruning] = studies.prunings
    other = dataclasses.replace(
        pruning, excesses=np.array([0.01 + 0.1 * r.density for r in pruning.results])
    )
    result = min(pruning.results, key=lambda r: r.density)
    length = result.tokens / result.weights
    assert other.excess(result.model, result.density, length) == pytest.approx(
        0.01 + 0.1 * result.density, abs=2e-3
    )
    assert other.excess(result.model, result.density / 2, length) == np.inf
    assert other.excess(result.model, result.density, length * 2**5) == np.inf


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget",
    [
        Budget(30000, NO_LIMIT, 2e11, NO_LIMIT),
        Budget(NO_LIMIT, 70000, 2e11, NO_LIMIT),
        Budget(30000, 66000, NO_LIMIT, 1e6),
        Budget(30000, NO_LIMIT, 2e11, 1e6),
    ],
)
def test_candidates_keep_to_the_budget_and_are_ranked_by_the_law(studies, budget):
    ranked = candidates.search(studies, budget)
    assert [c.loss for c in ranked] == sorted(c.loss for c in ranked)
    assert {bool(c.arm.pruned) for c in ranked} == {False, True}
    for c in ranked:
        served = cost.flops_per_token(c.served, c.served.max_len, training=False).total
        assert served <= budget.served_flops * (1 + 1e-9)
        read = decoding_bytes(c.served, 1, c.served.max_len)
        assert read <= budget.served_bytes * (1 + 1e-9)
        assert c.course.flops <= 1.02 * budget.training_flops
        assert c.tokens <= budget.tokens * 1.02
        excess = 1.02 if c.arm.pruned else 1
        assert c.loss == pytest.approx(
            excess * planted(c.model, c.course.mean_weights, c.tokens), rel=5e-3
        )


@pytest.mark.slow
def test_the_best_dense_shape_is_that_of_the_planted_law(studies):
    budget = Budget(30000, NO_LIMIT, 2e11, NO_LIMIT)
    dense = [c for c in candidates.search(studies, budget) if not c.arm.pruned]

    def by_hand(c):
        return planted(c.model, stored_parameters(c.model), c.tokens)

    assert by_hand(dense[0]) == min(map(by_hand, dense))


def test_symbols_of_the_studies_are_those_that_are_priced(tmp_path):
    folder = write_study(tmp_path / "study", vocabulary=30, width=16, hidden=64)
    more = write_study(tmp_path / "more", vocabulary=30, layers=3)
    read = shape_law.read([folder, more], "muon")
    ranked = candidates.search(read, Budget(30000, NO_LIMIT, 2e11, NO_LIMIT))
    assert {c.model.vocab_size for c in ranked} == {30}


BUDGET = ("--served_flops=30000", "--training_flops=2e11")


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--served_flops=30000",), "no training cost"),
        (("--tokens=1e6",), "no served cost"),
        pytest.param(("--served_flops=1", "--tokens=1e6"), "budgets near", marks=pytest.mark.slow),
        pytest.param(
            ("--served_flops=1e30", "--tokens=1e6"), "budgets near", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--served_flops=30000", "--tokens=1e300"), "budgets near", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--served_flops=30000", "--training_flops=1"), "budgets near", marks=pytest.mark.slow
        ),
        pytest.param(
            ("--served_ms=1", "--hardware=h100", "--tokens=1e6"),
            "budgets near",
            marks=pytest.mark.slow,
        ),
        (("--served_ms=1", "--hardware=abacus", "--tokens=1e6"), "matches no chip"),
        (("--served_flops=inf", "--tokens=1e6"), "finite"),
        (("--served_flops=-1", "--tokens=1e6"), "0 or more"),
        (("--served_flops=30 kFLOP", "--tokens=1e6"), "not a number"),
        ((*BUDGET, "--optimizer=adamw"), "no law"),
    ],
)
def test_budgets_that_the_law_does_not_know_are_refused(folders, flags, message, capsys):
    assert search(folders, *flags) == 2
    assert message in capsys.readouterr().err


def damaged(folder, change):
    line = json.loads((folder / "runs.jsonl").read_text().splitlines()[0])
    with (folder / "runs.jsonl").open("a") as file:
        file.write(json.dumps({**line, **change}) + "\n")


def test_the_kept_runs_of_this_project_are_read_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    studies = shape_law.read([shapes.RESULTS / name for name in shapes.STUDIES], "muon")
    (fewest, most), (first, last) = studies.span("weights"), studies.span("tokens")
    text = (
        f"{len(studies.dense)} dense results of {fewest / 1e3:.0f} k to {most / 1e3:.0f} k mean "
        f"weights and {first / 1e6:.2f} M to {last / 1e6:.0f} M tokens"
    )
    docs = shapes.RESULTS.parents[1] / "docs"
    assert text in " ".join((docs / "guide/shapes.md").read_text().split())
    errors = 100 * np.abs(studies.errors)
    text = f"missed by {np.median(errors):.1f}% in the median and by up to {errors.max():.1f}%"
    assert text in " ".join((docs / "evidence/serving_cost.md").read_text().split())


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: (f / "settings.json").unlink(), "no folder of experiments.serving_cost"),
        (lambda f: (f / "settings.json").write_text("[]"), "other settings"),
        (lambda f: (f / "settings.json").write_text('{"layers": 2}'), "other settings"),
        (lambda f: (f / "runs.jsonl").unlink(), "determine no law"),
        (lambda f: (f / "runs.jsonl").write_text(""), "determine no law"),
        (lambda f: (f / "runs.jsonl").write_text('{"arm": "narrow", "opt'), "damaged"),
        (lambda f: (f / "runs.jsonl").write_bytes(b"\xff\xfe"), "damaged"),
        (lambda f: (f / "runs.jsonl").write_text("3\n"), "line 1"),
        (lambda f: damaged(f, {"arm": ["narrow"]}), "no run of an arm"),
        (lambda f: damaged(f, {"held_out": math.nan}), "no run of an arm"),
        (lambda f: damaged(f, {"tokens": 0}), "no run of an arm"),
        (lambda f: damaged(f, {"mean_weights": "many"}), "no run of an arm"),
    ],
)
def test_a_folder_that_is_no_study_is_refused(tmp_path, damage, message, capsys):
    folder = write_study(tmp_path / "study")
    damage(folder)
    before = sorted(folder.iterdir())
    assert search([folder], *BUDGET) == 2
    assert message in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("name", shapes.STUDIES)
def test_published_runs_are_read_without_arms_of_earlier_versions(name):
    _, lines = runs.load(shapes.RESULTS / name)
    assert lines and {line["arm"] for line in lines} <= {*arms.ARMS}


def test_a_missing_folder_is_refused_and_not_made(tmp_path, capsys):
    assert search([tmp_path / "none"], *BUDGET) == 2
    assert "no folder of experiments.serving_cost" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_studies_of_other_text_are_refused(tmp_path, folders, capsys):
    other = write_study(tmp_path / "study", sequence=16)
    assert search([folders[0], other], *BUDGET) == 2
    assert "studies of the same text" in capsys.readouterr().err


def test_pairs_of_predicted_and_measured_losses_are_counted():
    rows = [
        {"rank": rank, "name": str(rank), "predicted": predicted, "error": 0.01,
         "losses": {0: measured}, "measured": measured}
        for rank, predicted, measured in ((1, 2.0, 2.2), (2, 2.1, 2.0), (9, 2.3, 2.4))
    ]  # fmt: skip
    text = shapes.compared(rows)
    assert "2 of 3 pairs are ranked as measured" in text
    assert "first choice is 10.0% behind" in text and "stored" not in text
    stored = [{**row, "stored": number} for row, number in zip(rows, (7, 5, 6))]
    assert "2 of 3 pairs are ranked as measured, and 1 by stored parameters alone" in (
        shapes.compared(stored)
    )


@dataclasses.dataclass(frozen=True)
class Stored:
    """A candidate as the proxy reads it."""

    name: str
    loss: float
    served: int


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ((90, 80, 70, 60), "a is first: rank 1 by the law, 0.0% behind .* by 1.00 "),
        ((60, 70, 80, 90), "d is first: rank 4 by the law, 15.0% behind .* by -1.00 "),
        ((80, 90, 60, 70), "b is first: rank 2 by the law, 5.0% behind .* by 0.60 "),
    ],
)
def test_a_proxy_without_training_is_compared_with_the_law(monkeypatch, stored, words):
    monkeypatch.setattr(shapes, "by_proxy", lambda candidate: candidate.served)
    losses = (2.0, 2.1, 2.2, 2.3)
    ranked = [Stored(n, loss, s) for n, loss, s in zip("abcd", losses, stored, strict=True)]
    assert re.search(words, shapes._proxy_text(ranked))


@pytest.mark.slow
def test_smaller_budgets_are_a_table_and_a_picture(folders, tmp_path, capsys):
    flags = ("--served_flops=30000", "--training_flops=2e11", "--pareto=2")
    assert search(folders, *flags, f"--out={tmp_path / 'out'}") == 0
    table = (tmp_path / "out" / "pareto.md").read_text()
    assert table.count("most stored parameters") == 2 and "| dense |" in table
    assert (tmp_path / "out" / "pareto.png").stat().st_size > 1000
    assert "By stored parameters alone" in capsys.readouterr().out


@pytest.mark.slow
def test_candidates_are_trained_and_compared(tmp_path, capsys):
    sizes = {"sequence": 8, "batch": 2, "heads": 1}
    study_folders = [
        write_study(tmp_path / "study", width=8, hidden=32, **sizes),
        write_study(tmp_path / "deep", width=8, hidden=32, layers=3, **sizes),
    ]
    low, high = shape_law.read(study_folders, "muon").span("served_flops")
    flags = (
        f"--served_flops={np.sqrt(low * high)}", "--train=1", "--trials=1",
        f"--out={tmp_path / 'out'}",
    )  # fmt: skip
    assert search(study_folders, *flags, "--tokens=60000") == 0
    result = json.loads((tmp_path / "out" / "shape_search.json").read_text())
    ranks = [row["rank"] for row in result["rows"]]
    assert len(ranks) == 3 and ranks == sorted(ranks) and ranks[0] == 1
    assert all(0 < row["measured"] < 6 for row in result["rows"])
    lines = (tmp_path / "out" / "runs.jsonl").read_text()
    assert search(study_folders, *flags, "--tokens=60000") == 0
    assert (tmp_path / "out" / "runs.jsonl").read_text() == lines
    assert search(study_folders, *flags, "--tokens=70000") == 2
    assert "other settings" in capsys.readouterr().err
    jax.clear_caches()
