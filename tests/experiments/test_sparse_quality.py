"""The quality experiment: its tables, and a small one that is stopped and gone on with."""

import dataclasses
import json

import pytest
from absl import flags as absl_flags
from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.model import LinearSpec
from sparse_dataflow.config.presets import SIZES
from sparse_dataflow.config.training import TrainingConfig

from experiments import command_line, flags, quality_runs, sparse_quality
from experiments.recipes import Variant
from sparse_dataflow.files.errors import TEMPORARY, UserError
from sparse_dataflow.sparsity.allocation import allocate
from sparse_dataflow.sparsity.evolution import METHODS
from sparse_dataflow.sparsity.patterns import PATTERNS
from sparse_dataflow.training.phases import run_flops


def result(arm, bits, equal="tokens", seed=0):
    return {"equal": equal, "arm": arm, "seed": seed, "bits_per_byte": bits, "steps": 9,
            "flops": 1e9, "seconds": 2.0}  # fmt: skip


def test_tables_say_mean_spread_and_the_gap_that_is_closed():
    results = [result("dense", 2.0), result("dense", 2.2, seed=1), result("static_random", 2.5)]
    results += [result("rigl", 2.15), result("rigl", 2.25, seed=1), result("dense", 2.0, "flops")]
    first, second = quality_runs.tables(results, ["dense"]).split("## Equal FLOPs")
    lines = [line for line in first.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[1:]] == ["| dense", "| rigl", "| static_random"]
    assert "| 2.1000 | 0.1000 | - | 100% |" in lines[1]
    assert "| 2.2000 | 0.0500 | +4.76% ± 2.38% | 75% |" in lines[2]
    assert "| 2.5000 | 0.0000 | +19.05% |" in lines[3] and "| 0% |" in lines[3]
    assert "Lowest: dense; of those that end sparse: rigl." in first
    assert "| 2.0000 |" in second and "that end sparse: none was trained." in second


def test_arms_are_made_of_registered_patterns_and_methods():
    for changes in filter(None, sparse_quality.ARMS.values()):
        assert changes.get("pattern", "monarch") in PATTERNS
        assert changes.get("evolution", "static") in METHODS


def test_arms_where_none_are_named():
    values = absl_flags.FlagValues()
    flags.define(sparse_quality.GROUPS, values)
    command_line.parse(["sparse_quality"], sparse_quality.GROUPS, values)
    assert set(values.arms) < set(sparse_quality.ARMS)
    assert {quality_runs.BASELINE, quality_runs.FLOOR} < set(values.arms)


def test_arms_of_unequal_layers():
    sparse = SIZES["pico"].with_linears(LinearSpec("block_sparse", "random", 0.25, 8))
    for arm in ("depth_rising", "depth_falling"):
        model = allocate(sparse, sparse_quality.ARMS[arm]["density_budget"])
        assert sorted(model.density_by_depth) == [0.5, 1.5]


@pytest.mark.parametrize(("rank", "first"), [(0, ()), (8, ()), (0, ("qkv", "attn_out"))])
@pytest.mark.parametrize("share", [0.5, 0.7])
@pytest.mark.parametrize("scale", ["pico", "3m", "nano"])
def test_a_switch_by_flops_leaves_that_share_of_the_dense_trainings(scale, share, rank, first):
    size, training = SIZES[scale], TrainingConfig(steps=1000, batch=8, sequence=64)
    model = size.with_linears(LinearSpec("block_sparse", "random", 0.125, 8, rank))
    evolution = EvolutionConfig("sparse_to_dense", first=first)
    dense = Variant("dense", size, training)
    at = quality_runs.switch_at(dense, Variant("sparse", model, training, evolution), share)
    spent = run_flops(model, dataclasses.replace(evolution, at=at), training)
    assert spent == pytest.approx(share * run_flops(size, EvolutionConfig(), training), rel=2e-3)


@pytest.mark.parametrize(
    ("density", "first", "share"),
    [(0.75, (), 0.5), (0.125, ("qkv", "attn_out"), 0.9), (0.125, (), 0.1)],
)
def test_a_share_of_flops_that_no_switch_leaves_is_refused(density, first, share):
    size, training = SIZES["3m"], TrainingConfig(steps=1000, batch=8, sequence=64)
    model = size.with_linears(LinearSpec("block_sparse", "random", density, 8))
    sparse = Variant("sparse", model, training, EvolutionConfig("sparse_to_dense", first=first))
    with pytest.raises(UserError, match=f"spends {share:.0%} .*; legal: above .* and below"):
        quality_runs.switch_at(Variant("dense", size, training), sparse, share)


@pytest.mark.slow
def test_a_small_comparison_goes_on_where_it_was_stopped(job, refused, tmp_path):
    arguments = ["--scale=pico", "--block=16", "--steps=8", "--seeds=1", f"--corpus={job.corpus}"]
    arguments += ["--arms=dense,static_random,sparse_to_dense_50", f"--out={tmp_path / 'q'}"]
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
