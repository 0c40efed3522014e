"""A small comparison by sparse_quality is stopped and goes on."""

import json

import pytest

from sparse_dataflow.files.errors import TEMPORARY


@pytest.mark.slow
def test_a_small_comparison_goes_on_where_it_was_stopped(job, refused, tmp_path):
    arguments = ["--scale=pico", "--block=16", "--steps=8", "--seeds=1", f"--corpus={job.corpus}"]
    arguments += ["--set=model.num_layers=1", "--arms=dense,static_random,sparse_to_dense_50"]
    arguments += [f"--out={tmp_path / 'q'}"]
    start = lambda *more, **options: job.run(  # noqa: E731
        *arguments, *more, experiment="sparse_quality", **options
    )
    stop = (r"static_random/seed_0/checkpoints/\d+\.saving", 1, "SIGTERM")
    done = start("--equal=flops", events=[stop])
    assert done.returncode == TEMPORARY and "the same command goes on" in done.stderr, done.stderr
    assert not (tmp_path / "q" / "quality.json").exists()
    done = start("--equal=flops")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "q" / "quality.json").read_text())["results"]
    by = {r["arm"]: r for r in found}
    assert list(by) == ["dense", "static_random", "sparse_to_dense_50"]
    assert by["dense"]["tokens"] == 8 * 8 * 64
    for arm in ("static_random", "sparse_to_dense_50"):
        assert by[arm]["steps"] > 8
        # To one dense step, by which the switch is rounded.
        assert by[arm]["flops"] == pytest.approx(by["dense"]["flops"], rel=1 / 8)
    assert "## Equal FLOPs" in (tmp_path / "q" / "quality.md").read_text()
    error = refused(*arguments, "--steps=9", experiment="sparse_quality")
    assert "--steps=9 (saved: 8)" in error
