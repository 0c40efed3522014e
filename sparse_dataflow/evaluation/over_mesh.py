"""Scoring over a mesh: the `Forward` that `scoring.score` takes there."""

import dataclasses
import functools

import jax
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.core.model.partition import without_tables
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.evaluation.scoring import PADDING, Forward
from sparse_dataflow.evaluation.trained import Model


def mesh_forward(trained: Model, executor: Sharded) -> Forward:
    """Returns a forward pass sharded over the mesh of `executor`.

    Places have one row for each of the `mesh.batch_shards` batch shards. Sequences and places are
    padded to multiples of the tensor axis.

    Raises:
      UserError: the mesh does not divide the model.
    """
    shards, tensor = meshes.batch_shards(executor.mesh), executor.mesh.shape["tensor"]
    executor.check(
        trained.model, dataclasses.replace(trained.training, batch=shards, micro_batches=1)
    )
    params, rest = without_tables(trained.model, trained.params)
    state = TrainState(np.int32(0), params, (), (), rest)
    state = executor.place(state, trained.model)
    rest = executor.place_layouts(state.rest, trained.model, changing=False)
    program = jax.jit(functools.partial(executor.token_scores, trained.model))

    fill = PADDING if trained.model.bidirectional else 0

    def forward(tokens, places, targets):
        (rows, length), count = tokens.shape, places.shape[1]
        padding = -length % tensor
        padded = np.pad(tokens, ((0, 0), (0, padding)), constant_values=fill)
        # A place counts tokens of the flat batch, so each row before it adds its padding.
        selected = (places + places // length * padding, targets)
        put = (executor.put(np.pad(a, ((0, 0), (0, -count % tensor))), shards) for a in selected)
        outputs = program(state.params, rest, executor.put(Batch(padded), rows), *put)
        return [output[:, :count] for output in outputs]

    return forward
