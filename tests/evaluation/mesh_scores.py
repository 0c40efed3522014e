"""Prints as JSON the differences between scores over meshes of eight devices and on one device.

python mesh_scores.py RUN_FOLDER MESH ...
"""

import dataclasses
import functools
import json
import sys

import jax
import numpy as np

from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.core.model.stacks import map_arrays
from sparse_dataflow.evaluation.over_mesh import mesh_forward
from sparse_dataflow.evaluation.scoring import batch_limits, score, single_device_forward
from sparse_dataflow.evaluation.trained import load
from sparse_dataflow.files.errors import UserError

if __name__ == "__main__":
    run, *texts = sys.argv[1:]
    rng = np.random.default_rng(0)
    differences = {}
    for variant in ("sparse", "dense"):
        trained = load(run, variant)
        # The test's folder has initial weights plus the step number; subtract the step.
        params = map_arrays(lambda leaf, step=trained.step: leaf - step, trained.params)
        trained = dataclasses.replace(trained, params=params)
        draw = functools.partial(rng.integers, trained.tokenizer.vocab_size)
        requests = [(draw(size=1 + i % 20), draw(size=1 + i % 11)) for i in range(30)]
        expected, _ = score(single_device_forward(trained), batch_limits(trained), requests)
        for text in texts:
            executor = Sharded(meshes.make(meshes.parse(text, jax.device_count())))
            limits = batch_limits(trained, meshes.batch_shards(executor.mesh))
            try:
                scores, _ = score(mesh_forward(trained, executor), limits, requests)
            except UserError as error:
                differences[f"{variant} {text}"] = str(error)
                continue
            (values, greedy), (expected_values, expected_greedy) = zip(*scores), zip(*expected)
            error = np.abs(np.subtract(values, expected_values)).max()
            differences[f"{variant} {text}"] = [
                float(error / np.abs(expected_values).max()),
                sum(np.not_equal(greedy, expected_greedy).tolist()),
            ]
    print(json.dumps(differences))
