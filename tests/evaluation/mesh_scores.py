"""Prints as JSON how far a model's scores over meshes of eight devices are from those of one.

python mesh_scores.py RUN_FOLDER MESH ...
"""

import dataclasses
import functools
import json
import sys

import jax
import numpy as np

from sparse_dataflow.evaluation.over_mesh import forward_over
from sparse_dataflow.evaluation.scoring import forward_of, limits_of, score
from sparse_dataflow.evaluation.trained import load
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.parallel import mesh as meshes
from sparse_dataflow.parallel.sharded import Sharded

if __name__ == "__main__":
    run, *texts = sys.argv[1:]
    rng = np.random.default_rng(0)
    found = {}
    for variant in ("sparse", "dense"):
        trained = load(run, variant)
        # The folder's models are fresh ones with their step added to every weight.
        params = jax.tree.map(lambda leaf, step=trained.step: leaf - step, trained.params)
        trained = dataclasses.replace(trained, params=params)
        draw = functools.partial(rng.integers, trained.tokenizer.vocab_size)
        requests = [(draw(size=1 + i % 20), draw(size=1 + i % 11)) for i in range(30)]
        expected, _ = score(forward_of(trained), limits_of(trained), requests)
        for text in texts:
            executor = Sharded(meshes.make(meshes.parse(text, jax.device_count())))
            limits = limits_of(trained, meshes.batch_shards(executor.mesh))
            try:
                scores, _ = score(forward_over(trained, executor), limits, requests)
            except UserError as error:
                found[f"{variant} {text}"] = str(error)
                continue
            (mine, greedy), (alone, as_alone) = zip(*scores), zip(*expected)
            error = np.abs(np.subtract(mine, alone)).max() / np.abs(alone).max()
            found[f"{variant} {text}"] = [
                float(error),
                sum(np.not_equal(greedy, as_alone).tolist()),
            ]
    print(json.dumps(found))
