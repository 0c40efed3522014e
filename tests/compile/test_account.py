"""The account of a step names the part of every kernel, and scales with the layers."""

import dataclasses

import pytest

from sparse_dataflow.compile import account, topologies
from sparse_dataflow.compile.account import Rates, Traffic
from sparse_dataflow.compile.hlo import Kernel
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.hardware.chips import CHIPS
from sparse_dataflow.planner import efficiency
from sparse_dataflow.runs.run_config import SIZES

BLOCKS = "jit(train_step)/loss_and_gradients/transpose(jvp(blocks))/while/body/checkpoint"


@pytest.mark.parametrize(
    ("target", "scope", "section"),
    [
        ("fusion", f"{BLOCKS}/mlp/mul", "activation and bias"),
        ("fusion", f"{BLOCKS}/rematted_computation/norm/add", "norms"),
        ("fusion", f"{BLOCKS}/heads/unstack", "heads: q, k, v split and joined"),
        ("fusion", f"{BLOCKS}/residual/add", "residual"),
        ("gemm_fusion", f"{BLOCKS}/mlp/dot_general", "products"),
        ("triton:residual_norm_gradient", f"{BLOCKS}/pallas_call", "norms"),
        ("triton:bias_activation", f"{BLOCKS}/mlp/pallas_call", "activation and bias"),
        ("mosaic_gpu_v2", f"{BLOCKS}/pallas_call", "products"),
        ("__cudnn$fmhaSoftmax", f"{BLOCKS}/attention/fwd", "attention"),
        ("tpu:splash_mha_dq_no_residuals", "", "attention"),
        ("tpu:residual_norm_gradient", f"{BLOCKS}/pallas_call", "norms"),
        ("tpu:grouped_mlp", f"{BLOCKS}/mlp/grouped_mlp/pallas_call", "products"),
        ("convolution", f"{BLOCKS}/mlp/dot_general", "products"),
        ("fusion", f"{BLOCKS}/mlp/dynamic_update_slice", account.SECTIONS[6]),
        ("copy", "", account.SECTIONS[6]),
        ("fusion", "jit(train_step)/optimizer/reduce_sum", "optimizer"),
        ("gemm_fusion", "jit(train_step)/jvp(head)/while/dot_general", "head and embedding"),
        ("fusion", "jit(train_step)/jvp(embed)/gather", "head and embedding"),
        ("fusion", "jit(train_step)/iota", "other"),
    ],
)
def test_a_kernel_belongs_to_the_part_that_its_path_names(target, scope, section):
    assert account.section_of(Kernel("k", target, 1.0, 8, scope)) == section


@pytest.mark.parametrize("layers", [2, 4, 7, 40])
def test_a_step_is_linear_in_its_layers(layers):
    def step(depth):
        return dict.fromkeys(account.SECTIONS, Traffic()) | {
            "norms": Traffic(3.0 * depth, 5.0 * depth),
            "optimizer": Traffic(2.0, 11.0 + depth),
        }

    got = account.scaled(step(account.SHALLOW), step(account.DEEP), layers)
    for section, traffic in step(layers).items():
        assert (got[section].launches, got[section].bytes) == (traffic.launches, traffic.bytes)


def test_a_kernel_in_a_loop_counts_as_often_as_it_runs(monkeypatch):
    kernel = Kernel("k", "fusion", 24.0, 8, f"{BLOCKS}/norm/add")
    monkeypatch.setattr(account.hlo, "kernels", lambda text: [kernel])
    assert account.account("")["norms"] == Traffic(24.0, 24.0 * 8)


def test_a_copy_to_vector_memory_is_no_launch():
    text = """HloModule jit_step

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %near = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%start)
  ROOT %y = f32[8,128]{1,0:T(8,128)} negate(%near), metadata={op_name="jit(step)/norm/neg"}
}
"""
    assert account.account(text)["norms"] == Traffic(1.0, 2 * 4 * 8 * 128)


RATES = Rates(passes=0.5, streams=0.8, products=0.7, attention=0.6, clock=1e9)
TPU = CHIPS["tpu-v5p"]


def test_a_part_takes_the_longest_of_bytes_flops_and_cycles():
    moved = {"products": Traffic(1.0, 1e9), "norms": Traffic(1.0, 1e9, 3e6)}
    few, many = (
        account.seconds(moved, {"products": flops}, TPU, "bfloat16", RATES) for flops in (1, 1e15)
    )
    assert few["products"] == (pytest.approx(1e9 / 2.765e12 / 0.8), "bytes")
    assert many["products"] == (pytest.approx(1e15 / 459e12 / 0.7), "FLOPs")
    assert few["norms"] == (pytest.approx(3e-3), "cycles")
    in_time = dataclasses.replace(RATES, clock=None)
    without = account.seconds(moved, {}, TPU, "bfloat16", in_time)
    assert without["norms"] == (pytest.approx(1e9 / 2.765e12 / 0.5), "bytes")


@pytest.mark.parametrize("topology", ["v5p:1x1x1", "v6e:1x1", "v5e:1x1"])
def test_a_tpu_has_the_rates_of_the_planner(topology):
    dense = SIZES["pico"]
    sparse = dense.with_linears(LinearSpec("block_sparse", "monarch", 1 / 8, 128))
    chip = topologies.parse(topology)
    fitted = efficiency.for_family(chip.chip.family)
    blocks = efficiency.BLOCK_RATES[chip.chip.family][True][128]
    assert account.rates(chip, dense).products == fitted.matmul
    assert account.rates(chip, sparse).products == pytest.approx(fitted.matmul * blocks)
    assert account.rates(chip, sparse).passes == fitted.bandwidth
