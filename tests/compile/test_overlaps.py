"""Which collectives overlap with products: programs with a known answer, and compiled layers."""

import importlib.util

import jax
import overlaps
import pytest

from sparse_dataflow.compile import programs as compile
from sparse_dataflow.compile import topologies
from sparse_dataflow.compile.hlo import collectives
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.executors.sharded import Sharded

GPU = """\
HloModule jit_step, is_scheduled=true

%product (a: bf16[8]) -> bf16[8] {
  %a = bf16[8]{0} parameter(0)
  ROOT %dot = bf16[8]{0} dot(%a, %a), lhs_contracting_dims={1}
}

%body (state: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %x = bf16[8]{0} get-tuple-element(%state), index=1
  %first-start = (bf16[8]{0}, bf16[16]{0}) all-gather-start(%x), replica_groups=[2,2]<=[4]
  %second-start = ((bf16[8]{0}), bf16[4]{0}) reduce-scatter-start(%x), replica_groups=[2,2]<=[4]
  %y = bf16[8]{0} fusion(%x), kind=kCustom, calls=%product
  %second = bf16[4]{0} reduce-scatter-done(%second-start)
  %z = bf16[8]{0} custom-call(%y), custom_call_target="__cublas$gemm"
  %copied = bf16[8]{0} custom-call(%y), custom_call_target="ConcatBitcast"
  %first = bf16[16]{0} all-gather-done(%first-start)
  %alone = bf16[16]{0} all-gather(%z), replica_groups=[2,2]<=[4]
  ROOT %next = (s32[], bf16[8]) tuple(%state, %alone)
}

ENTRY %main (x: bf16[8]) -> bf16[8] {
  %x = bf16[8]{0} parameter(0)
  %start = (s32[], bf16[8]) tuple(%x)
  ROOT %loop = (s32[], bf16[8]) while(%start), body=%body, known_trip_count":{"n":"3"}
}
"""

TPU = """\
HloModule jit_step, is_scheduled=true

%begin (a: bf16[8]) -> (bf16[8], bf16[16]) {
  %a = bf16[8]{0} parameter(0)
  ROOT %gather = bf16[16]{0} all-gather(%a), replica_groups=[2,2]<=[4]
}

%async_collective_fusion.1 (a: bf16[8]) -> (bf16[8], bf16[16]) {
  %a = bf16[8]{0} parameter(0)
  %sum = bf16[8]{0} convolution(%a, %a), dim_labels=bf_io->bf
  ROOT %gather = bf16[16]{0} all-gather(%a), replica_groups=[2,2]<=[4]
}

%end (a: bf16[8]) -> bf16[16] {
  %a = bf16[8]{0} parameter(0)
  ROOT %gather = bf16[16]{0} all-gather(%a), replica_groups=[2,2]<=[4]
}

%all-reduce-scatter.1 (a: bf16[16]) -> bf16[8] {
  %a = bf16[16]{0} parameter(0)
  ROOT %reduced = bf16[16]{0} all-reduce(%a), replica_groups=[2,2]<=[4]
}

ENTRY %main (x: bf16[8]) -> bf16[8] {
  %x = bf16[8]{0} parameter(0)
  %async-collective-start.1 = (bf16[8]{0}, bf16[16]{0}) fusion(%x), kind=kCustom, calls=%begin
  %part = bf16[16]{0} get-tuple-element(%async-collective-start.1), index=1
  %step = (bf16[8]{0}, bf16[16]{0}) fusion(%part), kind=kOutput, calls=%async_collective_fusion.1
  %rest = bf16[16]{0} get-tuple-element(%step), index=1
  %async-collective-done.1 = bf16[16]{0} fusion(%rest), kind=kCustom, calls=%end
  ROOT %scattered = bf16[8]{0} fusion(%async-collective-done.1), calls=%all-reduce-scatter.1
}
"""


def described(text):
    return [(c.kind, c.times, c.bytes, c.products) for c in overlaps.scheduled_collectives(text)]


def test_products_between_start_and_done_count_on_a_gpu():
    assert described(GPU) == [
        ("reduce-scatter", 3, 16, 1),
        ("all-gather", 3, 32, 2),
        ("all-gather", 3, 32, 0),
    ]


def test_a_collective_that_fusions_of_a_tpu_continue_is_one():
    assert described(TPU) == [("all-gather", 1, 32, 1), ("reduce-scatter", 1, 32, 0)]
    assert {(c.kind, c.times) for c in collectives(TPU)} == {
        ("all-gather", 1),
        ("reduce-scatter", 1),
    }


def overlapping(topology, sub_batches, **sizes):
    """Returns, forward and backward, how many collectives of a layer overlap with a product.

    Returns:
      [(overlapping all-gathers, overlapping reduce-scatters, all of both)] of both loops.
    """
    topology = topologies.parse(topology)
    chips = topologies.devices(topology)
    model = ModelConfig(2, vocab_size=256, compute_dtype="bfloat16", **sizes)
    mesh = meshes.make(meshes.parse("feature:2,tensor:2", 4), chips)
    executor = Sharded(mesh, sub_batches=sub_batches)
    training = TrainingConfig(1, batch=8, sequence=model.max_len)
    (state, rest, batch, _), _ = compile.abstract_arguments(executor, model, training, False)
    step = jax.jit(
        lambda params, rest, batch: executor.loss_and_gradients(
            model, params, rest, batch, whole.Accumulation()
        )
    )
    with compile.tracing_for(executor, chips[0]):
        traced = step.trace(state.params, rest, batch)
        program = traced.lower(lowering_platforms=(topology.platform,)).compile()
    loops: dict[str, list] = {}
    smallest = 2**20  # Sums of squares of the norms are smaller.
    for collective in overlaps.scheduled_collectives(program.as_text()):
        if collective.times == model.num_layers and collective.bytes >= smallest:
            loops.setdefault(collective.computation, []).append(collective)
    return [
        (
            sum(c.kind == "all-gather" and c.products > 0 for c in loop),
            sum(c.kind == "reduce-scatter" and c.products > 0 for c in loop),
            len(loop),
        )
        for loop in loops.values()
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_two_sub_batches_overlap_with_each_other_on_four_h100():
    if not importlib.util.find_spec("jax_cuda13_plugin"):
        pytest.skip("compiling for a GPU needs make aot-gpu")
    sizes = {"d_model": 5120, "num_heads": 40, "d_ff": 20480, "max_len": 2048}
    forward, backward = overlapping("h100:4", 2, **sizes)
    assert forward[2] == 16 and forward[0] >= 4 and forward[1] >= 4, forward
    assert backward[2] <= 17 and backward[0] >= 4 and backward[1] >= 4, backward


@pytest.mark.nightly
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(("sub_batches", "least"), [(1, (0, 2)), (2, (3, 7))])
def test_all_gathers_overlap_on_four_v5e(sub_batches, least):
    """No reduce-scatter does: this compiler has synchronous ones only."""
    if not importlib.util.find_spec("libtpu"):
        pytest.skip("compiling for a TPU needs make aot-tpu")
    sizes = {"d_model": 2048, "num_heads": 16, "d_ff": 8192, "max_len": 1024}
    loops = overlapping("v5e:2x2", sub_batches, **sizes)
    assert all(loop[0] >= gathers for loop, gathers in zip(loops, least, strict=True)), loops
    assert [loop[1:] for loop in loops] == [(0, 8 * sub_batches)] * 2, loops
