"""A small study of structure is stopped and goes on."""

import json

import pytest

from sparse_dataflow.files.errors import TEMPORARY

STUDY = """
optimizers = ["adamw"]
trials = [2]
shares = [1.0]
rate_trials = 0
seeds = 1
tokens_per_weight = [0.01, 10]
[settings]
"model.num_layers" = 1
"model.vocab_size" = 257
"sparsity.block" = 8
[budgets]
tiny = 2e9
[space]
"model.d_model" = [32, 64]
head_width = [16]
d_ff_ratio = [1, 2]
[arms.dense.settings]
"sparsity.projections" = []
[arms.shuffle.settings]
"sparsity.pattern" = "shuffle"
"sparsity.density" = 0.5
"""


@pytest.mark.slow
def test_a_small_study_goes_on(job, tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    arguments = [f"--study={tmp_path / 'study.toml'}", f"--out={tmp_path / 's'}"]
    start = lambda **how: job.run(  # noqa: E731
        *arguments, f"--corpus={job.corpus}", experiment="structure_search", **how
    )
    done = start(events=[(r"shuffle/tune/\w+/checkpoints/\d+\.saving", 1, "SIGTERM")])
    assert done.returncode == TEMPORARY and "the same command goes on" in done.stderr, done.stderr
    result = json.loads((tmp_path / "s" / "structure_search.json").read_text())
    assert result["unfinished"] and result["trained"] == 2
    done = start()
    assert done.returncode == 0, done.stderr
    lines = [json.loads(t) for t in (tmp_path / "s" / "runs.jsonl").read_text().splitlines()]
    assert [(line["arm"], line["role"]) for line in lines] == [
        *[("dense", "tune")] * 2, *[("shuffle", "tune")] * 2,
        ("dense", "measure"), ("shuffle", "measure"),
    ]  # fmt: skip
    flops = [line["result"]["flops"] for line in lines]
    assert flops == pytest.approx([2e9] * 6, rel=0.2)
    result = json.loads((tmp_path / "s" / "structure_search.json").read_text())
    assert not result["unfinished"] and {"command", "date", "versions"} <= result.keys()
    assert (tmp_path / "s" / "structure_search.png").exists()
