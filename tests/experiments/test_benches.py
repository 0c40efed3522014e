"""Both benchmarks from end to end at tiny sizes, as a user starts them."""

import json

import pytest
from main_job import complaint

from sparse_dataflow.models.sizes import SIZES
from sparse_dataflow.planning import cost, memory


@pytest.fixture(autouse=True)
def quick_compile(monkeypatch):
    """In the processes that are started; what they time is of no interest here."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


KERNEL = ("--block=16", "--density=0.25", "--tokens=64", "--rounds=1")


def kept(done, folder):
    """The one result file, whose provenance is whole."""
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    assert f"kept in {path}" in done.stdout
    result = json.loads(path.read_text())
    assert {"python", "jax", "jaxlib", "flax"} <= result["versions"].keys()
    assert result["command"].startswith(f"python -m experiments.{path.name.split('_bench')[0]}")
    assert result["date"] and result["machine"] and result["inputs"]
    return result


def check_ratio(found):
    assert 0 < found["ratio_low"] <= found["ratio"] <= found["ratio_high"]


def test_kernel_bench(job, tmp_path):
    folder = tmp_path / "kept"
    done = job.run("--shapes=64x128,128x64", *KERNEL, f"--keep={folder}", experiment="kernel_bench")
    result = kept(done, folder)
    assert (result["tokens"], result["density"], result["block"]) == (64, 0.25, 16)
    measured = {(r["shape"], r["pattern"], r["implementation"]) for r in result["rows"]}
    assert len(measured) == len(result["rows"]) == 2 * 3 * 2
    for row in result["rows"]:
        check_ratio(row)
        assert row["ratio"] == pytest.approx(row["dense_ms"] / row["sparse_ms"])  # of one round
        assert f"{row['ratio']:.2f}" in done.stdout


@pytest.mark.slow
def test_step_bench(job, tmp_path):
    folder = tmp_path / "kept"
    flags = ("--scale=pico", "--block=16", "--density=0.25", "--rounds=1", f"--keep={folder}")
    done = job.run(*flags, experiment="step_bench")
    result = kept(done, folder)
    check_ratio(result)
    assert (result["scale"], result["density"], result["block"]) == ("pico", 0.25, 16)
    rows = result["rows"]
    assert result["ratio"] == pytest.approx(rows["dense"]["step_ms"] / rows["sparse"]["step_ms"])
    pico = SIZES["pico"]
    assert rows["dense"]["stored_parameters"] == memory.parameter_count(pico)
    assert rows["sparse"]["stored_parameters"] < rows["dense"]["stored_parameters"]
    share = cost.flops_per_token(pico, result["sequence"]).projection_share
    assert result["projection_share"] == pytest.approx(share)
    assert 1 < result["flop_ceiling"] < 4
    assert f"FLOP ceiling {result['flop_ceiling']:.2f}x" in done.stdout


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--shapes=64x128,0x8", "--shapes=64x128,0x8 is not a list"),
        ("--shapes=64x128,64x120", "Block 16 does not divide a 64 x 120 weight; legal blocks"),
    ],
)
def test_kernel_bench_refuses_shapes_before_it_times_any(job, tmp_path, flag, words):
    folder = tmp_path / "kept"
    done = job.run(flag, *KERNEL, f"--keep={folder}", experiment="kernel_bench")
    assert words in complaint(done)
    assert done.stdout == "" and not folder.exists()
