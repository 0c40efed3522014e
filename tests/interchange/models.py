"""Models for the tests of import and export, and a helper that changes saved weights."""

import dataclasses

import jax
import numpy as np
from make_fixture import BYTES
from safetensors.numpy import load_file, save_file

from sparse_dataflow.config.model import LinearSpec, ModelConfig
from sparse_dataflow.interchange import huggingface
from sparse_dataflow.models import gpt
from sparse_dataflow.parallel import whole

DENSE = ModelConfig(
    num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=BYTES.vocab_size, max_len=16
)
SPARSE = DENSE.with_linears(LinearSpec("block_sparse", "monarch", density=0.5, block=8))
SUPAR = dataclasses.replace(SPARSE, parametrization="supar")
LOW_RANK = SPARSE.with_linears(
    LinearSpec("block_sparse", "random", 0.25, 8, rank=3, hadamard=4), ("mlp_in",)
)
DEPTH = dataclasses.replace(LOW_RANK, density_by_depth=(2.0, 1.0))


def random_model(config, seed=0):
    """Returns (random nonzero parameters, layout tables)."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))
    params = jax.tree.map(lambda s: rng.normal(size=s.shape, scale=0.3).astype("f4"), shapes)
    return params, gpt.layout_tables(gpt.layouts(config))


def logits(config, params, tables, ids):
    run = jax.jit(lambda params, ids: whole.logits(config, params, tables, ids))
    return np.asarray(run(params, ids))


def export(folder, form, config, seed=0):
    """Exports a random model and returns its (parameters, layout tables)."""
    params, tables = random_model(config, seed)
    huggingface.write(
        folder, form, config, params, tables, BYTES, context=config.max_len, card="# A model\n"
    )
    return params, tables


def change_tensors(folder, change):
    """Applies `change` to the dict of the folder's tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
