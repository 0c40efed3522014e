"""A forward pass in two parts: the prompt at once, then one token at a time beside its cache.

Rows of a batch may differ in length: a prompt is padded at its end, where nothing before can see
it, and each later token overwrites the padding at its own row's position.  Tables are data, so one
program serves every layout; weights are one array a layer, since slicing a stack of them would copy
every byte that a token reads.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.kernels.attention.api import causal_attention
from sparse_dataflow.models import gpt
from sparse_dataflow.models.groups import layer_groups, split_groups


class Weights(NamedTuple):
    """A model ready to decode, in the compute dtype.

    Attributes:
      embed: parameters of that section.
      layers: (parameters, layout tables) of each block.
      head: parameters of that section.
    """

    embed: Any
    layers: tuple
    head: Any


class LayerCache(NamedTuple):
    """Keys and values [batch, cache tokens, heads, head_dim] of one layer, in the compute dtype;
    keys have their positions."""

    keys: jax.Array
    values: jax.Array


def prepare(config: ModelConfig, params: dict, tables: dict) -> Weights:
    """One copy of the weights, a layer at a time; see `gpt` for params and tables."""
    dtype = jnp.dtype(config.compute_dtype)
    cast = functools.partial(jax.tree.map, lambda leaf: jnp.asarray(leaf, dtype))
    layers = tuple(
        (cast(own), jax.tree.map(jnp.asarray, of_layer))
        for own, of_layer in gpt.layers(params["blocks"], tables)
    )
    return Weights(cast(params["embed"]), layers, cast(params["head"]))


def random_weights(config: ModelConfig, seed: int) -> Weights:
    """`prepare` of newly drawn parameters and the config's own layouts, drawn a layer at a time."""
    tables = gpt.layout_tables(gpt.layouts(config))
    layers: list[tuple[dict, dict]] = []
    key = jax.random.key(seed)
    for group, stacked in zip(layer_groups(config), split_groups(tables), strict=True):
        one = dataclasses.replace(group.model, num_layers=1)
        draw = jax.jit(functools.partial(gpt.init, one))
        for i, layer in enumerate(group.layers):
            drawn = draw(jax.random.fold_in(key, layer))
            own = jax.tree.map(lambda table, i=i: table[i : i + 1], stacked)
            layers += prepare(one, drawn, own).layers
    return prepare(one, drawn, own)._replace(layers=tuple(layers))


@functools.partial(jax.jit, static_argnames=("config", "cache_tokens"))
def read_prompts(
    config: ModelConfig,
    weights: Weights,
    tokens_BxT: jax.Array,
    lengths_B: jax.Array,
    *,
    cache_tokens: int,
) -> tuple[jax.Array, tuple[LayerCache, ...]]:
    """The whole prompts at once.

    Args:
      config: the model.
      weights: of `prepare`.
      tokens_BxT: int32, each row padded at its end with any token.
      lengths_B: int32 [B], tokens of each row that count, 1 to T.
      cache_tokens: length of the caches, at least T.

    Returns:
      (float32 [B, vocab] logits of what follows each prompt, the caches).
    """
    caches = []

    def attend(q, k, v):
        room = [(0, 0), (0, cache_tokens - k.shape[1]), (0, 0), (0, 0)]
        caches.append(LayerCache(jnp.pad(k, room), jnp.pad(v, room)))
        return causal_attention(q, k, v)

    x_BxTxD = gpt.embed(config, weights.embed, tokens_BxT)
    for params, tables in weights.layers:
        x_BxTxD = gpt.block(config, params, tables, x_BxTxD, attend=attend)
    last = jnp.take_along_axis(x_BxTxD, (lengths_B - 1)[:, None, None], axis=1)
    return _logits(config, weights, last), tuple(caches)


def read_token(
    config: ModelConfig,
    weights: Weights,
    caches: tuple[LayerCache, ...],
    tokens_B: jax.Array,
    positions_B: jax.Array,
) -> tuple[jax.Array, tuple[LayerCache, ...]]:
    """One token more of each row.

    Args:
      config: the model.
      weights: of `prepare`.
      caches: of the tokens before; donate them.
      tokens_B: int32 [B].
      positions_B: int32 [B], how many tokens of its row come before each.

    Returns:
      (float32 [B, vocab] logits of what follows, the caches with these tokens).
    """
    at_BxT = positions_B[:, None]
    rows = jnp.arange(len(tokens_B))
    seen = jnp.arange(caches[0].keys.shape[1]) <= at_BxT
    x_BxTxD = gpt.embed(config, weights.embed, tokens_B[:, None], positions_BxT=at_BxT)
    after = []
    for (params, tables), cache in zip(weights.layers, caches):

        def attend(q, k, v, cache=cache):
            keys = cache.keys.at[rows, positions_B].set(k[:, 0])
            values = cache.values.at[rows, positions_B].set(v[:, 0])
            after.append(LayerCache(keys, values))
            mask = seen[:, None, None, :]
            return jax.nn.dot_product_attention(q, keys, values, mask=mask, implementation="xla")

        x_BxTxD = gpt.block(config, params, tables, x_BxTxD, attend=attend, positions_BxT=at_BxT)
    return _logits(config, weights, x_BxTxD), tuple(after)


def _logits(config, weights, x_Bx1xD):
    params = {"head": weights.head, "embed": weights.embed}
    return gpt.logits(config, params, x_Bx1xD)[:, 0]
