"""The `whole` executor: all sections in one program."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_dataflow.models import gpt
from sparse_dataflow.models.linear import PROJECTION_OUTPUT
from sparse_dataflow.models.sizes import ModelConfig

_REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(PROJECTION_OUTPUT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def apply_blocks(config: ModelConfig, params: dict, tables: dict, x_BxTxD: jax.Array) -> jax.Array:
    """Runs all blocks on [B, T, D].

    Concrete (numpy) tables are specialised at trace time.  Blocks are unrolled where `unrolls` says
    so and else scanned, so that compile time does not depend on depth.
    """

    run = rematerialised_block(config)

    def one(x, layer):
        return run(*layer, x)

    if unrolls(config, tables):
        layers = _unstack(params, config.num_layers)
        for i, layer in enumerate(layers):
            x_BxTxD = one(x_BxTxD, (layer, jax.tree.map(lambda t, i=i: t[i], tables)))
        return x_BxTxD
    return lax.scan(lambda x, layer: (one(x, layer), None), x_BxTxD, (params, tables))[0]


def rematerialised_block(config: ModelConfig) -> Callable:
    """(one layer's params, its tables, [B, T, D]) -> [B, T, D], with the config's remat."""
    block = functools.partial(gpt.block, config)
    if config.remat == "none":
        return block
    return jax.checkpoint(block, policy=_REMAT_POLICIES[config.remat])


UNROLL_LAYERS = 16
"""Deepest model that a CPU program unrolls."""

UNROLL_CHANGING_LAYERS = 8
"""The same where the tables are traced, and may change from step to step."""


def unrolls(config: ModelConfig, tables: dict) -> bool:
    """Whether `apply_blocks` unrolls: on a CPU, where a loop forces copies of its stacked operands
    (a step of `nano` with traced tables takes 1.3 times as long) and known layouts are worth
    specialising, as long as compile time stays small."""
    concrete = all(isinstance(t, np.ndarray) for t in jax.tree.leaves(tables))
    deepest = UNROLL_LAYERS if concrete else UNROLL_CHANGING_LAYERS
    return jax.default_backend() == "cpu" and config.num_layers <= deepest


def _unstack(params, num_layers):
    """Per-layer trees; `split` transposes to one concatenate, where indexing would add L arrays."""
    leaves, structure = jax.tree.flatten(params)
    columns = [[p[0] for p in lax.split(leaf, [1] * num_layers)] for leaf in leaves]
    return [jax.tree.unflatten(structure, layer) for layer in zip(*columns)]


def loss(config: ModelConfig, params: dict, tables: dict, tokens: jax.Array, weights: jax.Array):
    """Sum of weighted next-token losses.

    Args:
      config: the model.
      params: see `gpt`.
      tables: see `gpt`.
      tokens: int32 [B, T + 1]; the first T are inputs, the last T targets.
      weights: float32 [B, T].

    Returns:
      float32 scalar, in nats.
    """
    x = gpt.embed(config, params["embed"], tokens[:, :-1])
    x = apply_blocks(config, params["blocks"], tables, x)
    embedding = params["embed"]["tokens"]
    return gpt.head_loss(config, params["head"], embedding, x, tokens[:, 1:], weights)


def token_scores(
    config: ModelConfig, params: dict, tables: dict, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Float32 [B, T] losses of each next token of int32 [B, T + 1] tokens, in nats, and bool [B, T]
    whether it is the likeliest; no more memory than `loss` needs."""
    x = gpt.embed(config, params["embed"], tokens[:, :-1])
    x = apply_blocks(config, params["blocks"], tables, x)
    embedding = params["embed"]["tokens"]
    return gpt.head_scores(config, params["head"], embedding, x, tokens[:, 1:])


def logits(config: ModelConfig, params: dict, tables: dict, tokens: jax.Array) -> jax.Array:
    """Float32 [B, T, vocab] logits for int32 [B, T] tokens."""
    x = gpt.embed(config, params["embed"], tokens)
    return gpt.logits(config, params, apply_blocks(config, params["blocks"], tables, x))


def loss_and_gradients(
    config: ModelConfig, params: dict, tables: dict, tokens: jax.Array, micro_batches: int = 1
):
    """Mean next-token loss of int32 [B, T + 1] tokens and its gradient in params.

    Micro-batches are rows of the batch, accumulated in float32 one after the other.
    """
    weight = jnp.full(tokens[:, 1:].shape, 1 / tokens[:, 1:].size, jnp.float32)
    value_and_grad = jax.value_and_grad(lambda p, t, w: loss(config, p, tables, t, w))
    if micro_batches == 1:
        return value_and_grad(params, tokens, weight)
    split = lambda a: a.reshape(micro_batches, -1, *a.shape[1:])  # noqa: E731

    def accumulate(total, batch):
        return jax.tree.map(jnp.add, total, value_and_grad(params, *batch)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return lax.scan(accumulate, zeros, (split(tokens), split(weight)))[0]
