"""Prints as JSON how a Llama with two key/value heads scores and decodes over eight devices.

python mesh_decoding.py MESH ...

Maps each mesh to the largest error of the scores, relative to the largest score, to whether
`generate` continues with the tokens of one device, and to why a mixture over the mesh leaves no
experts in host memory.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
from decoded import BYTES, CONFIGS
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_models import arbitrary_params, tables_of

from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.evaluation.generate import generate
from sparse_dataflow.evaluation.offloaded_experts import OffloadedExperts
from sparse_dataflow.evaluation.over_mesh import mesh_forward
from sparse_dataflow.evaluation.scoring import batch_limits, score, single_device_forward
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError

CONTEXT = 24
PROMPTS = ([72], [7, 8, 9], list(range(11)))


def random_model(**mixture):
    """A Llama of 4 heads, 2 of them for keys and values, whose next tokens are certain."""
    config = dataclasses.replace(
        CONFIGS["llama"], vocab_size=BYTES.vocab_size, max_len=CONTEXT, **mixture
    )
    params, tables = arbitrary_params(config, scale=1), tables_of(config)
    training = TrainingConfig(steps=1, batch=4, sequence=CONTEXT)
    return Model(Path(), "sparse", config, merged(params, tables), BYTES, 0, training, None, {})


def sharded(model, mesh):
    """The model with each array cut over the tensor axis in a dimension that it divides."""

    def place(leaf):
        cut = next((i for i, n in enumerate(leaf.shape) if n % mesh.shape["tensor"] == 0), None)
        spec = P() if cut is None else P(*[None] * cut, "tensor")
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, model)


def greedy(model):
    return [c.tokens for c in generate(model, PROMPTS, max_new_tokens=8)]


def offloading_refusal(model):
    try:
        OffloadedExperts(model, 2)
    except UserError as error:
        return str(error)


if __name__ == "__main__":
    model = random_model()
    rng = np.random.default_rng(1)
    draw = lambda size: rng.integers(BYTES.vocab_size, size=size)  # noqa: E731
    requests = [(draw(1 + i % 12), draw(1 + i % 9)) for i in range(20)]
    expected, _ = score(single_device_forward(model), batch_limits(model), requests)
    values = np.array([value for value, _ in expected])
    results = {}
    for text in sys.argv[1:]:
        executor = Sharded(meshes.make(meshes.parse(text, jax.device_count())))
        limits = batch_limits(model, meshes.batch_shards(executor.mesh))
        scores, _ = score(mesh_forward(model, executor), limits, requests)
        error = np.abs(np.array([value for value, _ in scores]) - values).max()
        same = greedy(sharded(model, executor.mesh)) == greedy(model)
        reason = offloading_refusal(sharded(random_model(experts=4), executor.mesh))
        results[text] = [float(error / np.abs(values).max()), same, reason]
    print(json.dumps(results))
