"""The plans of `compile_plan` through the compiler for TPUs: tiny ones, and the shipped nightly."""

import dataclasses

import pytest
from shipped_plans import SHIPPED, plan_of, result

from sparse_dataflow.commands.planning import compile_report
from sparse_dataflow.commands.planning.compile_report import FITS, TOO_LARGE, CompilePlan
from sparse_dataflow.compile import topologies
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.planner.parallel_plan import ParallelPlan

pytest.importorskip("libtpu", reason="compiling for a TPU needs make aot-tpu")
pytestmark = pytest.mark.usefixtures("optimized")

MODEL = ModelConfig(4, 512, 4, 2048, 1024, 256, compute_dtype="bfloat16", remat="full")
SPARSE = MODEL.with_linears(LinearSpec("block_sparse", density=1 / 4, block=128))


def tiny_plan(config, topology, **choices):
    parallel = ParallelPlan(**choices, remat="full", sequence_parallel=True)
    return CompilePlan("tiny", config, 256, topologies.parse(topology), parallel)


@pytest.mark.parametrize(
    ("config", "choices"),
    [
        (SPARSE, {"fsdp": 2, "tensor": 2, "zero": 3}),
        (MODEL, {"stage": 2, "tensor": 2, "zero": 3, "accumulation": 4}),
    ],
)
def test_a_tiny_plan_is_compiled_for_four_chips(config, choices):
    plan = tiny_plan(config, "v5e:2x2", **choices)
    verdict = compile_report.verdict(plan)
    sizes = verdict["bytes"]
    assert verdict["verdict"] == FITS and min(sizes.values()) >= 0
    state = sizes["parameters"] + sizes["moments"]
    assert state == pytest.approx(3 * sizes["parameters"], rel=0.01)
    kinds = {c["kind"] for c in verdict["collectives"]}
    assert {c["group"] for c in verdict["collectives"]} <= {2, 4}
    assert ("collective-permute" in kinds) == ("stage" in choices)
    assert verdict["flops"] >= verdict["model_flops"] / 2 and not verdict["kernels_without_flops"]
    assert "GiB a chip" in compile_report.report(plan, verdict)


def test_a_plan_that_is_too_large_does_not_fit():
    wide = dataclasses.replace(MODEL, num_layers=64, d_model=4096, num_heads=32, d_ff=16384)
    verdict = compile_report.verdict(tiny_plan(wide, "v5e:1x1"))
    assert verdict["verdict"] == TOO_LARGE
    assert verdict["needed_bytes"] is None or verdict["needed_bytes"] > 2**30


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in SHIPPED if "_v" in name])
def test_a_shipped_plan_compiles_to_the_shipped_result(name):
    shipped = result(name)
    verdict = compile_report.verdict(plan_of(shipped["plan"]))
    assert verdict["verdict"] == FITS
    assert sum(verdict["bytes"].values()) == pytest.approx(sum(shipped["bytes"].values()), rel=0.1)
    assert verdict["flops"] == pytest.approx(shipped["flops"], rel=0.01)
    assert verdict["seconds"]["processor"] < 2 * 300
