"""Depth costs nothing: the relay for 4 and 400 blocks, compiled for a TPU v5e with 16 GB."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from sparse_dataflow.compile import topologies
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.hardware.chips import GIGA
from sparse_dataflow.planner import relay_step
from sparse_dataflow.relay import relay_programs

pytest.importorskip(
    "libtpu", reason="compiling for a TPU needs libtpu: pip install 'sparse_dataflow[aot]'"
)
pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("optimized")]

WIDTH = 4096
SHAPE = (8, 1, 2048)
MODEL = ModelConfig(
    num_layers=4,
    d_model=WIDTH,
    num_heads=WIDTH // 128,
    d_ff=4 * WIDTH,
    vocab_size=50257,
    max_len=2048,
    compute_dtype="bfloat16",
)
MODELS = {
    "dense": MODEL,
    "sparse": MODEL.with_linears(LinearSpec("block_sparse", "monarch", density=0.125, block=128)),
}


@pytest.fixture(scope="module")
def mesh():
    chips = topologies.tpu_devices("v5e:2x2")
    return Mesh(np.array(chips[:1]), (relay_programs.DATA_AXIS,))


def lower(model, mesh):
    arguments = relay_programs.arguments(model, SHAPE)
    return relay_programs.lower(
        relay_programs.functions(model), arguments, mesh, lowering_platforms=("tpu",)
    )


def sizes_of(program):
    """Returns (arguments, results, temporaries) in bytes."""
    analysis = program.memory_analysis()
    return (
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        analysis.temp_size_in_bytes,
    )


@pytest.mark.parametrize("name", MODELS)
def test_programs_and_memory_do_not_depend_on_the_depth(name, mesh):
    programs = {}
    for layers in (4, 400):
        model = dataclasses.replace(MODELS[name], num_layers=layers)
        programs[layers] = lower(model, mesh)
    shallow, deep = ([p.as_text() for p in programs[layers]] for layers in (4, 400))
    assert len(shallow) == len(relay_programs.Programs._fields) == 5
    assert shallow == deep
    compiled = relay_programs.Programs(*(p.compile() for p in programs[400]))
    sizes = {name: sizes_of(program) for name, program in compiled._asdict().items()}
    assert sizes_of(programs[4].backward.compile()) == sizes["backward"]
    print(name, sizes)
    most = max(map(sum, sizes.values()))
    planned = relay_step.estimate(
        dataclasses.replace(MODELS[name], num_layers=400),
        TrainingConfig(batch=8, sequence=2048, micro_batches=8),
        stash="host",
    ).device_total
    # The plan also counts the prefetched block and other boundaries.
    assert most < planned < 16 * GIGA
    assert jax.default_backend() == "cpu"
