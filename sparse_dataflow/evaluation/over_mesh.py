"""Scoring over the devices of a mesh: the forward that `scoring.score` is given there."""

import dataclasses

import jax
import numpy as np

from sparse_dataflow.evaluation.scoring import Forward
from sparse_dataflow.evaluation.trained import Trained
from sparse_dataflow.optim.train_state import TrainState
from sparse_dataflow.parallel import mesh as meshes
from sparse_dataflow.parallel.sharded import Sharded


def forward_over(trained: Trained, executor: Sharded) -> Forward:
    """As `scoring.forward_of`, each device on its part of model and batch.

    Places have one row for each of `mesh.batch_shards`, which divide the rows. Sequences and places
    are filled up to what the mesh divides, with tokens that are not read.

    Raises:
      UserError: the mesh does not divide the model.
    """
    parts, tensor = meshes.batch_shards(executor.mesh), executor.mesh.shape["tensor"]
    executor.check(
        trained.model, dataclasses.replace(trained.training, batch=parts, micro_batches=1)
    )
    state = executor.place(TrainState(np.int32(0), trained.params, (), trained.tables, ()))
    given = executor.tables(trained.tables, changing=False)

    @jax.jit
    def program(params, given, tokens, places):
        tables = given or trained.tables
        return executor.token_scores(trained.model, params, tables, tokens, places)

    def forward(tokens, places):
        length, count = tokens.shape[1] - 1, places.shape[1]
        longer, more = -length % tensor, -count % tensor
        places = places + places // length * longer
        tokens = np.pad(tokens, ((0, 0), (0, longer)))
        places = np.pad(places, ((0, 0), (0, more)))
        batch = executor.put({"tokens": tokens}, len(tokens))
        batch |= executor.put({"places": places}, parts)
        found = program(state.params, given, batch["tokens"], batch["places"])
        return [part[:, :count] for part in found]

    return forward
