"""Advances a parameter server without a device; as a process, kills itself at a chosen moment.

    python server_process.py FOLDER STEPS WHERE N

WHERE is "update" (in the N-th piece of an update, half of it written), "never", or a regular
expression of a path: the N-th file operation on it.
"""

import dataclasses
import os
import re
import signal
import sys

import jax
import numpy as np
from small_models import DENSE, QUARTER

from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.model import partition, stacks
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.relay import host_optimizer, host_state
from sparse_dataflow.relay.parameter_server import ParameterServer, ServerStep
from sparse_dataflow.relay.server_files import MappedFiles
from sparse_dataflow.relay.timeline import Timeline

MODEL = dataclasses.replace(DENSE, num_layers=3).with_linears(QUARTER)
TRAINING = TrainingConfig(steps=8, batch=4, sequence=11, clip=0.7)
IDENTITY = {"model": MODEL.to_json()}


def first_state(params, mu, nu, model=MODEL, training=TRAINING):
    """Returns a state with random params."""
    rng = np.random.default_rng(0)
    for leaf in jax.tree.leaves(params):
        leaf[...] = rng.normal(size=leaf.shape)
    shapes = host_state.abstract_state(model, training)
    moments = host_state.with_moments(shapes.moments, 0, mu, nu)
    masks, layouts = stacks.split_layouts(shapes.rest)
    masks = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), masks)
    rest = partition.merged(masks, layouts)
    return TrainState(np.zeros((), np.int32), params, moments, key(), rest)


def key():
    return host_state.training_key(TRAINING)


def open_files(folder, model=MODEL, training=TRAINING):
    return MappedFiles(folder, host_state.abstract_state(model, training), IDENTITY)


def advance(state, storage, steps, clipping="exact", model=MODEL, training=TRAINING):
    """Returns the state after `steps` steps with random gradients.

    The layouts do not change, so a step has the tables of `RelayExecutor.tables`.
    """
    server = ParameterServer(model, training, None, clipping=clipping)
    server.storage = storage
    sections = host_state.all_sections(model.num_layers)
    tables = state.rest
    while state.step < steps:
        runtime = state._replace(rest=stacks.with_groups(tables))
        step = ServerStep(server, runtime, sections, 1e-2, Timeline())
        for number, section in enumerate(sections):
            rng = np.random.default_rng([int(state.step), number])
            views = host_state.view(state.params, section)
            draw = lambda leaf, rng=rng: jax.numpy.asarray(  # noqa: E731
                rng.normal(size=leaf.shape).astype(np.float32)
            )
            step.push(section, jax.tree.map(draw, views))
        state, _ = step.finish()
    return state._replace(rest=tables)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_update(count):
    whole = host_optimizer.update
    left = [count]

    def update(before, gradient, rates, after, copy=None):
        left[0] -= 1
        if left[0] == 0:
            after.parameter[: gradient.size // 2] = np.nan
            die()
        whole(before, gradient, rates, after, copy)

    host_optimizer.update = update


def kill_at_files(pattern, count):
    left = [count]

    def watch(event, arguments):
        if event in ("open", "os.rename") and any(
            isinstance(a, str | os.PathLike) and re.search(pattern, str(a)) for a in arguments
        ):
            left[0] -= 1
            if left[0] == 0:
                die()

    sys.addaudithook(watch)


if __name__ == "__main__":
    folder, steps, where, count = sys.argv[1:]
    files = open_files(folder)
    state = files.restore(key()) or files.new_state(first_state)
    print(int(state.step), flush=True)
    if where == "update":
        kill_in_update(int(count))
    elif where != "never":
        kill_at_files(where, int(count))
    advance(state, files, int(steps))
