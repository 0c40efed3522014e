"""A model over a mesh: the `Forward` that `scoring.score` takes, and the cuts that generate."""

import dataclasses
import functools
import math

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors import sharding
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.core.executors.state_roles import dotted_path
from sparse_dataflow.core.model.partition import trained_and_rest
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.weights.kind import LAYOUT
from sparse_dataflow.evaluation.scoring import PADDING, Forward
from sparse_dataflow.evaluation.trained import Model

CUTS = ("feature", "tensor")
"""Mesh axes that cut a product.  Of the others "fsdp" would gather each weight at every token."""


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
    params, rest = trained_and_rest(trained.model, trained.params)
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


def legal_cuts(mesh: str) -> dict[str, int]:
    """Returns the size of each axis of a mesh of all devices.

    Raises:
      UserError: the mesh is not legal here.
    """
    return meshes.parse(mesh, jax.device_count(), CUTS)


def on_mesh(model: Model, mesh: str) -> Model:
    """Returns a model whose weights are cut over devices as a training with that mesh cuts them.

    What takes it runs on all of the devices: XLA cuts its programs by the weights, and kernels of
    one device do not run.  What an axis does not divide is whole on each device.

    Args:
      model: on one device or on the host, see `sd.load`.
      mesh: such as "tensor:2"; axes are CUTS, and their product is the number of devices.

    Raises:
      UserError: the mesh is not legal here.
    """
    sizes = legal_cuts(mesh)
    devices = meshes.make(sizes)

    def placed(path, leaf):
        name = dotted_path(path)
        # Each device reads its part of the stored blocks by the tables of the whole layout.
        whole = LAYOUT in name.split(".")
        spec = P() if whole else sharding.spec(model.model, name, leaf.shape, devices)
        shards = [math.prod(sizes[axis] for axis in sharding.entry_axes(entry)) for entry in spec]
        divided = [size % count == 0 for size, count in zip(leaf.shape, shards, strict=False)]
        entries = [entry if fits else None for entry, fits in zip(spec, divided, strict=True)]
        return jax.device_put(leaf, NamedSharding(devices, P(*entries)))

    return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(placed, model.params))
