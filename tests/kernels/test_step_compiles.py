"""GPT-13B's sparse training step passes the compilers for a TPU and an H200, without either.

Layers are scanned: a deeper model is the same program.
"""

import dataclasses

import described_h200
import described_tpus
import jax
import jax.numpy as jnp
import pytest

from sparse_dataflow.models.sizes import PROJECTIONS, SIZES, LinearSpec
from sparse_dataflow.training.optimizer import TrainingConfig
from sparse_dataflow.training.step import initial_state, make_train_step

pytestmark = pytest.mark.slow


def step_and_arguments(layers):
    """(function, its arguments' shapes), all projections at 1/8 in blocks of 128."""
    spec = LinearSpec("block_sparse", "monarch", 1 / 8, 128)
    model = dataclasses.replace(
        SIZES["13b"],
        num_layers=layers,
        linears={projection: spec for projection in PROJECTIONS},
        remat="full",
        compute_dtype="bfloat16",
    )
    training = TrainingConfig(steps=1, batch=1, sequence=2048)
    state = jax.eval_shape(lambda: initial_state(model, training))
    tokens = jax.ShapeDtypeStruct((1, training.sequence + 1), jnp.int32)
    return make_train_step(model, training), (state, tokens, jax.ShapeDtypeStruct((), jnp.float32))


def compiled_for_h200(function, arguments):
    pytest.importorskip("jax_cuda13_plugin", reason="compiling for a GPU needs make aot-gpu")
    return described_h200.compiled(function, arguments, donated=0)


def compiled_for_v5p(function, arguments):
    pytest.importorskip("libtpu", reason="compiling for a TPU needs make aot-tpu")
    device = described_tpus.described("v5p")[0]
    return described_tpus.compiled(function, arguments, device, donated=0)


CHIPS = {
    "h200": (compiled_for_h200, 141e9, 'custom_call_target="mosaic_gpu'),
    "v5p": (compiled_for_v5p, 95e9, 'custom_call_target="tpu_custom_call"'),
}


@pytest.mark.parametrize("chip", CHIPS)
def test_forty_layers_are_the_program_of_four_and_fit_one_chip(chip):
    compile_, memory_bytes, kernel = CHIPS[chip]
    lengths, kernels = [], []
    for layers in (4, 40):
        program = compile_(*step_and_arguments(layers))
        text = program.as_text()
        lengths.append(text.count("\n"))
        kernels.append(text.count(kernel))
    # Some way to add a bias or to copy may pay only for more layers.
    assert lengths[1] <= 1.1 * lengths[0]
    assert kernels[0] == kernels[1] >= 12
    used = program.memory_analysis()
    assert used.argument_size_in_bytes + used.temp_size_in_bytes <= memory_bytes
