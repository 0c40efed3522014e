"""Prints as JSON what compiling a tiny model's step for eight virtual CPU devices finds.

Run by test_compile.py, as a process decides at its start how many CPU devices it has.
"""

import dataclasses
import json
import sys

import jax

from sparse_dataflow.aot import compile, hlo
from sparse_dataflow.config.model import LinearSpec, ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.parallel import mesh as meshes
from sparse_dataflow.parallel.executor import ONE_DEVICE
from sparse_dataflow.parallel.pipeline.pipelined import executor_over

MODEL = ModelConfig(20, 64, 4, 256, 512, 64)
SPARSE = MODEL.with_linears(LinearSpec("block_sparse", density=1 / 4, block=16))
BATCH, SEQUENCE = 16, 64


def found(text):
    """Of "mesh/micro-batches/remat/dense or sparse"; an empty mesh is one device."""
    mesh, micro_batches, remat, kind = text.split("/")
    model = dataclasses.replace(SPARSE if kind == "sparse" else MODEL, remat=remat)
    executor = ONE_DEVICE
    if mesh:
        made = meshes.make(meshes.parse(mesh, 8))
        executor = executor_over(made, 3, model.num_layers, "1f1b")
    training = TrainingConfig(1, BATCH, SEQUENCE, int(micro_batches))
    step = compile.compile_step(model, training, executor, jax.devices()[0], changing=True)
    return {
        "bytes": dataclasses.asdict(step.bytes),
        "allocated": step.allocated,
        "flops": step.flops,
        "collectives": hlo.by_kind(step.collectives),
    }


if __name__ == "__main__":
    print(json.dumps({text: found(text) for text in sys.argv[1:]}))
