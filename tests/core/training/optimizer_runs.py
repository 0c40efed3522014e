"""Trains pico over a mesh of eight devices, and once more from a checkpoint halfway.

    python optimizer_runs.py OPTIMIZER VARIANT FOLDER

Prints {"losses": of each step, "bits": whether the resumed state has the same bits, "share": of the
optimizer's state that a device holds, "error": of the losses against one device}.
"""

import json
import math
import pathlib
import sys

import jax
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.core.executors import mesh
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.training.saved_state import SavedState
from sparse_dataflow.core.training.step import abstract_state, initial_state, jitted_train_step
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variants

STEPS = 4


def main(optimizer, name, folder):
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    config = preset("pico").change(
        training__optimizer=optimizer,
        training__steps=STEPS,
        training__batch=8,
        training__sequence=16,
        sparsity__block=16,
    )
    [variant] = [v for v in variants(config, 250) if v.name == name]
    model, training = variant.model, variant.training
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 250, (STEPS, 8, 17)).astype(np.int32)
    tables = stacks.stored_layouts(model)
    checkpoints = Checkpoints(pathlib.Path(folder), config={})

    def run(executor, save=False):
        shapes = executor.placed_shapes(abstract_state(model, training, executor), model)
        program = jitted_train_step(model, training, executor, shapes)
        rest, losses = executor.place_layouts(tables, model, changing=False), []

        def steps(state, numbers):
            for number in numbers:
                batch = executor.put(Batch.from_windows(windows[number]), 8)
                state, report = program(state._replace(rest=()), rest, batch, np.float32(1e-3))
                losses.append(float(report.loss))
            return state

        state = steps(initial_state(model, training, executor), range(2))
        if save:
            saved = executor.canonical(state._replace(rest=tables), model)
            checkpoints.save(2, SavedState.of(saved), {})
            checkpoints.wait()
        state = steps(state, range(2, STEPS))
        if not save:
            return losses, state
        template = SavedState.of(abstract_state(model, training, executor)._replace(rest=tables))
        restored, _ = checkpoints.restore(template)
        again = steps(executor.place(restored.state(model), model), range(2, STEPS))
        pairs = zip(jax.tree.leaves(bare(state)), jax.tree.leaves(bare(again)), strict=True)
        return losses[:STEPS], state, all(np.array_equal(a, b) for a, b in pairs)

    # An axis "tensor" may cut the groups that Muon orthogonalises: they are then those of a device.
    axes = "fsdp:8" if optimizer == "muon" else "fsdp:4,tensor:2"
    losses, state, bits = run(Sharded(mesh.make(mesh.parse(axes, 8)), 3), save=True)
    right, _ = run(SINGLE_DEVICE)
    arrays = jax.tree.leaves(state.moments)
    on_device = sum(math.prod(a.sharding.shard_shape(a.shape)) for a in arrays)
    return {
        "losses": losses,
        "bits": bits,
        "share": on_device / sum(a.size for a in arrays),
        "error": max(abs(a - b) for a, b in zip(losses, right, strict=True)),
    }


def bare(state):
    return jax.device_get((state.params, state.moments, state.step))


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
