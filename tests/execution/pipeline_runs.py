"""Prints as JSON how a pipeline on eight virtual devices compares with one device.

Run by test_pipeline.py, as a process decides at its start how many CPU devices it has.
"""

import dataclasses
import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from test_whole import DENSE, MODEL

from sparse_dataflow.execution import mesh as meshes
from sparse_dataflow.execution import schedules
from sparse_dataflow.execution.executor import ONE_DEVICE
from sparse_dataflow.execution.pipelined import Pipelined
from sparse_dataflow.execution.stages import divide
from sparse_dataflow.models import gpt
from sparse_dataflow.training.optimizer import TrainingConfig
from sparse_dataflow.training.step import initial_state, make_train_step

STEPS, SEQUENCE = 3, 8
MODELS = {"dense": DENSE, "mixed": MODEL}


def executor(axes, layers, schedule="1f1b", chunks=1, division=(), zero=3):
    sizes = {axis: axes.get(axis, 1) for axis in meshes.AXES}
    count = int(np.prod(list(sizes.values())))
    mesh = meshes.make(sizes, jax.devices()[:count])
    parts = divide(layers, sizes["stage"], chunks, tuple(division))
    return Pipelined(mesh, zero, division=parts, schedule=schedule)


def states(model, training, runs):
    """(canonical state, losses, an evaluation) after a few steps on random tokens."""
    rng = np.random.default_rng(0)
    state = initial_state(model, training, runs)
    canonical = state.tables
    given = runs.tables(canonical, changing=True)
    shapes = jax.eval_shape(lambda: state._replace(tables=()))
    placed = runs.shardings(shapes)
    step = jax.jit(
        make_train_step(model, training, None, runs),
        out_shardings=placed and (placed._replace(tables=None), None),
    )
    losses = []
    shape = (training.batch, SEQUENCE + 1)
    for _ in range(STEPS):
        tokens = rng.integers(0, model.vocab_size, shape, np.int32)
        tokens = runs.put({"tokens": tokens}, len(tokens))["tokens"]
        state, report = step(state._replace(tables=given), tokens, np.float32(1e-3))
        losses.append(float(report.loss))
    weights = np.zeros((training.batch, SEQUENCE), np.float32)
    weights[:-1, 2:] = 0.5
    batch = runs.put({"tokens": np.asarray(tokens), "weights": weights}, len(tokens))
    evaluate = jax.jit(lambda p, t, x, w: runs.loss(model, p, t, x, w))
    losses.append(float(evaluate(state.params, given, batch["tokens"], batch["weights"])))
    return runs.canonical(state._replace(tables=canonical)), losses


def compare(case):
    """Largest relative errors after some steps: of the losses, and of Adam's first moments.

    Parameters would not do: Adam makes steps of full length from the rounding errors where a
    gradient is zero, as that of a key's bias is.
    """
    case = dict(case)
    name, layers, remat = case.pop("model"), case.pop("layers"), case.pop("remat", "none")
    micro_batches, axes = case.pop("micro_batches"), case.pop("axes")
    batch = case.pop("batch", 8)
    start = time.perf_counter()
    model = model_of(name, layers, remat)
    training = TrainingConfig(10, batch, SEQUENCE, micro_batches)
    found, losses = states(model, training, executor(axes, layers, **case))
    right, right_losses = on_one_device(name, layers, batch)
    first = lambda state: [part.mu for part in state.moments if hasattr(part, "mu")]  # noqa: E731
    return {
        "loss": max(abs(a - b) / b for a, b in zip(losses, right_losses)),
        "error": max(jax.tree.leaves(jax.tree.map(error, first(found), first(right)))),
        "seconds": time.perf_counter() - start,
    }


def model_of(name, layers, remat="none"):
    return dataclasses.replace(MODELS[name], num_layers=layers, remat=remat, max_len=SEQUENCE)


@functools.cache
def on_one_device(name, layers, batch):
    return states(model_of(name, layers), TrainingConfig(10, batch, SEQUENCE), ONE_DEVICE)


def error(mine, other):
    mine, other = np.asarray(mine), np.asarray(other)
    return float(np.abs(mine - other).max() / np.abs(other).max())


def norms(case):
    """Error of the norms of the dense gradient's blocks."""
    model = model_of("mixed", 3)
    training = TrainingConfig(10, 4, SEQUENCE)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (4, SEQUENCE + 1), np.int32)
    found = []
    for runs in (executor(case["axes"], 3), ONE_DEVICE):
        state = initial_state(model, training, runs)
        tables = runs.tables(state.tables, changing=True)
        rows = runs.put({"tokens": tokens}, 4)["tokens"]
        program = jax.jit(lambda p, t, x, runs=runs: runs.block_gradient_norms(model, p, t, x))
        found.append(program(state.params, tables, rows))
    return {"error": max(jax.tree.leaves(jax.tree.map(error, *found)))}


def memory(case):
    """Bytes of temporaries that the compiled gradient takes, for each number of micro-batches."""
    model = model_of("dense", 4)
    runs = executor({"stage": 4}, 4, case["schedule"])
    params = runs.placed_shapes(jax.eval_shape(lambda: gpt.init(model, jax.random.key(0))))
    sizes = []
    for micro_batches in case["micro_batches"]:
        tokens = jax.ShapeDtypeStruct((2 * micro_batches, SEQUENCE + 1), jnp.int32)
        gradient = jax.jit(
            lambda p, x, m=micro_batches: runs.loss_and_gradients(model, p, {}, x, m)
        )
        compiled = gradient.lower(params, tokens).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    return {"sizes": sizes}


def gathers(case):
    """How often arrays are gathered over "fsdp", in the loop over the ticks and outside of it."""
    model = model_of("dense", 4)
    runs = executor({"stage": 2, "fsdp": 2}, 4)
    params = jax.eval_shape(lambda: gpt.init(model, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((8, SEQUENCE + 1), jnp.int32)
    gradient = lambda p, x: runs.loss_and_gradients(model, p, {}, x, 4)  # noqa: E731
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


def calls(case):
    """How often blocks were called in a step, in which nothing takes time."""
    from experiments.pipeline_bubble import sleeping_step

    step, slept = sleeping_step(schedules.make("1f1b", case["stages"], case["micro_batches"]), 0)
    step()
    return {"calls": len(slept)}


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    assert jax.device_count() == 8
    kinds = {"compare": compare, "norms": norms, "memory": memory}
    kinds |= {"calls": calls, "gathers": gathers}
    for case in json.loads(sys.argv[1]):
        print(json.dumps(kinds[case.pop("kind", "compare")](case)), flush=True)
