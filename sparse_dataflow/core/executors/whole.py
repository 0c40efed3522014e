"""All sections in one program: loss and gradients on a single device or a device of a mesh."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.core import step_metrics
from sparse_dataflow.core.batch import NO_BATCH, Batch
from sparse_dataflow.core.config import remat
from sparse_dataflow.core.config.layer_groups import layer_groups, layer_model, split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.adapters import with_prompt
from sparse_dataflow.core.model.shard import UNSHARDED, Shard
from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.core.ops.attention.attention_op import self_attention
from sparse_dataflow.core.ops.attention.dot_product import document_numbers
from sparse_dataflow.core.step_metrics import Metrics
from sparse_dataflow.core.weights.kind import SIDE

if TYPE_CHECKING:
    from sparse_dataflow.core.executors.context import Context

T = TypeVar("T", jax.Array, np.ndarray)

_NO_TOKEN = -2
"""Id of no token and no padding."""

GATHERED = "gathered"
"""Checkpoint name of all-gathered params: the backward pass gathers them again."""

BLOCK_INPUT = "block_input"
"""Checkpoint name of the input of a block that is offloaded."""

_CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"
"""Primitive of jax.nn's cuDNN attention; its results, the output and the statistics of the softmax,
have no checkpoint name that its backward pass reads."""

_named = jax.checkpoint_policies.save_only_these_names(
    remat.PROJECTION_OUTPUT, remat.ATTENTION_OUTPUT
)


def _keep(primitive, *operands, **params):
    """Saves the outputs of products and of attention, with what its gradient reads."""
    return primitive.name == _CUDNN_ATTENTION or _named(primitive, *operands, **params)


_REMAT_POLICIES = {
    "keep": _keep,
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[BLOCK_INPUT, remat.PROJECTION_OUTPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


@dataclasses.dataclass(frozen=True)
class Rank:
    """What one rank, a device of a mesh, computes inside `shard_map`.

    Attributes:
      shard: the device's shard of every section.
      batch_shards: number of shards of a batch's rows.
      gather: (section name, its sharded weights, index of its layer group if a block) -> weights
        to compute with, named GATHERED if they come from other devices; None if they are whole.
      collect: gradients of a micro-batch, sharded as the params -> as accumulated.
      context: the device's tokens; None if it has all tokens of its rows.
      sub_batches: parts of the rows that pass through each block side by side.  No part depends on
        another, so the compiler can overlap collectives of one with products of the others.
    """

    shard: Shard = UNSHARDED
    batch_shards: int = 1
    gather: Callable[[str, dict, int], dict] | None = None
    collect: Callable[[dict], dict] = lambda gradients: gradients
    sub_batches: int = 1
    context: "Context | None" = None

    @property
    def attend(self) -> Callable[..., jax.Array]:
        """Attention of the device's queries; see `gpt.Block`."""
        return self.context.attend if self.context else self_attention

    def local_tokens(self, array: jax.Array) -> jax.Array:
        """Returns the device's tokens of [B, T, ...]."""
        return array if self.context is None else self.context.local_tokens(array)

    def section(self, weights: dict, name: str, group: int = 0) -> dict:
        """Returns the weights of a section to compute with; a block belongs to a layer group."""
        section = jax.tree.map(_with_gradient, weights[name], is_leaf=_traced)
        return section if self.gather is None else self.gather(name, section, group)


SINGLE_RANK = Rank()
"""A single device that does all the work."""


class Traced(NamedTuple):
    """A parameter whose gradient has its own dtype.

    jax gives a gradient the dtype of its variable, so the gradients of all layers would be float32,
    like the masters. Differentiating in `gradient` instead rounds each gradient in the backward
    pass of its layer, and no float32 gradient lives longer.

    Attributes:
      master: the parameter; constant in the differentiation.
      gradient: zeros of its shape in the gradient's dtype; never read.
    """

    master: jax.Array
    gradient: jax.Array


def _traced(leaf):
    return isinstance(leaf, Traced)


def _with_gradient(leaf):
    return _rounded(*leaf) if _traced(leaf) else leaf


@jax.custom_vjp
def _rounded(master, gradient):
    """Returns the master; its cotangent goes to `gradient`, rounded to that dtype."""
    return master


_rounded.defvjp(
    # The residual carries the dtype alone: a dtype is no legal residual.
    lambda master, gradient: (master, jnp.zeros((), gradient.dtype)),
    lambda like, cotangent: (None, cotangent.astype(like.dtype)),
)


def apply_blocks(
    config: ModelConfig,
    weights: dict,
    x_BxTxD: jax.Array,
    rank: Rank = SINGLE_RANK,
    batch: Batch = NO_BATCH,
) -> tuple[jax.Array, step_metrics.Metrics]:
    """Runs all blocks on [B, T, D].

    A rank that shares sequences has T / shards tokens, with positions, and documents of all T.

    Fixed layouts are specialised at trace time. Blocks are unrolled if `unrolls` says so.
    Otherwise each layer group is scanned, so that compile time does not depend on depth; with a
    remat that differs between blocks, each of its repeated patterns is.

    Layers that share a block read the same parameters; their gradients are summed in float32.

    Returns:
      (residual stream [B, T, D], metrics of the blocks stacked over the layers).
    """
    metrics = []
    unrolled = unrolls(config, weights, rank)
    # jax.checkpoint traces concrete tables, whose groups would be lost with them.
    blocks = stacks.with_groups(weights["blocks"])
    kinds = remat.kinds(config.remat, config.num_layers)
    models = [layer_model(config, layer) for layer in range(config.num_layers)]
    xs, batches = sub_batches(rank, x_BxTxD, batch.for_blocks())
    groups = zip(layer_groups(config), split_groups(blocks), strict=True)
    for group, (layer_group, stacked) in enumerate(groups):
        layers = layer_group.layers
        group_kinds = tuple(zip(kinds, models))[layers.start : layers.stop]
        run = {
            each: _layer(each[1], rank, group, batches, each[0])
            for each in dict.fromkeys(group_kinds)
        }
        if config.shared_layers:
            # Outside of the loop: gradients of all layers add up in float32 and are rounded once.
            shared = jax.tree.map(lambda t: _with_gradient(t)[0], stacked, is_leaf=_traced)
            run = {each: _with_block(apply, shared) for each, apply in run.items()}
            stacked = ()
        if unrolled:
            for i, layer in enumerate(_unstack(stacked) or [()] * config.num_layers):
                xs, layer_metrics = run[group_kinds[i]](xs, layer)
                # [1, ...], as a scan stacks metrics over its layers.
                metrics.append(jax.tree.map(lambda leaf: leaf[None], layer_metrics))
        else:
            if len({model for _, model in group_kinds}) > 1:
                loops = remat.segments(group_kinds)
            else:
                loops = tuple(
                    (tuple((kind, models[layers.start]) for kind in pattern), count)
                    for pattern, count in remat.loops(config.remat, config.num_layers, layers)
                )
            xs, loop_metrics = _scan(run, loops, xs, stacked)
            metrics += loop_metrics
    return jnp.concatenate(xs), jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *metrics)


def sub_batches(
    rank: Rank, x_BxTxD: jax.Array, batch: Batch
) -> tuple[list[jax.Array], list[Batch]]:
    """Returns the residual stream and the batch of each of the rank's `sub_batches`."""
    # An evaluation may have fewer rows than parts.
    count = math.gcd(rank.sub_batches, len(x_BxTxD))
    splits = {name: _split(array, count) for name, array in batch.rows.items()}
    rows = [{name: split[i] for name, split in splits.items()} for i in range(count)]
    return _split(x_BxTxD, count), list(map(batch.with_rows, rows))


def _split(rows, count):
    return [rows] if count == 1 else jnp.split(rows, count)


def run_sub_batches(
    block: Callable[[jax.Array, Batch], tuple[jax.Array, Metrics]],
    xs: list[jax.Array],
    batches: list[Batch],
) -> tuple[list[jax.Array], Metrics]:
    """Applies a block to each of `sub_batches`; returns their rows, and the metrics of all."""
    outputs = [block(x, batch) for x, batch in zip(xs, batches, strict=True)]
    metrics = functools.reduce(step_metrics.combined, (metrics for _, metrics in outputs))
    return [x for x, _ in outputs], metrics


def _scan(run, loops, x, stacked):
    """Scans the layers of a group, a repeated pattern of (kind of remat, model) after the other.

    A single pattern needs no copy of the stacked arrays; several slice them.

    Returns:
      (x, list of metrics stacked over layers, in order).
    """
    if len(loops) == 1 and len(loops[0][0]) == 1:
        [((kind,), count)] = loops
        x, loop_metrics = lax.scan(run[kind], x, stacked, count)
        return x, [loop_metrics]
    metrics, start = [], 0
    for pattern, repeats in loops:
        stop = start + len(pattern) * repeats
        period = len(pattern)

        # An iteration runs one pattern.  Six layers of a pattern of two become [3, 2, ...]:
        # iteration i has layers 2 i and 2 i + 1.  A loop over all layers needs no slice, which
        # would copy weights.
        def cut(leaf, start=start, stop=stop, period=period):
            part = leaf if (start, stop) == (0, len(leaf)) else leaf[start:stop]
            return part.reshape(-1, period, *leaf.shape[1:])

        def body(x, layers, pattern=pattern):
            outputs = []
            for i, kind in enumerate(pattern):
                x, output = run[kind](x, jax.tree.map(lambda leaf, i=i: leaf[i], layers))
                outputs.append(output)
            return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

        x, loop_metrics = lax.scan(body, x, jax.tree.map(cut, stacked), repeats)
        metrics.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), loop_metrics))
        start = stop
    return x, metrics


def _layer(config, rank, group, batches, kind):
    """Returns a function (xs, weights of a layer) -> (xs, metrics), with the remat policy of a
    kind; `xs` and `batches` are lists over parts of the rows."""

    def run(xs, layer):
        weights = rank.section({"blocks": layer}, "blocks", group)
        block = functools.partial(gpt.block, config, weights)
        return run_sub_batches(lambda x, at: block(x, at, rank.shard, rank.attend), xs, batches)

    if kind != "none":
        # A GPU scans these layers: recomputation is in another loop, so nothing can merge it with
        # the forward pass, and barriers against that only end fusions.
        return _checkpointed(run, kind, prevent_cse=not dispatch.on(platforms.SCANNED_LAYERS))
    if rank.gather is not None:
        # Kept, gathered weights of all layers would be the whole model on each device.
        policy = jax.checkpoint_policies.save_anything_except_these_names(
            GATHERED, remat.KEYS_VALUES
        )
        return jax.checkpoint(run, policy=policy)
    return run


def _with_block(run, block):
    """Returns `run` of a layer whose parameters are those of a shared block."""
    return lambda xs, _: run(xs, block)


def rematerialised(kind: str, layer: Callable) -> Callable:
    """Wraps a layer in `jax.checkpoint` with the policy of a kind of `config.remat`."""
    return layer if kind == "none" else _checkpointed(layer, kind)


def _checkpointed(layer, kind, prevent_cse=True):
    def named(x, *rest):
        name = functools.partial(checkpoint_name, name=BLOCK_INPUT)
        return layer(jax.tree.map(name, x), *rest)

    # Only a name lets a policy move the input, which jax.checkpoint else saves on the device.
    chosen = named if kind == "offload" else layer
    return jax.checkpoint(chosen, policy=_REMAT_POLICIES[kind], prevent_cse=prevent_cse)


UNROLL_LAYERS = 16
"""Maximum number of layers that a CPU program unrolls, with fixed layouts."""

UNROLL_CHANGING_LAYERS = 8
"""Maximum number of layers that a CPU program unrolls, with layouts that change."""

UNROLL_CHIP_LAYERS = 48
"""Maximum number of layers that a program of one GPU or TPU unrolls."""


def unrolls(config: ModelConfig, weights: object, rank: Rank = SINGLE_RANK) -> bool:
    """Returns whether `apply_blocks` unrolls: for a shallow model on a CPU, and on a single GPU or
    TPU where no layer recomputes.

    A loop on a CPU copies its stacked operands, and cannot be specialised to fixed layouts.  On
    other chips it copies what kernels write into stacks for the backward pass, and a TPU's read.
    With recomputation it saves little, and each unrolled layer copies its weights.
    """
    if not dispatch.on(platforms.HOST):
        keeps_all = set(remat.kinds(config.remat, config.num_layers)) == {"none"}
        return rank is SINGLE_RANK and keeps_all and config.num_layers <= UNROLL_CHIP_LAYERS
    deepest = UNROLL_CHANGING_LAYERS if stacks.has_changing_layouts(weights) else UNROLL_LAYERS
    return config.num_layers <= deepest


def _unstack(params):
    """Returns trees per layer; `split` transposes to one concatenate, indexing to L additions.

    Numpy arrays stay what they are: constants.
    """
    leaves, structure = jax.tree.flatten(params)
    columns = [
        list(leaf)
        if isinstance(leaf, np.ndarray)
        else [p[0] for p in lax.split(leaf, [1] * len(leaf))]
        for leaf in leaves
    ]
    return [jax.tree.unflatten(structure, layer) for layer in zip(*columns)]


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """How the gradient of a batch is summed.

    Attributes:
      micro_batches: parts of the rows, whose gradients add up in float32.
      dtype: of the gradient of a part.
    """

    micro_batches: int = 1
    dtype: str = "float32"


def loss(config: ModelConfig, weights: dict, batch: Batch, rank: Rank = SINGLE_RANK):
    """Returns the rank's share of the sum of weighted next-token losses: float32 [], in nats.

    Args:
      weights: see `stacks.weights_of`.
      batch: with weights of the targets.
      rank: device whose rows and weights these are.
    """
    return measured_loss(config, weights, batch, rank)[0]


def evaluation(
    config: ModelConfig, weights: dict, batch: Batch, rank: Rank = SINGLE_RANK
) -> Metrics:
    """Returns the rank's share of the metrics of the head, "loss" and what it scores besides."""
    return evaluated(measured_loss(config, weights, batch, rank, scored=True)[1])


def evaluated(metrics: Metrics) -> Metrics:
    """Returns those metrics of sections that an evaluation has."""
    return {name: metrics[name] for name in ("loss", "correct") if name in metrics}


def measured_loss(
    config: ModelConfig,
    weights: dict,
    batch: Batch,
    rank: Rank = SINGLE_RANK,
    padded: bool = False,
    scored: bool = False,
) -> tuple[jax.Array, Metrics]:
    """Returns `loss` and the rank's metrics; a teacher changes the loss as in `gpt.head_loss`,
    which also explains `scored`.

    Where rows are `padded`, ends of text before an end of text have no experts.
    """
    embed, head = (rank.section(weights, name) for name in ("embed", "head"))
    batch = local_batch(config, batch, rank, padded)
    x, table, metrics = _residual(config, embed, weights, batch, rank)
    with jax.named_scope("head"):
        total, head_metrics = gpt.head_loss(config, head, table, x, batch, rank.shard, scored)
    return total, {**head_metrics, **metrics}


def local_batch(
    config: ModelConfig, batch: Batch, rank: Rank = SINGLE_RANK, padded: bool = False
) -> Batch:
    """Returns the tokens of a rank behind the prompt vectors of the model, with all that the
    sections read of them but `routed`.

    Args:
      batch: all tokens of the rank's rows.
      rank: device whose rows these are.
      padded: whether ends of text before an end of text are padding, which has no experts.
    """
    batch = with_prompt(config, batch)
    if config.mask_documents and batch.documents is None:
        documents = document_numbers(batch.tokens, config.vocab_size - 1)
        batch = dataclasses.replace(batch, documents=documents)
    if config.experts and padded:
        batch = dataclasses.replace(batch, real=_real(config, batch))
    if rank.context is None:
        return batch
    length = batch.tokens.shape[1]
    config.check_context(length)
    # Attention reads the documents of all tokens.
    local = {name: rank.local_tokens(a) for name, a in batch.rows.items() if name != "documents"}
    return dataclasses.replace(batch.with_rows(local), positions=rank.context.positions(length))


def _residual(config, embed, weights, batch, rank):
    """Returns the residual stream [B, T, D] after all blocks, the token embedding, and the blocks'
    metrics."""
    with jax.named_scope("embed"):
        x, table = gpt.embed_and_table(config, embed, batch.tokens, batch, rank.shard)
    with jax.named_scope("blocks"):
        if batch.features is not None:
            return _replayed(config, weights, batch.features, rank), table, {}
        x, metrics = apply_blocks(config, weights, x, rank, batch)
    return x, table, metrics


def _replayed(config, weights, features, rank):
    """Returns the residual stream of a side network that reads stored features."""
    from sparse_dataflow.core.model import side

    # [B, T, L + 1, D] -> the input of each layer, and that of the head.
    *inputs, x = jnp.moveaxis(side.unpacked(features, jnp.dtype(config.compute_dtype)), 2, 0)
    state = jnp.zeros_like(x[..., : config.side_width])
    arrays = [each for group in split_groups(weights["blocks"]) for each in _unstack(group[SIDE])]
    for layer_input, layer in zip(inputs, arrays, strict=True):
        section = rank.section({"blocks": layer}, "blocks")
        state = side.state_after(section, layer_input, state, rank.shard)
    return jnp.concatenate([x, state], axis=-1)


def layer_inputs(config: ModelConfig, weights: dict, batch: Batch) -> list[jax.Array]:
    """Returns the residual stream [B, T, D] before each layer and after the last one."""
    batch = local_batch(config, batch)
    inputs = [gpt.embed(config, weights["embed"], batch.tokens, batch)]
    layers = itertools.chain.from_iterable(
        map(_unstack, split_groups(stacks.with_groups(weights["blocks"])))
    )
    for number, layer in enumerate(layers):
        model = layer_model(config, number)
        inputs.append(gpt.block(model, layer, inputs[-1], batch.for_blocks())[0])
    return inputs


def routed_tokens(
    config: ModelConfig, batch: Batch, rank: Rank = SINGLE_RANK, padded: bool = False
) -> Any:
    """Returns the number of tokens of a batch, on all devices, that have experts; at least 1."""
    if not padded:
        return batch.targets.size * rank.batch_shards
    # Each device counts its own tokens, so that each counts once in the sum.
    count, axes = rank.local_tokens(_real(config, batch)).sum(), rank.shard.row_axes
    return jnp.maximum(lax.psum(count, axes) if axes else count, 1)


def micro_batches(
    config: ModelConfig, batch: Batch, count: int, rank: Rank = SINGLE_RANK, padded: bool = False
) -> Batch:
    """Returns the `local_batch` of a rank as `count` micro-batches.

    What has rows [B, ...] becomes [count, B / count, ...].
    """
    split = functools.partial(split_rows, config, count=count)
    local = local_batch(config, batch, rank, padded).map_rows(split)
    if not config.experts:
        return local
    routed = jnp.float32(routed_tokens(config, batch, rank, padded))
    return dataclasses.replace(local, routed=routed)


def split_rows(config: ModelConfig, rows: T, count: int) -> T:
    """Splits rows [B, ...] into micro-batches [count, B / count, ...].

    The load of experts is that of a micro-batch.  So each takes every `count`th row then: these are
    the same on any mesh, whose devices have consecutive rows.
    """
    if not config.experts:
        return rows.reshape(count, -1, *rows.shape[1:])
    return rows.reshape(-1, count, *rows.shape[1:]).swapaxes(0, 1)


def _real(config, batch):
    """Returns whether each input is no padding, bool [B, T]: the end of text before another."""
    end = config.vocab_size - 1
    ends = (batch.tokens == end) & (batch.targets == end)
    # The target of a bidirectional model is the token itself, and no window of it is padded.
    return jnp.ones_like(ends) if config.bidirectional else ~ends


def hidden_states(config: ModelConfig, weights: dict, tokens: jax.Array) -> jax.Array:
    """Returns the normalised hidden states [B, T, D] of int32 [B, T] tokens."""
    batch = local_batch(config, Batch(tokens))
    x, _, _ = _residual(config, weights["embed"], weights, batch, SINGLE_RANK)
    return gpt.head(config, weights["head"], x)[:, config.prompt_vectors :]


def token_scores(
    config: ModelConfig,
    weights: dict,
    batch: Batch,
    places: jax.Array,
    targets: jax.Array,
    rank: Rank = SINGLE_RANK,
) -> tuple[jax.Array, jax.Array]:
    """Returns the losses of some next tokens, and whether each has the highest probability.

    Args:
      batch: tokens.  Ids below 0 are padding, which no token of a bidirectional model sees.
      places: int32 [S], indices into the B * T tokens; the others cost no logits.
      targets: int32 [S], a next token of each place, which may occur several times.
      rank: device whose rows and weights these are.

    Returns:
      (float32 [S] losses in nats, bool [S]).
    """
    embed, head = (rank.section(weights, name) for name in ("embed", "head"))
    if config.bidirectional:
        batch = _without_padding(config, batch)
    # Each row has the prompt vectors in front of its tokens.
    places = places + config.prompt_vectors * (1 + places // batch.tokens.shape[1])
    local = local_batch(config, batch, rank)
    x, _, _ = _residual(config, embed, weights, local, rank)
    if rank.context is not None:
        # Places count in the whole sequence: all tokens are put in order, and cut over "tensor"
        # again.
        x = rank.shard.slice(rank.context.gather(rank.shard.gather(x)), axis=1)
    return gpt.head_scores(config, head, embed["tokens"], x, places, targets, rank.shard)


def _without_padding(config, batch):
    """Returns the batch with padding as a document of its own."""
    end = config.vocab_size - 1 if config.mask_documents else _NO_TOKEN
    # Documents count from 0, so no token of one sees the padding.
    documents = jnp.where(batch.tokens < 0, -1, document_numbers(batch.tokens, end))
    tokens = jnp.maximum(batch.tokens, 0)
    return dataclasses.replace(batch, tokens=tokens, documents=documents)


def logits(config: ModelConfig, weights: dict, tokens: jax.Array) -> jax.Array:
    """Returns float32 [B, T, vocab] logits for int32 [B, T] tokens."""
    batch = local_batch(config, Batch(tokens))
    x, _, _ = _residual(config, weights["embed"], weights, batch, SINGLE_RANK)
    return gpt.logits(config, weights, x[:, config.prompt_vectors :])


def loss_and_gradients(
    config: ModelConfig,
    params: dict,
    rest: object,
    batch: Batch,
    how: Accumulation = Accumulation(),
    rank: Rank = SINGLE_RANK,
) -> tuple[Metrics, dict]:
    """Returns the metrics of a batch and the gradient of its loss, a tree like the trained params.

    The loss is the mean over the targets, or their sum by the batch's weights.  A rank gets its
    share of metrics and gradients, the latter as returned by `rank.collect`.  With a teacher,
    losses are those of `gpt.head_loss`.

    For a model with experts, the gradient is that of the loss plus `experts.auxiliary_loss`, which
    is divided by the tokens of the batch that are no padding.

    Args:
      params: what is trained.
      rest: what is not, see `model.partition`; () for nothing.
    """
    # Batches whose targets have weights are rows of text, padded at their end.
    padded, batch = batch.token_weights is not None, batch.weighted(rank.batch_shards)

    def micro_batch(params, rows):
        def share(gradients):
            weights = stacks.weights_of(config, jax.tree.map(Traced, params, gradients), rest)
            value, metrics = measured_loss(config, weights, batch.with_rows(rows), rank, padded)
            if config.experts:
                from sparse_dataflow.core.model.experts import auxiliary_loss

                value += auxiliary_loss(config, metrics) / (routed * rank.shard.devices)
            return value, metrics

        # Never read, so the compiler removes them; see `Traced`.
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, how.dtype), params)
        (_, metrics), gradients = jax.value_and_grad(share, has_aux=True)(zeros)
        unrolled = not dispatch.on(platforms.HOST) and unrolls(config, rest, rank)
        if unrolled and gradients.get("blocks"):
            # Else each pass of the optimizer reads the layers' gradients apart.
            gradients = {**gradients, "blocks": lax.optimization_barrier(gradients["blocks"])}
        return metrics, rank.collect(gradients)

    routed = routed_tokens(config, batch, rank, padded) if config.experts else 0
    if how.micro_batches == 1:
        return micro_batch(params, batch.rows)
    split = batch.map_rows(lambda rows: split_rows(config, rows, how.micro_batches)).rows

    def accumulate(total, rows):
        return step_metrics.combined(total, micro_batch(params, rows)), None

    # The sums begin as zeros of these shapes: the first micro-batch outside of the loop would be a
    # second copy of the program.
    shapes = jax.eval_shape(micro_batch, params, {name: rows[0] for name, rows in split.items()})
    return lax.scan(accumulate, step_metrics.empty(shapes), split)[0]
