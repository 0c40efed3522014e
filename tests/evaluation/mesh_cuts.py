"""Prints as JSON how models generate whose weights are cut over eight devices.

python mesh_cuts.py MESH ...

Maps "MODEL MESH" to the largest error of the logits after a prompt and of the next token, relative
to the largest logit, and to the share of the bytes of the parameters that a device holds; and
"refused" to the sentences about other meshes.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from decoded import BYTES, CONFIGS
from small_models import arbitrary_params, tables_of

from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.evaluation import kv_cache
from sparse_dataflow.evaluation.over_mesh import on_mesh
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError

PROMPTS = np.array([[32, 0, 0], [7, 8, 9]], np.int32)
LENGTHS = np.array([1, 3], np.int32)
MODELS = ("dense", "sparse", "low rank", "by depth", "llama", "qwen3", "gemma2")


def model_of(name):
    config = CONFIGS[name]
    params, tables = arbitrary_params(config, scale=1), tables_of(config)
    training = TrainingConfig(steps=1, batch=4, sequence=24)
    return Model(Path(), "sparse", config, merged(params, tables), BYTES, 0, training, None, {})


def logits(model):
    """Logits after the prompts, and after one more token, [2, prompts, vocabulary]."""
    weights = kv_cache.prepare(model.model, model.params)
    first, caches = kv_cache.prefill(model.model, weights, PROMPTS, LENGTHS, cache_tokens=8)
    tokens = np.full(2, 5, np.int32)
    second, _ = kv_cache.decode_token(model.model, weights, caches, tokens, LENGTHS)
    return np.stack([first, second])


def refusal(model, mesh):
    try:
        on_mesh(model, mesh)
    except UserError as error:
        return str(error)


def share(params):
    leaves = jax.tree.leaves(params)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    return held / sum(leaf.nbytes for leaf in leaves)


if __name__ == "__main__":
    results = {}
    for name in MODELS:
        model = model_of(name)
        expected = logits(model)
        for mesh in sys.argv[1:]:
            placed = on_mesh(model, mesh)
            error = np.abs(logits(placed) - expected).max() / np.abs(expected).max()
            results[f"{name} {mesh}"] = [float(error), share(placed.params)]
    results["refused"] = [
        refusal(model, mesh) for mesh in ("data:8", "tensor:4", "stage:2,tensor:4")
    ]
    print(json.dumps(results))
