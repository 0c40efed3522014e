"""Compiles a tiny model's training step for eight virtual CPU devices, and prints it as JSON.

A script of test_compile.py, because the number of CPU devices is fixed when a process starts.
"""

import dataclasses
import json
import sys

import jax

from sparse_dataflow.compile import programs as compile
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.pipeline.pipelined import executor_over

MODEL = ModelConfig(20, 64, 4, 256, 512, 64)
SPARSE = MODEL.with_linears(LinearSpec("block_sparse", density=1 / 4, block=16))
BATCH, SEQUENCE = 16, 64


def by_kind(collectives):
    """Returns kind -> sums of times, bytes of all arrays, and bytes that a chip sends."""
    totals = {}
    for c in collectives:
        total = totals.setdefault(c.kind, {"times": 0.0, "bytes": 0.0, "moved": 0.0})
        total["times"] += c.times
        total["bytes"] += c.times * c.bytes
        total["moved"] += c.moved
    return totals


def compiled(text):
    """Compiles "mesh/micro-batches/remat/dense or sparse"; an empty mesh is one device."""
    mesh, micro_batches, remat, kind = text.split("/")
    model = dataclasses.replace(SPARSE if kind == "sparse" else MODEL, remat=remat)
    executor = SINGLE_DEVICE
    if mesh:
        devices = meshes.make(meshes.parse(mesh, 8))
        executor = executor_over(devices, 3, model.num_layers, "1f1b")
    training = TrainingConfig(1, BATCH, SEQUENCE, int(micro_batches))
    step = compile.compile_step(model, training, executor, jax.devices()[0], changing=True)
    return {
        "bytes": dataclasses.asdict(step.bytes),
        "allocated": step.allocated,
        "flops": step.flops,
        "collectives": by_kind(step.collectives),
    }


if __name__ == "__main__":
    print(json.dumps({text: compiled(text) for text in sys.argv[1:]}))
