"""Training steps are lowered for AMD GPUs, and compiled where jax has its plugin for them."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import rocm_stand_ins
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import sparse_dataflow as sd
from sparse_dataflow.compile.gpu_targets import AMD_TARGETS
from sparse_dataflow.compile.programs import abstract_arguments
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.training.step import jitted_train_step

HERE = pathlib.Path(__file__).parent
ELSEWHERE = ("cudnn", "mosaic", "tpu_custom_call", "xla.gpu.triton", "cublas")
"""Parts of names of calls that only other chips have, or that no AMD GPU was tested with."""


def tracing_for(kind):
    target = AMD_TARGETS[kind]
    device = AbstractDevice(target.device_kind, target.compute_units, "rocm")
    auto = (AxisType.Auto,)
    return jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("device",), axis_types=auto, abstract_device=device)
    )


@pytest.mark.parametrize("kind", AMD_TARGETS)
@pytest.mark.parametrize("pattern", ["monarch", "random"])
def test_a_training_step_is_lowered_for_an_amd_gpu(kind, pattern):
    model = ModelConfig(
        num_layers=2, d_model=128, num_heads=2, d_ff=256, vocab_size=64, max_len=64,
        compute_dtype="bfloat16", activation="gelu", norm="rmsnorm",
    ).with_linears(LinearSpec("block_sparse", pattern, 1 / 4, 32))  # fmt: skip
    training = TrainingConfig(steps=1, batch=2, sequence=32)
    arguments, _ = abstract_arguments(SINGLE_DEVICE, model, training, pattern == "random")
    step = jitted_train_step(model, training, SINGLE_DEVICE, arguments[0])
    with tracing_for(kind):
        assert dispatch.platform() == "gpu"
        text = step.trace(*arguments).lower(lowering_platforms=("rocm",)).as_text()
    assert "dot_general" in text and not [name for name in ELSEWHERE if name in text]


@pytest.mark.parametrize("evolving", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [16, 32, 128])
def test_a_layer_is_exported_for_an_amd_gpu(block, dtype, evolving):
    layer = sd.BlockSparseLinear(
        256, 512, density=0.5, block=block, evolving=evolving, rngs=nnx.Rngs(0)
    )
    x = jax.ShapeDtypeStruct((4, 256), jnp.dtype(dtype))
    graph, state = nnx.split(layer)

    def gradient(state, x):
        return jax.grad(lambda x: nnx.merge(graph, state)(x).astype(jnp.float32).sum())(x)

    with tracing_for("mi300x"):
        program = jax.export.export(jax.jit(gradient), platforms=["rocm"])(state, x)
    assert program.platforms == ("rocm",)
    assert not [name for name in ELSEWHERE if name in program.mlir_module()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", AMD_TARGETS)
def test_a_training_step_compiles_for_an_amd_gpu_that_is_not_there(kind, tmp_path):
    library = rocm_stand_ins.plugin()
    if library is None:
        pytest.skip("compiling for this chip needs make aot-rocm")
    rocm_stand_ins.build(library, tmp_path)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "LD_LIBRARY_PATH": str(tmp_path),
        "PJRT_NAMES_AND_LIBRARY_PATHS": f"rocm:{library}",
        "PYTHONPATH": str(HERE.parents[1]),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
    }
    command = [sys.executable, HERE / "rocm_step.py", kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for step in json.loads(done.stdout.splitlines()[-1]).values():
        assert step["products"] >= 12 and step["bytes"] > 0
        assert not any(name in call for call in step["calls"] for name in ELSEWHERE)
