"""What compiled GPU programs take: rooflines, ratios, and the kept table."""

import dataclasses
import json

import pytest
from places import ROOT

from experiments.benchmarks.schedules import estimates, gpu_estimates
from experiments.benchmarks.schedules.case import DENSE, PRODUCTS
from experiments.schedule_bench import GPUS, Options
from sparse_dataflow.compile import topologies
from sparse_dataflow.compile.gpu_targets import TARGETS

CASES = list(gpu_estimates.cases_of(dataclasses.replace(Options(), chips=GPUS, blocks=(128,))))
KEPT = json.loads((ROOT / "experiments/results/schedule_bench_gpu.json").read_text())


def case_of(implementation, chip="a100", projection="mlp_in"):
    (found,) = (
        case
        for name, case in CASES
        if (case.implementation, case.chip, name) == (implementation, chip, projection)
    )
    return found


def count(product_bytes=0, other_bytes=0, needed_bytes=1):
    return {
        "product_bytes": product_bytes,
        "other_bytes": other_bytes,
        "needed_bytes": needed_bytes,
        "spills": None,
        "temporary_bytes": 0,
    }


@pytest.mark.parametrize("kind", ["a100", "h100", "h200", "b200"])
def test_described_gpus_have_the_rates_of_the_planner(kind):
    flops, bandwidth = topologies.parse(f"{kind}:1").chip.rates("bfloat16")
    target = TARGETS[kind]
    assert (target.tflops * 1e12, target.bandwidth_gb * 1e9) == pytest.approx((flops, bandwidth))


def test_every_gpu_has_a_dense_product_and_the_implementations_that_run_there():
    for chip in GPUS:
        names = {case.implementation for _, case in CASES if case.chip == chip}
        assert {DENSE, "grouped", "xla"} <= names
        assert ("pallas_hopper" in names) == (chip == "h100")
        assert ("pallas_triton" in names) == (chip in ("a100", "l4", "b200"))


def test_a_roofline_adds_kernels_and_takes_the_slower_of_flops_and_bytes():
    flops = 2 * 2048 * 5120 * 20480
    dense = gpu_estimates.row_of("mlp_in", case_of(DENSE), "dx", count(), [])
    assert dense["ratio"] == 1 and dense["bound_ms"] == pytest.approx(1e3 * flops / 312e12)
    moved = int(2.039e12 * 1e-3)
    starved = count(moved, 2 * moved, moved)
    sparse = gpu_estimates.row_of("mlp_in", case_of("xla"), "dx", starved, [dense])
    assert sparse["bound_ms"] == pytest.approx(3) and sparse["traffic"] == pytest.approx(3)
    assert sparse["ratio"] == pytest.approx(dense["bound_ms"] / 3)
    (first, second) = gpu_estimates.summaries([dense, sparse])
    assert (first["ratio"], second["ratio"]) == (1, pytest.approx(sparse["ratio"]))


def test_the_cache_depends_on_the_gpu_kernels(monkeypatch, tmp_path):
    case = case_of("pallas_triton")
    origin = estimates.origin(case)
    ends = {"/".join(path.parts[-2:]) for path in estimates._gpu_sources()}
    kernels = {"triton/matmul.py", "hopper/products.py", "hopper/tuning.py", "ops/derivatives.py"}
    assert kernels | {"schedules/gpu_case.py", "compile/gpu_targets.py", "schedules/ptx.py"} <= ends
    source = tmp_path / "kernel.py"
    source.write_text("another kernel")
    monkeypatch.setattr(estimates, "_gpu_sources", lambda: [source])
    assert origin != estimates.origin(case)


def test_the_kept_table_has_every_case_and_no_spills():
    rows = {
        (r["chip"], r["implementation"], r["projection"], r["product"]): r for r in KEPT["rows"]
    }
    expected = {(c.chip, c.implementation, name, p) for name, c in CASES for p in PRODUCTS}
    assert rows.keys() == expected
    for (chip, name, *_), row in rows.items():
        assert not row["spills"]
        if name == "grouped":
            assert row["gemms"] == 1
        if name.startswith("pallas"):
            assert row["mma"] and row["traffic"] < 3 and row["registers"] <= 255
        if (chip, name) == ("h100", "pallas_hopper"):
            assert row["mma"] == ["wgmma m64n128k16"]
