"""The benchmarks from end to end at tiny sizes, as a user starts them."""

import csv
import importlib.util
import json
import sys

import filelock
import pytest
from exit_status import exit_status

from experiments import chip_report as experiment
from experiments.benchmarks.chip_report import chip_data
from experiments.benchmarks.chip_report import collect as chip_report
from experiments.benchmarks.options import IMPLEMENTATIONS
from sparse_dataflow.core.training import cost
from sparse_dataflow.runs.run_config import SIZES

KERNEL = ("--blocks=16", "--densities=0.25", "--tokens=64", "--rounds=1")


def kept(done, folder):
    """The one result file, whose provenance is whole."""
    assert done.returncode == 0, done.stderr
    return result_of(folder, done.stdout)


def result_of(folder, printed):
    """The one result file of a process that printed this."""
    (path,) = folder.glob("*.json")
    assert f"kept in {path}" in printed
    result = json.loads(path.read_text())
    assert {"python", "jax", "jaxlib", "flax"} <= result["versions"].keys()
    assert result["command"].startswith(f"python -m experiments.{path.name.split('_bench')[0]}")
    assert result["date"] and result["machine"] and result["inputs"]
    return result


@pytest.fixture
def measure_cpu(job, monkeypatch):
    """measure_cpu(folder) runs the chip report of this CPU; its rows are forks."""

    def run_row(command, environment, output, seconds):
        assert command[:3] == [sys.executable, "-m", "sparse_dataflow"]
        flags = " ".join(command[4:]).replace("--set ", "--set=").split()
        done = job.run(*flags, experiment=command[3])
        output.write_text(done.stdout + done.stderr)
        return done.returncode

    def measure(folder):
        assert exit_status(experiment, "--scale=pico", "--minutes=60", f"--out={folder}") == 0

    monkeypatch.setattr(chip_report, "_run", run_row)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return measure


@pytest.fixture
def cpu_report(measure_cpu, shared):
    """Folder of a chip report of this CPU, shared by all tests and workers; not to be changed."""
    folder = shared[0] / "cpu_report"
    with filelock.FileLock(shared[0] / "cpu_report.lock"):
        if not folder.exists():
            measure_cpu(folder)
    return folder


def row_of(report, name):
    """(result, output) of a row of a chip report."""
    folder = report / "rows" / name
    output = (folder / chip_report.OUTPUT).read_text()
    return result_of(folder, output), output


def check_ratio(found):
    assert 0 < found["ratio_low"] <= found["ratio"] <= found["ratio_high"]


@pytest.mark.slow
def test_kernel_bench(job, tmp_path):
    folder = tmp_path / "kept"
    flags = ("--shapes=64x128", *KERNEL, "--peers", f"--keep={folder}")
    done = job.run(*flags, experiment="kernel_bench")
    rows = kept(done, folder)["rows"]
    names = ("shape", "pattern", "product", "implementation")
    measured = {tuple(row[name] for name in names) for row in rows}
    ours = {m for m in measured if m[3] in IMPLEMENTATIONS["cpu"]}
    # Layouts at random have no equal groups.
    assert {m[1] for m in ours if m[3] == "grouped"} == {"monarch", "pixelfly"}
    assert len(ours) == (2 * 3 + 2) * 4
    peers = measured - ours
    assert {m[2] for m in peers} == {"forward"} and "jax_bcsr" in {m[3] for m in peers}
    assert len(measured) == len(rows)
    for row in rows:
        check_ratio(row)
        assert (row["tokens"], row["density"], row["block"]) == (64, 0.25, 16)
        assert row["ratio"] == pytest.approx(row["dense_ms"] / row["sparse_ms"])  # of one round
        assert row["of_ideal"] == pytest.approx(row["ratio"] / 4)
        assert row["of_ideal"] == pytest.approx(row["stored_tflops"] / row["dense_tflops"])
        flops = 2 * 64 * 64 * 128 * (3 if row["product"] == "forward_backward" else 1)
        assert row["dense_tflops"] * row["dense_ms"] * 1e9 == pytest.approx(flops)
        assert f"{row['ratio']:.2f}" in done.stdout


@pytest.mark.slow
def test_this_cpu_is_measured(cpu_report, measure_cpu, capsys):
    report = chip_data.read(cpu_report / "report.json")
    assert {r.name: r.output for r in report.rows if r.status != "done"} == {}
    assert {"block", "products_grouped", "step", "decode", "relay"} <= {r.name for r in report.rows}
    assert report.answer.startswith("On this chip a pico block at 1/8 trains ")
    assert report.answer in (cpu_report / "report.html").read_text()
    # All four projections.
    assert len({row["shape"] for row in row_of(cpu_report, "products_tables")[0]["rows"]}) == 4
    measure_cpu(cpu_report)
    printed = capsys.readouterr().out
    assert report.answer in printed and printed.count("done before") == len(report.rows)


@pytest.mark.slow
def test_step_bench(cpu_report):
    result, output = row_of(cpu_report, "step")
    check_ratio(result)
    assert (result["scale"], result["density"], result["block"]) == ("pico", 0.125, 16)
    rows = result["rows"]
    median_ratio = rows["dense"]["step_ms"] / rows["sparse"]["step_ms"]
    assert result["ratio"] == pytest.approx(median_ratio, rel=0.5)  # The median over paired rounds.
    pico = SIZES["pico"]
    assert rows["dense"]["stored_parameters"] == cost.parameter_count(pico)
    assert rows["sparse"]["stored_parameters"] < rows["dense"]["stored_parameters"]
    for row in rows.values():
        # Masters and moments are there, gradients while the step runs.
        assert 12 * row["stored_parameters"] < row["step_bytes"]
        assert row["state_bytes"] == 16 * row["stored_parameters"]
    share = cost.flops_per_token(pico, result["sequence"]).projection_share
    assert result["projection_share"] == pytest.approx(share)
    assert 1 < result["flop_ceiling"] < 8
    assert f"FLOP ceiling {result['flop_ceiling']:.2f}x" in output


@pytest.mark.slow
def test_step_bench_beside_torch(job, tmp_path):
    pytest.importorskip("torch", reason="the extra peers is not installed")
    folder = tmp_path / "kept"
    shape = ("--scale=pico", "--block=16", "--density=0.25", "--rounds=1")
    done = job.run(*shape, "--peers", f"--keep={folder}", experiment="step_bench")
    result = kept(done, folder)
    peer, dense = result["rows"]["torch_compile"], result["rows"]["dense"]
    for same in ("stored_parameters", "state_bytes"):
        assert peer[same] == dense[same]
    assert peer["first_loss"] == pytest.approx(dense["first_loss"], rel=1e-4)
    assert result["peers"]["torch_compile"].keys() == {"over_dense", "over_sparse"}


@pytest.mark.slow
def test_step_bench_beside_a_narrower_model(job, tmp_path):
    shape = ("--scale=pico", "--block=16", "--density=0.25", "--rounds=2")
    done = job.run(*shape, "--narrow", f"--keep={tmp_path}", experiment="step_bench")
    result = kept(done, tmp_path)
    narrow, sparse = (result["rows"][name] for name in ("narrow", "sparse"))
    assert narrow["stored_parameters"] < result["rows"]["dense"]["stored_parameters"]
    assert result["sparse_over_narrow"]["ratio"] > 0
    speeds = {name: row["mfu"] * row["step_ms"] for name, row in result["rows"].items()}
    # The same FLOPs a step, to the width that comes nearest.
    assert speeds["narrow"] == pytest.approx(speeds["sparse"], rel=0.05), (narrow, sparse)


@pytest.mark.slow
def test_block_bench(cpu_report):
    result, output = row_of(cpu_report, "block")
    check_ratio(result)
    rows, pico = result["rows"], SIZES["pico"]
    median_ratio = rows["dense"]["block_ms"] / rows["sparse"]["block_ms"]
    assert result["ratio"] == pytest.approx(median_ratio, rel=0.5)
    flops = cost.flops_per_token(pico, result["sequence"])
    one_block = (flops.projections + flops.attention) / pico.num_layers
    assert rows["dense"]["flops_per_token"] == pytest.approx(one_block)
    for row in rows.values():
        moved = row["flops_per_token"] * result["batch"] * result["sequence"]
        assert row["tflops"] * row["block_ms"] * 1e9 == pytest.approx(moved)
    assert 1 < result["flop_ratio"] < 8
    assert f"ratio of FLOPs {result['flop_ratio']:.2f}x" in output


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--shapes=64x128,0x8", "--shapes=64x128,0x8 is not a list"),
        ("--shapes=13c", "nor one of"),
        ("--tokens=64,-1", "--tokens=64,-1 is not legal: it must be a comma list of whole"),
        ("--densities=half", "--densities=half is not legal: it must be a comma list of numbers"),
        ("--patterns=auto,random", "--patterns=auto,random is unknown. Legal: pixelfly"),
        ("--shapes=64x128,64x120", "Block 16 does not divide a 64 x 120 weight; legal blocks"),
    ],
)
def test_kernel_bench_refuses_shapes_before_it_times_any(refused, tmp_path, flag, words):
    folder = tmp_path / "kept"
    assert words in refused(*KERNEL, flag, f"--keep={folder}", experiment="kernel_bench")
    assert not folder.exists()


@pytest.mark.slow
def test_decode_bench(job, tmp_path):
    folder = tmp_path / "kept"
    shape = ("--scale=pico", "--block=16", "--density=0.25", "--batch=2", "--cached=5")
    flags = ("--activation_sparsity=0.5", "--narrow", "--rounds=1", f"--keep={folder}")
    done = job.run(*shape, *flags, experiment="decode_bench")
    result = kept(done, folder)
    check_ratio(result)
    check_ratio(result["sparse_over_narrow"])
    for name, ratio in result["over_dense"].items():
        check_ratio(ratio)
        rows = result["rows"]
        assert rows[f"{name}, 50% zeros"]["read_bytes"] == rows[name]["read_bytes"]  # two texts
    assert result["ratio"] == pytest.approx(
        result["rows"]["dense"]["token_ms"] / result["rows"]["sparse"]["token_ms"]
    )
    assert result["byte_ceiling"] == pytest.approx(
        result["rows"]["dense"]["read_bytes"] / result["rows"]["sparse"]["read_bytes"]
    )
    for row in result["rows"].values():
        assert row["tokens_per_second"] == pytest.approx(2e3 / row["token_ms"])
    assert f"byte ceiling {result['byte_ceiling']:.2f}x" in done.stdout


@pytest.mark.parametrize("python", ["not/a/python", "false"])
def test_decode_bench_refuses_a_python_without_torch(job, refused, tmp_path, python):
    shape = ("--scale=pico", "--density=0.5", "--block=16", "--keep=", f"--torch={python}")
    assert f"--torch={python} " in refused(*shape, experiment="decode_bench")


@pytest.mark.slow
def test_decode_bench_times_rows(job, tmp_path):
    folder = tmp_path / "kept"
    shape = ("--scale=pico", "--pattern=masked", "--density=0.5", "--block=1x16", "--batch=2")
    flags = ["--rounds=1", f"--keep={folder}"]
    if importlib.util.find_spec("torch"):
        flags.append(f"--torch={sys.executable}")
    result = kept(job.run(*shape, *flags, experiment="decode_bench"), folder)
    check_ratio(result)
    assert result["block"] == "1x16"
    assert result["byte_ceiling"] > 1.4
    assert all(row["cpu_ms"] > 0 for row in result["rows"].values())


@pytest.mark.slow
def test_decode_bench_times_exported_models(job, tmp_path):
    folder = tmp_path / "kept"
    shape = ("--scale=pico", "--block=16", "--cached=12", "--rounds=2", f"--keep={folder}")
    result = kept(job.run(*shape, "--exports", experiment="decode_bench"), folder)
    assert 1 < result["byte_ratio"] < 8
    assert {"jax, prompt", "jax, new"} <= set(result["rows"])
    for row in result["rows"].values():
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert set(row["tokens_per_second"]) == {"dense", "sparse"}


@pytest.mark.slow
def test_scoring_bench(job, tmp_path):
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    folder = tmp_path / "kept"
    shape = ("--scale=pico", "--block=16", "--density=0.25", f"--corpus={job.corpus}")
    asked = ("--num_fewshot=0,1", "--items=6", "--rounds=1", f"--keep={folder}")
    result = kept(job.run(*shape, *asked, experiment="scoring_bench"), folder)
    rows = {(row["model"], row["shots"]): row for row in result["rows"]}
    assert set(rows) == {(name, shots) for name in ("dense", "sparse") for shots in (0, 1)}
    for row in rows.values():
        assert 0 < row["share_low"] <= row["share"] <= row["share_high"]
        rates = row["tokens_per_second"], row["forward_tokens_per_second"]
        assert row["share"] == pytest.approx(rates[0] / rates[1])  # of one round
        assert row["padding"] >= 0 and 1 <= row["programs"] <= 6 and row["requests"] >= 6
    assert rows["dense", 0]["tokens"] == rows["sparse", 0]["tokens"]
    assert rows["dense", 0]["tokens"] < rows["dense", 1]["tokens"]


@pytest.mark.slow
def test_stage_bench(job, undisturbed, tmp_path):
    folder = tmp_path / "kept"
    flags = (f"--run={undisturbed}", "--rounds=1", "--tokens=4", f"--keep={folder}")
    result = kept(job.run(*flags, experiment="stage_bench"), folder)
    assert [row["place"] for row in result["rows"]] == [
        "one device",
        "layers in turn",
        "2 processes",
    ]
    assert all(row["same_text"] and row["tokens_per_second"] > 0 for row in result["rows"])


@pytest.mark.parametrize("setting", ["parallel.executor=relay", "training.steps=3"])
def test_a_setting_that_no_benchmark_reads_is_refused(refused, setting):
    path, _, _ = setting.partition("=")
    said = refused(f"--set={setting}", "--scale=pico", experiment="step_bench")
    assert f"{path} has no effect in a benchmark" in said


def test_interplay_of_a_chip_that_is_not_here(job, refused, tmp_path):
    asked = ("--hardware=a100-80gb", "--scale=13b", "--measure=no", "--tokens=16384", "--block=128")
    done = job.run(*asked, f"--out={tmp_path}", experiment="interplay")
    assert done.returncode == 0, done.stderr
    assert "1/8 of the blocks gains" in done.stdout
    with (tmp_path / "interplay.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and all(not row["serial_measured_ms"] for row in rows)
    predicted = {(row["density"], row["fused"]): float(row["serial_predicted_ms"]) for row in rows}
    fused = predicted["1.0", "True"] / predicted["0.125", "True"]
    unfused = predicted["1.0", "False"] / predicted["0.125", "False"]
    assert fused > 1.5 * unfused
    said = refused("--measure=no", f"--out={tmp_path}", experiment="interplay")
    assert "--hardware=this is known by measuring" in said
    said = refused("--stages=3", f"--out={tmp_path}", experiment="interplay")
    assert "legal: 1 to 2" in said


@pytest.mark.nightly
def test_a_tiny_step_is_predicted_and_measured(job, tmp_path):
    """From end to end; on a busy machine the error says nothing."""
    flags = ("--scales=pico", "--block=16", "--tokens=128", "--rounds=1", f"--keep={tmp_path}")
    done = job.run(*flags, experiment="predict_check")
    assert done.returncode == 0, done.stderr
    assert "largest error" in done.stdout and len(list(tmp_path.iterdir())) == 1


@pytest.mark.nightly
def test_interplay_measures_whole_steps_fused_and_unfused(job, tmp_path):
    flags = ("--scale=pico", "--block=16", "--tokens=128", "--rounds=1", f"--out={tmp_path}")
    done = job.run(*flags, f"--keep={tmp_path}", experiment="interplay")
    assert done.returncode == 0, done.stderr
    for way in ("measured", "predicted"):
        for order in ("serial", "pipelined"):
            assert f"- {way}, {order}: 1/8 of the blocks gains" in done.stdout
