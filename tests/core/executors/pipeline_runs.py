"""Prints as JSON the gathers, computations and memory of a pipeline on eight virtual devices.

Run as a process by test_pipeline.py, because the number of CPU devices is fixed at start.
"""

import json
import sys

import jax
import jax.numpy as jnp
from executor_runs import BATCH, MODELS, SEQUENCE, executor

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.training.step import abstract_state
from sparse_dataflow.pipeline import action_tables


def gradient_of(runs, model, micro_batches):
    """Returns (params, tokens) -> loss and gradient of a dense model."""
    how = whole.Accumulation(micro_batches)
    return lambda params, tokens: runs.loss_and_gradients(
        model, params, (), Batch.from_windows(tokens), how
    )


def memory(text):
    """Returns the bytes of temporaries of the compiled gradient."""
    model = MODELS["dense_deep"]
    runs, micro_batches = executor(text, model)
    params = abstract_state(model, TrainingConfig(steps=1), runs).params
    tokens = jax.ShapeDtypeStruct((2 * micro_batches, SEQUENCE + 1), jnp.int32)
    gradient = gradient_of(runs, model, micro_batches)
    compiled = jax.jit(gradient).lower(params, tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def gathers(text):
    """Counts all-gathers over "fsdp" inside and outside the loop over the ticks."""
    model = MODELS["dense_deep"]
    runs, micro_batches = executor(text, model)
    params = jax.eval_shape(lambda: gpt.init(model, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((BATCH, SEQUENCE + 1), jnp.int32)
    gradient = gradient_of(runs, model, micro_batches)
    counts = {"inside": 0, "outside": 0}

    def count(jaxpr, where):
        for eqn in jaxpr.eqns:
            counts[where] += (
                eqn.primitive.name == "all_gather" and "fsdp" in eqn.params["axis_name"]
            )
            inner = "inside" if eqn.primitive.name in ("scan", "while") else where
            for each in subjaxprs(eqn.params):
                count(each, inner)

    count(jax.make_jaxpr(gradient)(params, tokens).jaxpr, "outside")
    return counts


def subjaxprs(params):
    for value in params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


def calls(text):
    """Counts the block calls of a step."""
    from experiments.benchmarks.pipeline_bubble import sleeping_step

    stages, micro_batches = map(int, text.split("x"))
    step, slept = sleeping_step(action_tables.make("1f1b", stages, micro_batches))
    step(0)
    return len(slept)


if __name__ == "__main__":
    assert jax.device_count() == 8
    task, *texts = sys.argv[1:]
    run = {"memory": memory, "gathers": gathers, "calls": calls}[task]
    print(json.dumps({text: run(text) for text in texts}))
