"""Decoding with a key-value cache: prefill of the prompts, then several tokens per program.

Rows of a batch may differ in length. A prompt is padded at its end, which causal attention masks,
and each new token overwrites the padding at its row's position. Layout tables are arguments, so one
program serves every layout; a program of equal groups reads none. Weights are one array per layer:
slicing a stacked array would copy all weights at every token.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.layer_groups import layer_groups, layer_model, split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.layouts.attention_blocks import attention_layout, slot_contents
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.adapters import with_prompt
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.core.ops.attention.attention_op import self_attention
from sparse_dataflow.core.ops.cached_attention.cached_attention_op import cached_attention
from sparse_dataflow.core.weights.kind import ROUTER, SCALE, TABLE, leaf_of
from sparse_dataflow.evaluation import decoded_form
from sparse_dataflow.evaluation.sampling import Sampler

MOST_TOKENS = 32
"""Most tokens of each row that a program writes, but on a CPU."""

DEEP = 8
"""Layers above which a CPU runs a program for each layer; see `program`."""


class Weights(NamedTuple):
    """Weights for decoding, in the compute dtype.

    Attributes:
      embed: parameters of the embedding section.
      layers: `layer_weights` of each block.
      head: parameters of the head section.
    """

    embed: dict
    layers: tuple
    head: dict


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("keys", "values"), meta_fields=("most",)
)
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values [batch, kv heads, places, head width] of one layer.

    They have the compute dtype.  Positional rotations are already applied to the keys.  A cache has
    all tokens, with a sliding window too; with `config.attention_blocks` it has those that later
    ones can read, if they are fewer.  Attention reads caches of this order in place; with tokens
    before heads, XLA transposes the complete cache at every token.

    Attributes:
      most: tokens that a row may have where the cache has places for fewer; else 0.
    """

    keys: jax.Array
    values: jax.Array
    most: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that a row may have."""
        return self.most or self.keys.shape[2]


def prepare(
    config: ModelConfig,
    params: dict,
    form: str = decoded_form.AUTO,
    chosen: range | None = None,
) -> Weights:
    """Casts the weights layer by layer to the compute dtype; routers stay float32.

    Args:
      params: parameters with their layouts; see `gpt`.
      form: of weights, see `decoded_form`.
      chosen: the layers to prepare, which the result has alone; None is all.

    Raises:
      UserError: the named form is not possible.
    """
    decoded_form.check(config, form)
    dtype = jnp.dtype(config.compute_dtype)
    cast = functools.partial(jax.tree.map, lambda leaf: jnp.asarray(leaf, dtype))
    layers: list[dict] = []
    numbers = itertools.count()
    for stacked in split_groups(stacks.with_groups(params["blocks"])):
        arrays, layouts = stacks.split_layouts(stacked)
        for i, number in zip(range(len(jax.tree.leaves(arrays)[0])), numbers):
            if chosen is not None and number not in chosen:
                continue
            layer = _layer(config, arrays, i)
            if layouts:
                layer_layout = functools.partial(_layout, config, i)
                layer = merged(layer, stacks.map_placed_layouts(layer_layout, layouts))
            weights = layer_weights(config, layer)
            layers.append(decoded_form.layer_in_form(config, weights, form, number))
    ends = cast(params["embed"]), cast(params["head"])
    embed, head = decoded_form.ends_in_form(config, *ends, form)
    return Weights(embed, tuple(layers), head)


def _layout(config, i, place, stacked):
    """Returns the layout of layer i; on a GPU equal groups are constants of the program.

    There each argument of a program costs about as much as a small kernel.
    """
    layout = jax.tree.map(lambda table: table[i], stacked)
    if stacked.groups and dispatch.on(platforms.COSTLY_ARGUMENTS):
        return BlockLayout.from_tables(layout, config.linear(place.projection).block)
    return jax.tree.map(jnp.asarray, layout)


@functools.partial(jax.jit, static_argnames="config")
def _layer(config, stacked, i):
    """Returns layer i, in one program: an array at a time compiles one for each shape."""

    def cast(path, leaf):
        about = leaf_of(config, path)
        wide = about.role in (SCALE, TABLE) if about else getattr(path[-1], "key", "") == ROUTER
        return leaf[i] if wide else leaf[i].astype(config.compute_dtype)

    return jax.tree_util.tree_map_with_path(cast, stacked)


def random_weights(config: ModelConfig, seed: int) -> Weights:
    """Initialises weights layer by layer, so that at most one layer exists in float32."""
    stored = stacks.stored_layouts(config)
    blocks = stored["blocks"] if stored else tuple({} for _ in layer_groups(config))
    layers: list[dict] = []
    key = jax.random.key(seed)
    for group, stacked in zip(layer_groups(config), split_groups(blocks), strict=True):
        layer_config = dataclasses.replace(group.model, num_layers=1)
        init = jax.jit(functools.partial(gpt.init, layer_config))
        for i, layer in enumerate(group.layers):
            # Of a stack of one layer.
            layouts = jax.tree.map(lambda table, i=i: table[i : i + 1], stacked)
            params = merged(init(jax.random.fold_in(key, layer)), {"blocks": layouts})
            weights = prepare(layer_config, params)
            layers += weights.layers
    return weights._replace(layers=tuple(layers))


def program(function: Any, config: ModelConfig) -> Any:
    """Returns `prefill` or `decode_tokens` as one program, or of a deep model on a CPU as one for
    each layer: its compiler takes as long for each of equal layers."""
    deep = dispatch.on(platforms.SLOW_COMPILER) and config.num_layers > DEEP
    return function.__wrapped__ if deep else function


@functools.partial(jax.jit, static_argnames=("config", "cache_tokens"))
def prefill(
    config: ModelConfig,
    weights: Weights,
    tokens_BxT: jax.Array,
    lengths_B: jax.Array,
    *,
    cache_tokens: int,
) -> tuple[jax.Array, tuple[LayerCache, ...]]:
    """Reads the complete prompts.

    Args:
      weights: weights from `prepare`.
      tokens_BxT: int32, each row padded at its end with any token.
      lengths_B: int32 [B], unpadded length of each row, 1 to T.
      cache_tokens: length of the caches, at least T.

    Returns:
      (float32 [B, vocab] logits of the next tokens, caches, which begin with the prompt vectors).
    """
    x_BxTxD, lengths_B, cache_tokens = embedded_prompts(
        config, weights.embed, tokens_BxT, lengths_B, cache_tokens
    )
    x_BxTxD, caches = read_prompts(config, weights.layers, x_BxTxD, lengths_B, cache_tokens)
    return last_logits(config, weights._replace(layers=()), x_BxTxD, lengths_B), caches


def embedded_prompts(
    config: ModelConfig, embed: dict, tokens_BxT: jax.Array, lengths_B: jax.Array, cache_tokens: int
) -> tuple[jax.Array, jax.Array, int]:
    """Returns the embeddings [B, T, D] of prompts, and `prefill`'s lengths, all with the prompt
    vectors of the model in front."""
    front = config.prompt_vectors
    x_BxTxD = _embed(config, embed, with_prompt(config, Batch(tokens_BxT)).tokens)
    return x_BxTxD, lengths_B + front, cache_tokens + front


def read_prompts(
    config: ModelConfig,
    layers: Iterable[dict],
    x_BxTxD: jax.Array,
    lengths_B: jax.Array,
    cache_tokens: int,
    first: int = 0,
) -> tuple[jax.Array, tuple[LayerCache, ...]]:
    """Returns the outputs [B, T, D] of consecutive layers for prompts, and a cache of each.

    Args:
      layers: of `Weights.layers`, from the layer `first` on.
    """
    caches: list[LayerCache] = []
    for run, layer in zip(_layers(config, _read_prompt, cache_tokens)[first:], layers):
        x_BxTxD, cache = run(layer, x_BxTxD, lengths_B)
        caches.append(cache)
    return x_BxTxD, tuple(caches)


@functools.cache
def _layers(config, function, argument, **jit):
    """Returns the program of each layer, one for equal layers. Its settings are not arguments: a
    config takes longer to compare than a small layer to compute."""
    models = [layer_model(config, i) for i in range(config.num_layers)]
    programs = {
        model: jax.jit(functools.partial(function, model, argument), **jit) for model in models
    }
    return tuple(programs[model] for model in models)


_embed = jax.jit(gpt.embed, static_argnums=0)


def _read_prompt(config, cache_tokens, layer, x_BxTxD, lengths_B):
    """Returns the outputs of a layer and its cache."""
    caches: list[LayerCache] = []
    attend = functools.partial(prompt_attention, caches, cache_tokens, lengths_B)
    x_BxTxD, _ = gpt.block(config, layer, x_BxTxD, attend=attend)
    return x_BxTxD, caches[0]


def prompt_attention(
    caches: list[LayerCache],
    cache_tokens: int,
    lengths_B: jax.Array,
    q,
    k,
    v,
    window,
    cap=0.0,
    blocks=None,
) -> jax.Array:
    """Attention of complete prompts, as `gpt.Block` calls it; appends the layer's cache."""
    # [B, kv heads, cache tokens, K]; the places behind the prompt are free.
    room = [(0, 0), (0, 0), (0, cache_tokens - k.shape[1]), (0, 0)]
    keys, values = (jnp.pad(a.swapaxes(1, 2), room) for a in (k, v))
    cache = LayerCache(keys, values)
    caches.append(_with_readable(cache, blocks, lengths_B) if blocks is not None else cache)
    return self_attention(q, k, v, window=window, cap=cap, blocks=blocks)


def _with_readable(cache, blocks, lengths_B):
    """Returns a cache of the blocks that a row can read from its last token on."""
    layout = attention_layout(blocks, cache.tokens)
    if layout is None or slot_contents(layout).shape[1] * layout.block >= cache.tokens:
        return cache
    contents = jnp.asarray(slot_contents(layout))
    chosen = jnp.maximum(contents[(lengths_B - 1) // layout.block], 0)

    def in_slots(array):
        # Each row takes the blocks of its slots; what is in an empty one is masked.
        rest = -cache.tokens % layout.block
        array = jnp.pad(array, [(0, 0), (0, 0), (0, rest), (0, 0)])
        array = array.reshape(*array.shape[:2], -1, layout.block, array.shape[-1])
        array = jnp.take_along_axis(array, chosen[:, None, :, None, None], axis=2)
        return array.reshape(*array.shape[:2], -1, array.shape[-1])

    return LayerCache(in_slots(cache.keys), in_slots(cache.values), cache.tokens)


def decode_token(
    config: ModelConfig,
    weights: Weights,
    caches: tuple[LayerCache, ...],
    tokens_B: jax.Array,
    positions_B: jax.Array,
) -> tuple[jax.Array, tuple[LayerCache, ...]]:
    """Appends one token to each row, as `decode_text`: int32 [B] -> (float32 [B, vocab] logits of
    the next tokens, updated caches)."""
    logits, caches = decode_text(config, weights, caches, tokens_B[:, None], positions_B)
    return logits[:, 0], caches


def decode_text(
    config: ModelConfig,
    weights: Weights,
    caches: tuple[LayerCache, ...],
    tokens_BxT: jax.Array,
    positions_B: jax.Array,
    has_room: bool = False,
) -> tuple[jax.Array, tuple[LayerCache, ...]]:
    """Appends the same number of tokens to each row; what a cache has no room for is dropped.

    Args:
      weights: weights from `prepare`.
      caches: caches of the previous tokens, which are donated.
      tokens_BxT: int32, new tokens.
      positions_B: int32 [B], number of previous tokens of each row.
      has_room: whether the caches have room for all tokens, so that none is dropped: fewer kernels.

    Returns:
      (float32 [B, T, vocab] logits of the tokens after each, updated caches).
    """
    positions_B = positions_B + config.prompt_vectors
    x_BxTxD, positions_BxT = embedded_at(config, weights.embed, tokens_BxT, positions_B)
    x_BxTxD, caches = append_texts(config, weights.layers, caches, x_BxTxD, positions_BxT, has_room)
    return _logits(config, weights._replace(layers=()), x_BxTxD), caches


def append_texts(
    config: ModelConfig,
    layers: Iterable[dict],
    caches: Iterable[LayerCache],
    x_BxTxD: jax.Array,
    positions_BxT: jax.Array,
    has_room: bool,
    first: int = 0,
) -> tuple[jax.Array, tuple[LayerCache, ...]]:
    """Returns the outputs [B, T, D] of consecutive layers for new tokens, and the updated caches.

    Args:
      layers: of `Weights.layers`, from the layer `first` on.
      caches: of these layers, which are donated.
      positions_BxT: int32, the position of each token.
      has_room: see `decode_text`.
    """
    new_caches: list[LayerCache] = []
    programs = _layers(config, _append_text, has_room, donate_argnums=1)
    for run, layer, cache in zip(programs[first:], layers, caches):
        x_BxTxD, cache = run(layer, cache, x_BxTxD, positions_BxT)
        new_caches.append(cache)
    return x_BxTxD, tuple(new_caches)


@functools.partial(jax.jit, static_argnums=0)
def embedded_at(
    config: ModelConfig, embed: dict, tokens_BxT: jax.Array, positions_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the embeddings of tokens, and the position of each, int32 [B, T]."""
    positions_BxT = positions_B[:, None] + jnp.arange(tokens_BxT.shape[1])
    return gpt.embed(config, embed, tokens_BxT, Batch(positions=positions_BxT)), positions_BxT


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, weights, x_BxTxD):
    return gpt.logits(config, {"head": weights.head, "embed": weights.embed}, x_BxTxD)


@functools.partial(jax.jit, static_argnums=0)
def _embed_token(config, embed, tokens_B, positions_B, i, last):
    """Returns the embeddings of the tokens of a step, and their positions [B, 1], `last` at most.

    Rows that ended go on until all do.  At the end of their cache they overwrite its last place,
    which nobody reads.
    """
    return embedded_at(config, embed, tokens_B[:, None], jnp.minimum(positions_B + i, last))


@functools.partial(jax.jit, static_argnums=0)
def _next_tokens(config, weights, x_Bx1xD, sampler, step):
    """Returns the tokens [1, B] that a sampler picks."""
    return sampler(_logits(config, weights, x_Bx1xD)[:, 0], step + 1)[None]


def _append_text(config, has_room, layer, cache, x_BxTxD, positions_BxT):
    """Returns the outputs of a layer for new tokens, and its cache."""
    caches: list[LayerCache] = []
    attend = functools.partial(append_to_cache, caches, cache, positions_BxT, has_room)
    x_BxTxD, _ = gpt.block(config, layer, x_BxTxD, Batch(positions=positions_BxT), attend=attend)
    return x_BxTxD, caches[0]


def most_tokens() -> int:
    """Returns how many tokens of each row a program writes at most.

    A CPU writes one: its compiler turns a loop over tokens into a single kernel on one core, which
    compiles for minutes.
    """
    return 1 if dispatch.on(platforms.SLOW_COMPILER) else MOST_TOKENS


@functools.partial(jax.jit, static_argnames=("config", "most"), donate_argnames="caches")
def decode_tokens(
    config: ModelConfig,
    weights: Weights,
    caches: tuple[LayerCache, ...],
    tokens_B: jax.Array,
    positions_B: jax.Array,
    sampler: Sampler,
    step: jax.Array,
    count: jax.Array,
    *,
    most: int,
) -> tuple[jax.Array, tuple[LayerCache, ...]]:
    """Appends tokens to each row, each with the token before; the count is traced.

    Args:
      weights: weights from `prepare`.
      caches: caches of the previous tokens, which are donated.
      tokens_B: int32 [B], the last token of each row, which no cache has.
      positions_B: int32 [B], number of previous tokens of each row; rows with a full cache
        overwrite its end.
      sampler: picks tokens.
      step: int32 [], number of tokens that were written before `tokens_B`, which the random
        numbers depend on.
      count: int32 [], tokens to append, 1 to `most`.
      most: see `most_tokens`; 1 compiles no loop.

    Returns:
      (int32 [most, B], whose first `count` rows are the new tokens; updated caches).
    """
    last = np.int32(caches[0].tokens - 1)
    # Programs of the embedding and the head do not take the layers as arguments.
    ends, positions_B = weights._replace(layers=()), positions_B + config.prompt_vectors

    def append(tokens_B, caches, i, step):
        x_Bx1xD, positions_Bx1 = _embed_token(config, weights.embed, tokens_B, positions_B, i, last)
        layers = weights.layers
        x_Bx1xD, caches = append_texts(config, layers, caches, x_Bx1xD, positions_Bx1, True)
        return _next_tokens(config, ends, x_Bx1xD, sampler, step), caches

    def append_and_write(i, carry):
        written, tokens_B, caches = carry
        tokens_1xB, caches = append(tokens_B, caches, i, step + i)
        return written.at[i].set(tokens_1xB[0]), tokens_1xB[0], caches

    if most == 1:  # Programs of layers, one after the other, compute nothing in between.
        return append(tokens_B, caches, np.int32(0), step)
    # The loop has a traced length, so what it writes has the length of the longest.
    carry = jnp.zeros((most, len(tokens_B)), jnp.int32), tokens_B, caches
    written, _, caches = jax.lax.fori_loop(0, count, append_and_write, carry)
    return written, caches


def append_to_cache(
    caches: list[LayerCache],
    cache: LayerCache,
    positions_BxT: jax.Array,
    has_room: bool,
    q,
    k,
    v,
    window,
    cap=0.0,
    blocks=None,
) -> jax.Array:
    """Attention of new tokens of each row, as `gpt.Block` calls it; appends the updated cache."""
    operands = q, k, v, cache.keys, cache.values, positions_BxT
    y, keys, values = cached_attention(
        *operands, window, cap, has_room, blocks=blocks, tokens=cache.tokens
    )
    caches.append(LayerCache(keys, values, cache.most))
    return y


@functools.partial(jax.jit, static_argnums=0)
def last_logits(
    config: ModelConfig, weights: Weights, x_BxTxD: jax.Array, lengths_B: jax.Array
) -> jax.Array:
    """Returns float32 [B, vocab] logits after the last token of each row of `lengths_B` tokens."""
    # Rows are padded on the right, so their last tokens have different places.
    last = jnp.take_along_axis(x_BxTxD, (lengths_B - 1)[:, None, None], axis=1)
    return _logits(config, weights, last)[:, 0]
