"""Runs of a small model from the examples of the table, and their abstract training steps."""

import dataclasses
import itertools
import json
import random
import sys
import time

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from sparse_dataflow.commands import devices
from sparse_dataflow.commands.library import preset
from sparse_dataflow.compile import programs
from sparse_dataflow.core.config.layer_groups import layer_models
from sparse_dataflow.core.executors.compatibility import PARALLELISMS
from sparse_dataflow.core.training.step import jitted_train_step
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.relay import relay_programs
from sparse_dataflow.relay.relay_executor import RelayExecutor
from sparse_dataflow.runs.compatibility import TABLE
from sparse_dataflow.runs.variants import variants

BASE = preset("pico").change(sparsity__block=16, run__twin="no", training__steps=20)
OPTIONS = [
    option
    for option in {id(o): o for row in TABLE for o in (row.option, *row.others)}.values()
    if option not in PARALLELISMS and not option.needed
]


def merged(*examples):
    """Returns the settings of several examples; axes of a mesh are joined."""
    settings, axes = {}, {}
    for example in examples:
        settings |= example
        for axis in filter(None, example.get("parallel.mesh", "").split(",")):
            axes[axis.partition(":")[0]] = axis
    return settings | ({"parallel.mesh": ",".join(axes.values())} if axes else {})


def accepted(settings):
    """Returns (executor, models) of a run; a UserError if the table or a size refuses it."""
    config = BASE.change(**{path.replace(".", "__"): value for path, value in settings.items()})
    relayed = config.parallel.executor == "relay" and config.parallel.mesh != "auto"
    executor, models = devices.executor(config, 2 if relayed else 0), variants(config)
    devices.check(executor, config, models)
    return executor, models


def trace_step(executor, model, training, changing):
    """Traces a training step on the first devices of this process, without arrays."""
    shape, width = (training.batch, training.sequence), model.d_model
    if isinstance(executor, RelayExecutor):
        rows = training.micro_batches, shape[0] // training.micro_batches, shape[1]
        for layer in layer_models(model):
            layer = dataclasses.replace(layer, num_layers=1, shared_layers=False)
            arguments = relay_programs.arguments(layer, rows)
            for function, structs in zip(relay_programs.functions(layer), arguments, strict=True):
                jax.eval_shape(function, *structs)
        return
    mesh = getattr(executor, "mesh", None)
    if isinstance(mesh, AbstractMesh):
        chosen = np.array(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes)
        executor = dataclasses.replace(executor, mesh=Mesh(chosen, mesh.axis_names))
    arguments, _ = programs.abstract_arguments(executor, model, training, changing)
    limit = [jax.ShapeDtypeStruct((), "float32")] * bool(training.skip_spikes)
    state, rest, batch, rate = arguments
    if training.teacher:
        shapes = (*shape, width), (model.vocab_size, width), ()
        hidden, *teacher = (jax.ShapeDtypeStruct(each, "float32") for each in shapes)
        batch = dataclasses.replace(batch, teacher_hidden=hidden, teacher=tuple(teacher))
    step = jitted_train_step(model, training, executor, state)
    jax.eval_shape(step, state, rest, batch, rate, *limit)


def draw_run(draw, parallelism):
    """Returns settings with a parallelism and drawn options that go together, and the refusals."""
    settings, refusals = parallelism.example, []
    for option in draw.sample(OPTIONS, 10):
        more = merged(settings, option.example)
        if more.get("parallel.mesh", "").count(":") > 3:
            continue  # There are eight devices.
        try:
            accepted(more)
            settings = more
        except UserError as error:
            refusals.append(str(error))
    return settings, refusals


def main(seed: str, seconds: str) -> None:
    """Prints [settings of traced steps, refusals, failures] of runs drawn for some seconds.

    Each parallelism is drawn at least once.
    """
    draw, stop = random.Random(int(seed)), time.monotonic() + float(seconds)
    traced, refused, failed = [], [], []
    for number, parallelism in enumerate(itertools.cycle(PARALLELISMS)):
        if number >= len(PARALLELISMS) and time.monotonic() > stop:
            break
        settings, refusals = draw_run(draw, parallelism)
        refused += refusals
        executor, models = accepted(settings)
        try:
            for model in models:
                for phase in model.phase_specs:
                    trace_step(executor, phase.model, model.training, phase.runtime_layouts)
            traced.append(settings)
        except Exception as error:
            failed.append([settings, f"{type(error).__name__}: {error}"[:500]])
    print(json.dumps([traced, refused, failed]))


if __name__ == "__main__":
    main(*sys.argv[1:])
