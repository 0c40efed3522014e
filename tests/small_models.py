"""Small models that tests share, their random parameters, tokens and layouts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.layouts.layout import FixedTables
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.runs.families import FAMILIES

DENSE = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=40, max_len=16)
MONARCH = LinearSpec("block_sparse", "monarch", density=0.5, block=8)
QUARTER = LinearSpec("block_sparse", "butterfly", density=0.25, block=4)
SPARSE = DENSE.with_linears(MONARCH)
LOW_RANK = SPARSE.with_linears(
    LinearSpec("block_sparse", "random", 0.25, 8, rank=3, hadamard=4), ("mlp_in",)
)
EACH_KIND = dataclasses.replace(
    DENSE,
    linears={
        "attn_out": dataclasses.replace(QUARTER, hadamard=8),
        "mlp_in": LinearSpec(rank=2),
        "mlp_out": dataclasses.replace(QUARTER, rank=2),
    },
)
"""A dense projection, a sparse one, and both with a low-rank term."""
MIXED = DENSE.with_linears(
    LinearSpec("block_sparse", "cyclic", density=0.5, block=8, rank=2), ["qkv"]
).with_linears(LinearSpec("block_sparse", "cyclic", density=0.25, block=8), ["mlp_out"])
"""Two dense projections, and sparse ones of two densities."""

GEMMA2 = FAMILIES["gemma2"] | {
    "window": 3,
    "attention_cap": 0.7,
    "logit_cap": 2.0,
    "num_kv_heads": 2,
    "attention_scalar": 5,
}
GEMMA3 = FAMILIES["gemma3"] | {
    "window": 3,
    "layer_types": "sliding+sliding+full",
    "num_kv_heads": 1,
    "head_dim": 12,
}
NEWER = {
    "gemma": FAMILIES["gemma"],
    "pythia": FAMILIES["pythia"] | {"rotary_share": 0.5},
    "gpt_neo": FAMILIES["gpt_neo"] | {"window": 3},
    # Without biases of keys: those of features that are not rotated have no gradient.
    "phi": FAMILIES["phi"]
    | {"num_kv_heads": 2, "vocab_size": 45, "biases": ("q", "v", "attn_out", "mlp_in", "mlp_out")},
    "olmo2": FAMILIES["olmo2"] | {"num_kv_heads": 2},
    "stablelm2_12b": FAMILIES["stablelm2_12b"] | {"num_kv_heads": 2, "rotary_share": 0.5},
    "granite": FAMILIES["granite"]
    | {"num_kv_heads": 2, "attention_scalar": 20.0, "logit_divisor": 0.5},
    "smollm3": FAMILIES["smollm3"] | {"num_kv_heads": 2, "rotary_layers": "unrotated+rotated"},
    "starcoder2": FAMILIES["starcoder2"] | {"num_kv_heads": 2, "window": 3},
}
"""Fields of small models of families."""


@functools.cache
def shapes_of(config):
    """Returns the shapes of the parameters."""
    return jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))


def arbitrary_params(config, seed=0, scale=0.2):
    """Returns random parameters, none of them at an initial value such as 0 or 1."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        center = 1.0 if path[-1].key in ("scale", "gate") else 0.0
        return (center + scale * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes_of(config))


def tables_of(config):
    """Returns the initial layouts as leaves of a tree like the params, in numpy."""
    return stacks.stored_layouts(config)


def fixed(tables):
    """Returns layouts that programs are specialised to."""
    return stacks.map_layouts(FixedTables, tables)


def arbitrary_weights(config, seed=0, scale=0.2):
    """Returns the weights of random parameters, whose layouts may change."""
    tables = jax.tree.map(jnp.asarray, tables_of(config))
    return weights_of(config, arbitrary_params(config, seed, scale), tables)


def tokens_of(config, batch=4, length=11, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length), np.int32)


whole_logits = jax.jit(whole.logits, static_argnums=0)
whole_loss_and_gradients = jax.jit(whole.loss_and_gradients, static_argnums=0)
"""As one program: outside of `jit`, every operation of a model is compiled by itself."""


def logits_of(config, params, tokens):
    run = lambda p, t: whole.logits(config, weights_of(config, p, tables_of(config)), t)  # noqa: E731
    return jax.jit(run)(params, tokens)


def as_dense(config, params):
    """Returns the dense (config, params) of equal weights."""
    linears = {name: dataclasses.replace(spec, kind="dense") for name, spec in config.linears}
    blocks = {name: dict(module) for name, module in params["blocks"].items()}
    for name, layers in model_layouts.layouts(config).items():
        values = blocks[name].pop("values")
        blocks[name]["kernel"] = np.stack([lay.to_dense(v) for lay, v in zip(layers, values)])
    return dataclasses.replace(config, linears=linears), {**params, "blocks": blocks}


def assert_same(actual, expected, tolerance=2e-5):
    """Compares trees, whose leaves must not vanish, relative to each leaf's largest value."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(actual):
        twin = expected
        for key in path:
            twin = twin[getattr(key, "key", getattr(key, "idx", None))]
        scale = np.abs(leaf).max()
        assert np.all(np.isfinite(leaf)) and scale > 0, path
        np.testing.assert_allclose(
            leaf, twin, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path)
        )
