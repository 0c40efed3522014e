"""Scoring over the devices of a mesh: the forward that `scoring.score` is given there."""

import dataclasses

import jax
import numpy as np

from sparse_dataflow.evaluation.scoring import Forward
from sparse_dataflow.evaluation.trained import Trained
from sparse_dataflow.execution import mesh as meshes
from sparse_dataflow.execution.sharded import Sharded
from sparse_dataflow.training.step import TrainState


def forward_over(trained: Trained, executor: Sharded) -> Forward:
    """As `scoring.forward_of`, each device on its part of model and batch.

    Batches are filled up to what the mesh divides, with rows and tokens that are not read.

    Raises:
      UserError: the mesh does not divide the model.
    """
    parts, tensor = meshes.batch_parts(executor.mesh), executor.mesh.shape["tensor"]
    executor.check(
        trained.model, dataclasses.replace(trained.training, batch=parts, micro_batches=1)
    )
    state = executor.place(TrainState(np.int32(0), trained.params, (), trained.tables, ()))
    given = executor.tables(trained.tables, changing=False)

    @jax.jit
    def program(params, given, tokens):
        tables = given or trained.tables
        return executor.token_scores(trained.model, params, tables, tokens)

    def forward(tokens):
        rows, length = tokens.shape[0], tokens.shape[1] - 1
        shape = -(-rows // parts) * parts, -(-length // tensor) * tensor + 1
        padded = np.zeros(shape, np.int32)
        padded[:rows, : length + 1] = tokens
        batch = executor.put({"tokens": padded}, len(padded))["tokens"]
        return [found[:rows, :length] for found in program(state.params, given, batch)]

    return forward
