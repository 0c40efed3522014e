"""All sections in one program: the loss and its gradients, of one device or of one of a mesh."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.kernels import dispatch
from sparse_dataflow.models import gpt
from sparse_dataflow.models.groups import split_groups
from sparse_dataflow.models.linear import PROJECTION_OUTPUT
from sparse_dataflow.models.shard import WHOLE, Shard

FETCHED = "fetched"
"""Name of parameters that were brought from other devices: the backward brings them again."""

_REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(PROJECTION_OUTPUT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class Member:
    """The part of the work that one device of a mesh does, inside `shard_map`.

    Attributes:
      shard: of every section.
      batch_parts: devices that the rows of a batch are dealt out to.
      fetch: (section's name, its params as they are kept, number of its group where it is a block)
        -> params to compute with, their values named FETCHED where they come from other devices;
        None where they are kept whole.
      collect: gradients of a micro-batch in params as they are kept -> as they are accumulated.
    """

    shard: Shard = WHOLE
    batch_parts: int = 1
    fetch: Callable[[str, dict, int], dict] | None = None
    collect: Callable[[dict], dict] = lambda gradients: gradients

    def section(self, params: dict, name: str, group: int = 0) -> dict:
        """A section's params to compute with; a block is of a group of layers."""
        own = jax.tree.map(_with_gradient, params[name], is_leaf=_traced)
        return own if self.fetch is None else self.fetch(name, own, group)


ALONE = Member()
"""One device does all the work."""


class Traced(NamedTuple):
    """A parameter whose gradient comes in a dtype of its own.

    jax gives a gradient the dtype of what it is taken in, so that the gradients of all layers would
    be float32 as the masters are.  Taken in `gradient` instead, each is rounded in its layer's
    backward pass, and one of float32 lives no longer than that.

    Attributes:
      master: the parameter; a constant to the gradient.
      gradient: zeros of its shape, in the gradient's dtype; nothing reads them.
    """

    master: jax.Array
    gradient: jax.Array


def _traced(leaf):
    return isinstance(leaf, Traced)


def _with_gradient(leaf):
    return _rounded(*leaf) if _traced(leaf) else leaf


@jax.custom_vjp
def _rounded(master, gradient):
    """The master; its cotangent goes to `gradient`, rounded to that dtype."""
    return master


_rounded.defvjp(
    lambda master, gradient: (master, jnp.zeros((), gradient.dtype)),
    lambda like, cotangent: (None, cotangent.astype(like.dtype)),
)


def apply_blocks(
    config: ModelConfig,
    params: Any,
    tables: Any,
    x_BxTxD: jax.Array,
    member: Member = ALONE,
) -> jax.Array:
    """Runs all blocks on [B, T, D].

    Concrete (numpy) tables are specialised at trace time.  Blocks are unrolled where `unrolls` says
    so and else scanned, group by group, so that compile time does not depend on depth.
    """
    unrolled = unrolls(config, tables)
    for group, stacked in enumerate(zip(split_groups(params), split_groups(tables), strict=True)):
        one = _layer(config, member, group)
        if unrolled:
            own_params, own_tables = stacked
            for i, layer in enumerate(_unstack(own_params)):
                x_BxTxD = one(x_BxTxD, (layer, jax.tree.map(lambda t, i=i: t[i], own_tables)))
        else:
            step = lambda x, layer, one=one: (one(x, layer), None)  # noqa: E731
            x_BxTxD, _ = lax.scan(step, x_BxTxD, stacked)
    return x_BxTxD


def _layer(config, member, group):
    """(x, (params, tables) of a layer of the group) -> x, keeping for the backward what is said."""

    def one(x, layer):
        layer_params, layer_tables = layer
        own = member.section({"blocks": layer_params}, "blocks", group)
        return gpt.block(config, own, layer_tables, x, member.shard)

    if config.remat != "none":
        return rematerialised(config, one)
    if member.fetch is not None:
        policy = jax.checkpoint_policies.save_anything_except_these_names(FETCHED)
        return jax.checkpoint(one, policy=policy)
    return one


def rematerialised(config: ModelConfig, layer: Callable) -> Callable:
    """The layer, keeping for its gradient what the config's remat says."""
    if config.remat == "none":
        return layer
    return jax.checkpoint(layer, policy=_REMAT_POLICIES[config.remat])


UNROLL_LAYERS = 16
"""Deepest model that a CPU program unrolls."""

UNROLL_CHANGING_LAYERS = 8
"""The same where the tables are traced, and may change from step to step."""


def unrolls(config: ModelConfig, tables: Any) -> bool:
    """Whether `apply_blocks` unrolls: on a CPU, where a loop forces copies of its stacked operands
    (a step of `nano` with traced tables takes 1.3 times as long) and known layouts are worth
    specialising, as long as compile time stays small."""
    concrete = all(isinstance(t, np.ndarray) for t in jax.tree.leaves(tables))
    deepest = UNROLL_LAYERS if concrete else UNROLL_CHANGING_LAYERS
    return dispatch.platform() == "cpu" and config.num_layers <= deepest


def _unstack(params):
    """Per-layer trees; `split` transposes to one concatenate, where indexing would add L arrays."""
    leaves, structure = jax.tree.flatten(params)
    columns = [[p[0] for p in lax.split(leaf, [1] * len(leaf))] for leaf in leaves]
    return [jax.tree.unflatten(structure, layer) for layer in zip(*columns)]


def loss(
    config: ModelConfig,
    params: dict,
    tables: dict,
    tokens: jax.Array,
    weights: jax.Array,
    member: Member = ALONE,
):
    """Sum of weighted next-token losses; a member's share of it.

    Args:
      config: the model.
      params: see `gpt`.
      tables: see `gpt`.
      tokens: int32 [B, T + 1]; the first T are inputs, the last T targets.
      weights: float32 [B, T].
      member: whose rows, params and tables these are.

    Returns:
      float32 scalar, in nats.
    """
    embed, head = (member.section(params, name) for name in ("embed", "head"))
    x = gpt.embed(config, embed, tokens[:, :-1], member.shard)
    x = apply_blocks(config, params["blocks"], tables, x, member)
    targets = tokens[:, 1:]
    return gpt.head_loss(config, head, embed["tokens"], x, targets, weights, member.shard)


def token_scores(
    config: ModelConfig,
    params: dict,
    tables: dict,
    tokens: jax.Array,
    places: jax.Array,
    member: Member = ALONE,
) -> tuple[jax.Array, jax.Array]:
    """Losses of some next tokens, and whether each is the likeliest; memory as `loss` needs it.

    Args:
      config: the model.
      params: see `gpt`.
      tables: see `gpt`.
      tokens: int32 [B, T + 1]; the first T are inputs, the last T targets.
      places: int32 [S], which of the B * T targets; the others cost no logits.
      member: whose rows, params and tables these are.

    Returns:
      float32 [S] losses in nats, bool [S].
    """
    embed, head = (member.section(params, name) for name in ("embed", "head"))
    x = gpt.embed(config, embed, tokens[:, :-1], member.shard)
    x = apply_blocks(config, params["blocks"], tables, x, member)
    targets = tokens[:, 1:]
    return gpt.head_scores(config, head, embed["tokens"], x, targets, places, member.shard)


def logits(config: ModelConfig, params: dict, tables: dict, tokens: jax.Array) -> jax.Array:
    """Float32 [B, T, vocab] logits for int32 [B, T] tokens."""
    x = gpt.embed(config, params["embed"], tokens)
    return gpt.logits(config, params, apply_blocks(config, params["blocks"], tables, x))


def loss_and_gradients(
    config: ModelConfig,
    params: dict,
    tables: dict,
    tokens: jax.Array,
    micro_batches: int = 1,
    member: Member = ALONE,
    dtype: str = "float32",
):
    """Mean next-token loss of int32 [B, T + 1] tokens and its gradient in params.

    Micro-batches are rows of the batch, accumulated in float32 one after the other.  A member gets
    its share of both, with gradients as `member.collect` leaves them; those of one micro-batch come
    in `dtype`.
    """
    targets = tokens[:, 1:]
    weight = jnp.full(targets.shape, 1 / (targets.size * member.batch_parts), jnp.float32)

    def one(params, tokens, weight):
        def share(gradients):
            traced = jax.tree.map(Traced, params, gradients)
            return loss(config, traced, tables, tokens, weight, member)

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), params)
        value, gradients = jax.value_and_grad(share)(zeros)
        return value, member.collect(gradients)

    if micro_batches == 1:
        return one(params, tokens, weight)
    split = lambda a: a.reshape(micro_batches, -1, *a.shape[1:])  # noqa: E731
    batches = split(tokens), split(weight)

    def accumulate(total, batch):
        return jax.tree.map(jnp.add, total, one(params, *batch)), None

    shapes = jax.eval_shape(one, params, *(a[0] for a in batches))
    wide = lambda leaf: jnp.promote_types(leaf.dtype, jnp.float32)  # noqa: E731
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, wide(leaf)), shapes)
    return lax.scan(accumulate, zeros, batches)[0]
