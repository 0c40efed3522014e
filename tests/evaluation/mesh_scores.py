"""Prints as JSON how far a model's scores over meshes of eight devices are from those of one.

python mesh_scores.py RUN_FOLDER MESH ...
"""

import dataclasses
import json
import sys

import jax
import numpy as np

from sparse_dataflow.errors import UserError
from sparse_dataflow.evaluation.over_mesh import forward_over
from sparse_dataflow.evaluation.scoring import forward_of
from sparse_dataflow.evaluation.trained import load
from sparse_dataflow.execution import mesh as meshes
from sparse_dataflow.execution.sharded import Sharded

if __name__ == "__main__":
    run, *texts = sys.argv[1:]
    rng = np.random.default_rng(0)
    found = {}
    for variant in ("sparse", "dense"):
        trained = load(run, variant)
        # The folder's models are fresh ones with their step added to every weight.
        params = jax.tree.map(lambda leaf, step=trained.step: leaf - step, trained.params)
        trained = dataclasses.replace(trained, params=params)
        tokens = rng.integers(trained.tokenizer.vocab_size, size=(3, 30)).astype(np.int32)
        expected = [np.asarray(part) for part in forward_of(trained)(tokens)]
        for text in texts:
            executor = Sharded(meshes.make(meshes.parse(text, jax.device_count())))
            try:
                scores = [np.asarray(part) for part in forward_over(trained, executor)(tokens)]
            except UserError as error:
                found[f"{variant} {text}"] = str(error)
                continue
            assert scores[0].shape == expected[0].shape == (3, 29)
            error = np.abs(scores[0] - expected[0]).max() / np.abs(expected[0]).max()
            found[f"{variant} {text}"] = [float(error), int((scores[1] != expected[1]).sum())]
    print(json.dumps(found))
