"""The planner's experiments end to end, in this process: what they print, write and refuse."""

import csv
import dataclasses
import importlib
import shlex
import subprocess
import sys

import pytest
from exit_status import exit_status

from experiments import layout_search, planner_truth, scaling_study
from experiments.planning import published, scaling
from sparse_dataflow.commands import command_line
from sparse_dataflow.commands.planning import launching
from sparse_dataflow.commands.planning.search_table import FRONTIER
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.pipeline import action_tables
from sparse_dataflow.planner.parallel_plan import ParallelPlan
from sparse_dataflow.runs.variants import variants


def trained_by(command):
    """(experiment, `RunConfig`) of a printed command; raises UserError where it is not legal."""
    python, option, name, *flags = shlex.split(command)
    assert (python, option) == ("python", "-m")
    experiment = importlib.import_module(name)
    [request] = command_line.arguments([name, *flags], experiment.SHARED, None)
    return name, request.config("tpu", sparse=name.endswith("sparse"))


def test_layout_search_prints_the_best_and_a_legal_command(tmp_path, capsys):
    flags = ("--scale=1.3b", "--chips=a100-80gb:16", "--batch=512", "--explain=3")
    assert exit_status(layout_search, *flags, f"--out={tmp_path}") == 0
    out = capsys.readouterr().out
    assert "all priced" in out and "what decides: Shapley effects" in out
    assert out.count("memory of the fullest chip") == out.count("term of a step") == 3
    name, config = trained_by(out.strip().splitlines()[-1])
    assert (name, config.run.scale) == ("experiments.gpt13b_dense", "1.3b")
    assert config.training.batch == 512
    with (tmp_path / "trials.csv").open() as file:
        trials = list(csv.DictReader(file))
    [best] = [row for row in trials if row["recommended"] == "True"]
    sizes = meshes.parse(config.parallel.mesh, 16)
    assert {axis: str(size) for axis, size in sizes.items()} == {axis: best[axis] for axis in sizes}
    assert str(config.training.micro_batches) == best["accumulation"]
    assert (config.model.remat, str(config.parallel.zero)) == (best["remat"], best["zero"])
    speeds = [float(row["tokens_per_second_per_chip"]) for row in trials]
    assert len(trials) > 10 and speeds == sorted(speeds, reverse=True)
    assert "step times: ±" in out and "days" in out and "* recommended; = ties" in out
    assert "EXPERIMENT=gpt13b_dense sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sbatch" in out


def test_frontiers_plans_are_the_published_rows():
    rows = published.rows("frontier_mi250x")
    assert [row.name.lower() for row in rows] == list(FRONTIER)
    for row, (plan, known, speed) in zip(rows, FRONTIER.values(), strict=True):
        assert (row.plan_status, row.value) == (known, speed)
        assert dataclasses.replace(row.plan, fsdp=1, island=None) == plan


@pytest.mark.slow
def test_the_page_of_a_search_is_one_file_with_four_figures(tmp_path, capsys):
    flags = ("--scale=175b", "--chips=mi250x:1024", "--batch=10240", "--verify=0")
    assert exit_status(layout_search, *flags, "--tokens=450e9", f"--out={tmp_path}") == 0
    page = (tmp_path / "search.html").read_text()
    assert page.count("<svg") == 4 and "450 billion tokens" in page
    assert "src=" not in page and "http://" not in page and "Content-Security-Policy" in page
    assert "Frontier&#39;s own plan (recalled), published at 69.2" in page
    assert "Frontier's own plan" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sparse_search_prints_the_sparse_command(tmp_path, capsys):
    flags = ("--scale=1.3b", "--chips=h100:8", "--batch=256", "--density=0.125", "--sequence=1024")
    assert exit_status(layout_search, *flags, f"--out={tmp_path}") == 0
    name, config = trained_by(capsys.readouterr().out.strip().splitlines()[-1])
    assert name == "experiments.gpt13b_sparse"
    assert (config.sparsity.density, config.sparsity.block) == (0.125, 128)
    assert (config.training.batch, config.training.sequence) == (256, 1024)
    assert [v.name for v in variants(config)] == ["sparse"]


@pytest.mark.slow
def test_a_sparse_search_says_how_much_faster_it_is_and_that_it_is_extrapolated(tmp_path, capsys):
    flags = ("--scale=1.3b", "--chips=h100:8", "--batch=256", "--density=0.125", "--verify=0")
    assert exit_status(layout_search, *flags, f"--out={tmp_path}") == 0
    out = capsys.readouterr().out
    assert "extrapolated: no fitted run of this kind (block-sparse weights)" in out
    with (tmp_path / "trials.csv").open() as file:
        first = next(csv.DictReader(file))
    assert 1 < float(first["over_dense"]) < 8


def test_the_command_of_a_pipeline_names_its_schedule():
    plan = ParallelPlan(stage=4, data=2, accumulation=16, chunks=3, schedule="interleaved")
    _, config = trained_by(launching.command(layout_search.Options("1.3b"), plan, 26e9))
    assert action_tables.parse(config.parallel.schedule) == ("interleaved", 3)
    assert meshes.parse(config.parallel.mesh, 8)["stage"] == 4
    assert (config.training.batch, config.training.micro_batches) == (32, 16)


@pytest.mark.parametrize("density", [1.0, 0.25])
def test_a_shape_is_priced_and_trained_as_it_was_given(density):
    shape = "num_layers=6, d_model=1536,num_heads=12,d_ff=4096,max_len=512,num_kv_heads=4"
    options = layout_search.Options("125m", density, shape=shape, experts=2)
    command = launching.command(options, ParallelPlan(fsdp=8), 26e9)
    _, config = trained_by(command)
    fields = dict(num_layers=6, d_model=1536, num_heads=12, d_ff=4096, max_len=512, num_kv_heads=4)
    for model in (options.model, config.model):
        assert {name: getattr(model, name) for name in fields} == fields
        assert (model.vocab_size, model.experts) == (
            layout_search.Options("125m").model.vocab_size,
            2,
        )
    assert options.sequence_length == config.training.sequence == 512
    assert len(options.model.linears) == (0 if density == 1 else len(options.model.projections))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--chips=gtx1080:8",), "matches no chip; legal: a100-40gb"),
        (("--scale=175b", "--chips=h100:8"), "closest legal request is --chips=h100:"),
        (("--scale=1.3b", "--chips=h100:40", "--batch=7"), "closest legal batch is --batch=5"),
        (("--density=0.5", "--block=100"), "--block=100 does not divide"),
        (("--chips=h100:0",), "--chips=h100:0 has 0 chips; legal: 1 to"),
        (("--chips=h100:8@2",), "has a price"),
        (("--chips=8",), "--chips=8 matches no chip; legal: a100-40gb"),
        (("--shape=layers=3",), "layers=3 is no FIELD=VALUE; did you mean num_layers?"),
        (("--shape=qqq=3",), "qqq=3 is no FIELD=VALUE; gpt13b_sparse --help=all lists them"),
        (("--shape=d_ff=64,d_ff=32",), "gives d_ff twice"),
        (("--shape=num_layers",), "num_layers is no FIELD=VALUE"),
        (("--shape=experts=4",), "experts is given by --experts"),
        (("--shape=d_model=x",), "d_model=x is not a whole number"),
        (("--shape=num_heads=7",), "5120 is not divisible by num_heads 7"),
    ],
)
def test_what_cannot_be_is_refused_in_words(tmp_path, capsys, arguments, words):
    assert exit_status(layout_search, *arguments, f"--out={tmp_path}") == 2
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err


@pytest.mark.slow
def test_truth_prints_every_row(tmp_path, capsys):
    assert exit_status(planner_truth, f"--out={tmp_path}") == 0
    out = capsys.readouterr().out
    assert "held out " in out and "175B strong" in out and "4.5x" in out
    with (tmp_path / "truth.csv").open() as file:
        rows = list(csv.DictReader(file))
    sources = *published.SOURCES, *published.DIAGNOSED, *sum(published.CONFIRMATIONS, ())
    assert len(rows) == sum(len(list(published.rows(s))) for s in sources)
    assert {row["split"] for row in rows} == {"fit", "test", "terms", "confirm"}
    assert "confirmation 1" in out and "vocabulary_a100" in out and "nanotron_h100" in out
    assert (tmp_path / "truth.png").stat().st_size > 10_000


def test_scaling_names_what_limits_each_point(tmp_path, capsys):
    flags = ("--hardware=h100", "--kinds=strong", "--most=128", f"--out={tmp_path}")
    assert exit_status(scaling_study, *flags) == 0
    with (tmp_path / "scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["chips"] for row in rows} == {"64", "128"} and all(row["limit"] for row in rows)
    assert {row["model"] for row in rows} <= set(scaling.MODELS)
    assert "| strong | 22b | h100 | 64 |" in (tmp_path / "scaling.md").read_text()
    assert (tmp_path / "strong.png").stat().st_size > 10_000
    for flag in ("--most=32", "--kinds=none"):
        assert exit_status(scaling_study, flag, f"--out={tmp_path}") == 2


def test_the_planners_experiments_start_without_jax():
    names = ["experiments." + n for n in ("layout_search", "compile_plan")]
    names += ["experiments.planning." + n for n in ("truth", "scaling")]
    names += ["experiments.planner_truth", "experiments.scaling_study"]
    code = f"import sys; import {', '.join(names)}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
