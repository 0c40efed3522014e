"""GPT-13B's sparse training step compiles ahead of time for a TPU and an H200.

Layers are scanned, so a deeper model has the same program.
"""

import dataclasses
import importlib.util

import pytest

from sparse_dataflow.compile import topologies
from sparse_dataflow.compile.programs import compile_step
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.runs.run_config import SIZES

pytestmark = pytest.mark.usefixtures("optimized")

# Topology -> (module of its compiler, command that installs it, kernel call in the program's text).
CHIPS = {
    "h200:1": ("jax_cuda13_plugin", "make aot-gpu", 'custom_call_target="mosaic_gpu'),
    "v5p:1x1x1": ("libtpu", "make aot-tpu", 'custom_call_target="tpu_custom_call"'),
}


def compiled(layers, topology):
    """Compile a training step of one sequence, all projections at 1/8 in blocks of 128."""
    model = dataclasses.replace(
        SIZES["13b"], num_layers=layers, remat="full", compute_dtype="bfloat16"
    ).with_linears(LinearSpec("block_sparse", "monarch", 1 / 8, 128))
    training = TrainingConfig(steps=1, batch=1, sequence=2048)
    device = topologies.devices(topology)[0]
    return compile_step(model, training, SINGLE_DEVICE, device, changing=True)


@pytest.mark.parametrize("chip", CHIPS)
def test_forty_layers_are_the_program_of_four_and_fit_one_chip(chip):
    module, command, kernel = CHIPS[chip]
    if not importlib.util.find_spec(module):
        pytest.skip(f"compiling for this chip needs {command}")
    topology = topologies.parse(chip)
    lengths, kernels = [], []
    for layers in (4, 40):
        step = compiled(layers, topology)
        text = step.program.as_text()
        lengths.append(text.count("\n"))
        kernels.append(text.count(kernel))
    # The compiler may add biases or copies differently for more layers.
    assert lengths[1] <= 1.1 * lengths[0]
    assert kernels[0] == kernels[1] >= 12
    assert step.bytes.total <= topology.chip.memory_bytes
    assert min(dataclasses.astuple(step.bytes)) >= 0
    assert step.collectives == ()
