"""Models with random parameters, their logits, and their dense equivalents."""

import dataclasses
import functools

import jax
import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.model_weights import weights_of

DENSE = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=40, max_len=12)
HALF = LinearSpec("block_sparse", "butterfly", density=0.5, block=8)


@functools.cache
def shapes(config):
    return jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))


def arbitrary_params(config, seed=0):
    """Returns random parameters, none of them at an initial value such as 0 or 1."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        center = 1.0 if path[-1].key in ("scale", "gate") else 0.0
        return (center + 0.2 * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes(config))


def tokens_of(config, batch=2, length=10, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length), np.int32)


def tables_of(config):
    return stacks.layout_tables(stacks.layouts(config))


def logits_of(config, params, tokens):
    return jax.jit(lambda p, t: whole.logits(config, weights_of(p, tables_of(config)), t))(
        params, tokens
    )


def as_dense(config, params):
    """Returns the dense (config, params) of equal weights."""
    linears = {name: dataclasses.replace(spec, kind="dense") for name, spec in config.linears}
    blocks = {name: dict(module) for name, module in params["blocks"].items()}
    for name, layers in stacks.layouts(config).items():
        values = blocks[name].pop("values")
        kernels = [layout.to_dense(v) for layout, v in zip(layers, values)]
        blocks[name]["kernel"] = np.stack(kernels)
    return dataclasses.replace(config, linears=linears), {**params, "blocks": blocks}
