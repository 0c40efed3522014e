"""Estimates from counted schedules: times, fractions, ratios, and what the cache depends on."""

import argparse
import dataclasses

import pytest

from experiments.benchmarks.schedules import estimates, gpu_estimates
from experiments.benchmarks.schedules.case import DENSE, PRODUCTS
from experiments.benchmarks.schedules.mlp_case import FUSED
from experiments.schedule_bench import GPUS, IMPLEMENTATIONS, TPUS, Options
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.files import derived

SPARSE = estimates.case_of("v6e", "pallas_tpu", "pixelfly", "mlp_in", 128, 1 / 8, 2048)
DENSE_CASE = estimates.case_of("v6e", DENSE, "", "mlp_in", 0, 1.0, 2048)


def count(cycles=0, xla_cycles=0, hbm_bytes=0):
    return {
        "cycles": cycles,
        "xla_cycles": xla_cycles,
        "hbm_bytes": hbm_bytes,
        "spills": 0,
        "products": 0,
    }


def test_the_flags_offer_what_there_is():
    assert tuple(estimates.CLOCKS) == TPUS
    assert set(gpu_estimates.EVERY) == set(GPUS)
    assert (*estimates.IMPLEMENTATIONS, FUSED, *gpu_estimates.IMPLEMENTATIONS) == IMPLEMENTATIONS


def test_every_case_has_a_layout_and_a_dense_product():
    cases = [case for _, case in estimates.cases_of(Options())]
    dense = {(c.chip, c.in_features, c.out_features) for c in cases if c.implementation == DENSE}
    sparse = [case for case in cases if case.implementation != DENSE]
    assert {case.block for case in sparse} == {64, 128, 256}
    for case in sparse:
        assert (case.chip, case.in_features, case.out_features) in dense
        shape = case.in_features, case.out_features
        layout = make_layout(case.pattern, *shape, case.block, case.density)
        assert layout.density == pytest.approx(case.density) and case.density <= 1 / 8


def test_time_is_the_larger_of_cycles_and_bytes():
    clock, bandwidth = 1.75e9, 1.638e12
    for product in PRODUCTS:
        dense = estimates.row_of("mlp_in", DENSE_CASE, product, count(xla_cycles=1_000_000), [])
        assert dense["ratio"] == 1 and dense["ms"] == pytest.approx(1e3 * 1e6 / clock)
        bound = estimates.row_of("mlp_in", SPARSE, product, count(250_000, 50_000), [dense])
        assert bound["ratio"] == pytest.approx(10 / 3)
        flops = 2 * 2048 * 5120 * 20480 / 8
        assert bound["mxu"] == pytest.approx(flops / 918e12 / (300_000 / clock))
        starved = estimates.row_of(
            "mlp_in", SPARSE, product, count(10, 0, int(bandwidth * 1e-3)), [dense]
        )
        assert starved["ms"] == pytest.approx(1) and starved["hbm"] == pytest.approx(1)


def test_products_together_weigh_by_time():
    rows = []
    for product, dense, sparse in (("forward", 800, 100), ("dx", 800, 300), ("dW", 400, 100)):
        rows.append(estimates.row_of("mlp_in", DENSE_CASE, product, count(dense), rows))
        rows.append(estimates.row_of("mlp_in", SPARSE, product, count(sparse), rows))
    (summary,) = estimates.summaries(rows)
    assert summary["ratio"] == pytest.approx(2000 / 500)
    assert summary["implementation"] == "pallas_tpu" and len(summary["dW"]) == 1


def test_the_fused_mlp_is_compared_with_its_six_dense_products():
    rows = []
    for projection, cycles in (("qkv", 900), ("mlp_in", 400), ("mlp_out", 300)):
        case = estimates.case_of("v6e", DENSE, "", projection, 0, 1.0, 2048)
        for product in PRODUCTS:
            rows.append(estimates.row_of(projection, case, product, count(cycles), rows))
    (case,) = (case for name, case in estimates.cases_of(Options(chips=("v6e",))) if name == "mlp")
    assert (case.implementation, case.block, case.in_features) == (FUSED, 128, 5120)
    row = estimates.row_of("mlp", case, "mlp", count(300), rows)
    assert row["ratio"] == pytest.approx(3 * (400 + 300) / 300)
    flops = 6 * 2 * 2048 * 5120 * 20480 / 8
    assert row["mxu"] == pytest.approx(flops / 918e12 / (300 / 1.75e9))


def test_the_cache_depends_on_the_case_and_the_sources(monkeypatch, tmp_path):
    key = lambda case: derived.key(estimates.origin(case))  # noqa: E731
    sparse, dense = key(SPARSE), key(DENSE_CASE)
    assert sparse == key(dataclasses.replace(SPARSE))
    assert sparse != key(dataclasses.replace(SPARSE, tokens=4096))
    source = tmp_path / "kernel.py"
    source.write_text("another kernel")
    monkeypatch.setattr(estimates, "_sources", lambda: [source])
    assert sparse != key(SPARSE)
    assert dense == key(DENSE_CASE)
    monkeypatch.setattr(estimates, "version_of", lambda package: "another")
    assert dense != key(DENSE_CASE)


def test_sources_have_the_kernels_and_the_reader():
    ends = {"/".join(path.parts[-2:]) for path in estimates._sources()}
    kernels = {"matmul/stream.py", "grouped_matmul/kernels.py", "ops/derivatives.py"}
    assert kernels | {"schedules/schedule.py", "schedules/case.py", "layouts/patterns.py"} <= ends


def test_a_cached_case_is_not_compiled(monkeypatch, tmp_path):
    counts = {"forward": count(7)}
    monkeypatch.setattr(estimates, "_counts", lambda case: counts)
    assert estimates.cached_counts(SPARSE, str(tmp_path)) == counts
    monkeypatch.setattr(estimates, "_counts", lambda case: pytest.fail("compiled"))
    assert estimates.cached_counts(SPARSE, str(tmp_path)) == counts


def test_a_failed_compilation_is_told_in_words(monkeypatch):
    done = argparse.Namespace(
        returncode=1, stderr="Traceback ...\nout of memory in vmem", stdout=""
    )
    monkeypatch.setattr(estimates.subprocess, "run", lambda *a, **k: done)
    with pytest.raises(estimates.UserError, match=r"(?s)does not compile: .*vmem"):
        estimates.cached_counts(SPARSE, "")
