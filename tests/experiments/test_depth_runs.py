"""Runs whose layers store unequally much: what they tell, through a kill to the same bits, and
where they are refused before the first step."""

import json

import pytest
from main_job import PICO, arrays, assert_same_results

from sparse_dataflow.core.training import cost
from sparse_dataflow.evaluation.trained import load
from sparse_dataflow.reporting.report import ReportData

DEPTH = "--set=sparsity.budget=depth:1.5x,0.5x"
FEW = ("--limit=4", "--num_fewshot=0")
LATER_SAVE = r"sparse/checkpoints/6\.saving"


FLAGS = (DEPTH, "--pattern=cyclic", "--twin=no")


@pytest.mark.nightly
def test_a_run_goes_on_after_a_kill_to_the_same_bits(job, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert job.new(whole, *FLAGS, whole=True).returncode == 0
    assert job.new(killed, *FLAGS, events=[(LATER_SAVE, 1, "SIGKILL")]).returncode < 0
    done = job.resume(killed)
    assert done.returncode == 0 and "resumes after step 3 of 12" in done.stderr, done.stderr
    assert_same_results(killed, whole)


@pytest.mark.slow
def test_what_it_stores_is_what_it_tells_scores_and_others_begin_with(job, refused, tmp_path):
    whole = tmp_path / "whole"
    done = job.new(whole, *FLAGS)
    assert done.returncode == 0, done.stderr
    assert "mean density over 2 layers: qkv 0.25, attn_out 0.25" in done.stderr
    trained = load(whole, "sparse")
    assert trained.model.density_by_depth == (1.5, 0.5)
    drawn = sum(a.size for name, a in arrays(whole, "sparse", 12).items() if "params" in name)
    report = ReportData.from_json(json.loads((whole / "report.json").read_text()))
    assert drawn == report.variants[0].stored_parameters == cost.parameter_count(trained.model)
    stored = {(a.layer, a.projection): len(a.mask) for a in report.layouts}
    assert stored[0, "qkv"] == 3 * stored[1, "qkv"]
    scored = job.run(f"--run={whole}", "--tasks=cloze", *FEW, experiment="evaluate")
    assert scored.returncode == 0, scored.stderr
    alike = ("--block=16", "--density=0.25", "--pattern=cyclic", "--steps=8")
    error = refused(*alike, f"--corpus={job.corpus}", f"--init_from={whole}")
    assert "layer 2: density is 0.125 in the initial weights and 0.25 in this run" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--set=sparsity.budget=depth:1x,2x,1x"],
            ["3 parts of the depth", "2 layers", "legal: 1, 2"],
        ),
        (
            ["--set=sparsity.budget=depth:1.3x,0.7x"],
            ["1.3x of 0.25", "legal", "1x, 1.5x"],
        ),
    ],
)
def test_it_is_refused_before_the_first_step(refused, job, tmp_path, arguments, words):
    budget = [] if any("density_budget" in a for a in arguments) else [DEPTH]
    corpus = f"--corpus={job.corpus}"
    error = refused(*PICO, "--pattern=cyclic", "--steps=8", corpus, *budget, *arguments)
    assert all(word in error for word in words), error
    assert not (tmp_path / "runs").exists()
