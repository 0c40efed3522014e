"""Prints as JSON what a pipeline on eight virtual devices gathers, computes and takes.

Run by test_pipeline.py, as a process decides at its start how many CPU devices it has.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from mesh_training import BATCH, MODELS, SEQUENCE, error, executor

from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.models import gpt
from sparse_dataflow.parallel.executor import ONE_DEVICE
from sparse_dataflow.parallel.pipeline import schedules
from sparse_dataflow.training.step import initial_state


def norms(text):
    """Error of the norms of the dense gradient's blocks."""
    model = MODELS["sparse_deep"]
    training = TrainingConfig(10, BATCH, SEQUENCE)
    shape = (BATCH, SEQUENCE + 1)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, shape, np.int32)
    found = []
    for runs in (executor(text, model)[0], ONE_DEVICE):
        state = initial_state(model, training, runs)
        tables = runs.tables(state.tables, changing=True)
        rows = runs.put({"tokens": tokens}, BATCH)["tokens"]
        program = jax.jit(lambda p, t, x, runs=runs: runs.block_gradient_norms(model, p, t, x))
        found.append(jax.device_get(program(state.params, tables, rows)))
    return error(*found)


def memory(text):
    """Bytes of temporaries that the compiled gradient takes."""
    model = MODELS["dense_deep"]
    runs, micro_batches = executor(text, model)
    params = runs.placed_shapes(jax.eval_shape(lambda: gpt.init(model, jax.random.key(0))))
    tokens = jax.ShapeDtypeStruct((2 * micro_batches, SEQUENCE + 1), jnp.int32)
    gradient = lambda p, x: runs.loss_and_gradients(model, p, {}, x, micro_batches)  # noqa: E731
    compiled = jax.jit(gradient).lower(params, tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def gathers(text):
    """How often arrays are gathered over "fsdp", in the loop over the ticks and outside of it."""
    model = MODELS["dense_deep"]
    runs, micro_batches = executor(text, model)
    params = jax.eval_shape(lambda: gpt.init(model, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((BATCH, SEQUENCE + 1), jnp.int32)
    gradient = lambda p, x: runs.loss_and_gradients(model, p, {}, x, micro_batches)  # noqa: E731
    found = {"inside": 0, "outside": 0}

    def count(jaxpr, where):
        for eqn in jaxpr.eqns:
            found[where] += eqn.primitive.name == "all_gather" and "fsdp" in eqn.params["axis_name"]
            inner = "inside" if eqn.primitive.name in ("scan", "while") else where
            for each in subjaxprs(eqn.params):
                count(each, inner)

    count(jax.make_jaxpr(gradient)(params, tokens).jaxpr, "outside")
    return found


def subjaxprs(params):
    for value in params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


def calls(text):
    """How often blocks were called in a step, in which nothing takes time."""
    from sparse_dataflow.runs.benchmarks.pipeline_bubble import sleeping_step

    stages, micro_batches = map(int, text.split("x"))
    step, slept = sleeping_step(schedules.make("1f1b", stages, micro_batches))
    step(0)
    return len(slept)


if __name__ == "__main__":
    assert jax.device_count() == 8
    what, *texts = sys.argv[1:]
    found = {"norms": norms, "memory": memory, "gathers": gathers, "calls": calls}[what]
    print(json.dumps({text: found(text) for text in texts}))
