"""The plans of `compile_plan` through the compiler for TPUs: tiny ones, and the shipped nightly."""

import dataclasses

import pytest
from shipped_plans import SHIPPED, plan_of, result

from experiments import compile_report
from experiments.compile_report import FITS, TOO_LARGE, Plan
from sparse_dataflow.aot import hlo, topologies
from sparse_dataflow.config.model import LinearSpec, ModelConfig
from sparse_dataflow.planning.run_layout import RunLayout

pytest.importorskip("libtpu", reason="compiling for a TPU needs make aot-tpu")
pytestmark = pytest.mark.usefixtures("optimized")

MODEL = ModelConfig(4, 512, 4, 2048, 1024, 256, compute_dtype="bfloat16", remat="full")
SPARSE = MODEL.with_linears(LinearSpec("block_sparse", density=1 / 4, block=128))


def plan(config, topology, **layout):
    executor = "pipeline" if layout.get("stage", 1) > 1 else "whole"
    run = RunLayout(**layout, remat="full", executor=executor, sequence_parallel=True)
    return Plan("tiny", config, 256, topologies.parse(topology), run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (SPARSE, {"fsdp": 2, "tensor": 2, "zero": 3}),
        (MODEL, {"stage": 2, "tensor": 2, "zero": 3, "accumulation": 4}),
    ],
)
def test_a_tiny_plan_is_compiled_for_four_chips(config, layout):
    asked = plan(config, "v5e:2x2", **layout)
    found = compile_report.verdict(asked)
    assert found["verdict"] == FITS and min(found["bytes"].values()) >= 0
    kept = sum(found["bytes"][name] for name in ("parameters", "moments"))
    assert kept == pytest.approx(3 * found["bytes"]["parameters"], rel=0.01)
    kinds = hlo.by_kind(hlo.Collective(c["kind"], c["group"], c["times"], c["bytes"])
                        for c in found["collectives"])  # fmt: skip
    assert {c["group"] for c in found["collectives"]} <= {2, 4}
    assert ("collective-permute" in kinds) == ("stage" in layout)
    assert found["flops"] >= found["model_flops"] / 2 and not found["kernels_without_flops"]
    assert "GiB a chip" in compile_report.told(asked, found)


@pytest.mark.slow
def test_what_is_too_large_is_refused_by_the_compiler():
    wide = dataclasses.replace(MODEL, num_layers=64, d_model=4096, num_heads=32, d_ff=16384)
    found = compile_report.verdict(plan(wide, "v5e:1x1"))
    assert found["verdict"] == TOO_LARGE
    assert found["needed_bytes"] is None or found["needed_bytes"] > 2**30


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in SHIPPED if "_v" in name])
def test_a_shipped_plan_is_what_the_compiler_makes_now(name):
    shipped = result(name)
    found = compile_report.verdict(plan_of(shipped["plan"]))
    assert found["verdict"] == FITS
    assert sum(found["bytes"].values()) == pytest.approx(sum(shipped["bytes"].values()), rel=0.1)
    assert found["flops"] == pytest.approx(shipped["flops"], rel=0.01)
    assert found["seconds"]["processor"] < 2 * 300
