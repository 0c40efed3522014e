"""The account of a step names the part of every kernel, and scales with the layers."""

import pytest

from sparse_dataflow.compile import account
from sparse_dataflow.compile.account import Traffic
from sparse_dataflow.compile.hlo import Kernel

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


def test_products_take_the_longer_of_bytes_and_flops():
    moved = {"products": Traffic(1.0, 1e9), "norms": Traffic(1.0, 1e9)}
    fast = account.seconds(moved, {"products": 1.0}, 1e15, 1e12, grouped=True)
    slow = account.seconds(moved, {"products": 1e15}, 1e15, 1e12, grouped=True)
    assert fast["products"] == pytest.approx(1e-3 / account.STREAM_RATE)
    assert slow["products"] == pytest.approx(1 / account.GROUP_RATE)
    assert fast["norms"] == slow["norms"] == pytest.approx(1e-3 / account.PASS_RATE)
