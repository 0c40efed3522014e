"""The relay's programs: one per kind of section and direction, independent of depth.

Layers that differ in density or attention (`config.layer_groups.layer_models`) have block programs
of their own. A program takes the device's copy of one section's parameters and all micro-batches
of a step.

Shapes in names: M micro-batches, B their batch, T tokens, D d_model, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from sparse_dataflow.core import step_metrics
from sparse_dataflow.core.batch import NO_BATCH, Batch
from sparse_dataflow.core.config.layer_groups import group_index, layer_model, split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.whole import evaluated, micro_batches
from sparse_dataflow.core.layouts.layout import Groups
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.partition import (
    merged,
    trained_and_rest,
    without_left_out,
)
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.core.model.shard import UNSHARDED
from sparse_dataflow.core.weights.kind import ROUTER
from sparse_dataflow.files.errors import UserError

DATA_AXIS = "data"


T = TypeVar("T")

Pair = tuple[dict, dict]
"""What is trained of a section, and what is not."""


class Options(NamedTuple):
    """What a training adds to the arguments of the programs.

    Attributes:
      padded: whether rows of text are padded; see `whole.local_batch`.
      adapted: whether adapters alone are trained; the other weights are frozen.
      teacher_width: features of a teacher's hidden states; 0 without a teacher.
    """

    padded: bool = False
    adapted: bool = False
    teacher_width: int = 0


NO_OPTIONS = Options()


class Programs(NamedTuple, Generic[T]):
    """The device programs of a training step, or a T for each of them.

    The rows of a batch are [M, B, ...]; blocks get it without what the others alone read.

    Attributes:
      embed: (`section_weights`, int32 inputs [M, B, T]) -> x [M, B, T, D].
      forward: (`section_weights` of a block, x, batch) -> (x after the block, metrics).
      head: (`section_weights`, `tied_output`, x, batch) -> (metrics, dx, (gradient of
        the head's params, of the tied output's)).
      backward: (`section_weights` of a block, x, dy, batch) -> (dx, gradient of its params);
        recomputes the forward pass and donates dy.
      embed_backward: (inputs, dx, the head's gradient of the tied output) -> gradient of the embed
        section's params; the sum of both gradients of a tied embedding.
    """

    embed: T
    forward: T
    head: T
    backward: T
    embed_backward: T


class EvalPrograms(NamedTuple, Generic[T]):
    """The device programs of an evaluation, as in `Programs`; without metrics, `head` returns the
    loss alone."""

    embed: T
    forward: T
    head: T


def device_dtype(model: ModelConfig, path: tuple) -> jnp.dtype:
    """Returns the dtype of the device's copy of a parameter: float32 for norms and routers, else
    the compute dtype."""
    names = [getattr(key, "key", "") for key in path]
    wide = ROUTER in names or any("norm" in name for name in names)
    return jnp.dtype("float32" if wide else model.compute_dtype)


def device_params(model: ModelConfig, params: dict) -> dict:
    """Returns shapes and dtypes of the device's copies of parameters."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, device_dtype(model, path)), params
    )


def section_weights(model: ModelConfig, adapted: bool = False) -> tuple[Pair, ...]:
    """Returns the shapes of the device's copies of (embed, one block, head), without layouts.

    Args:
      model: model config.
      adapted: whether adapters alone are trained.
    """

    def draw():
        params: dict = gpt.init(model, jax.random.key(0))
        trained, rest = trained_and_rest(model, params, 1.0 if adapted else None)
        return trained, without_left_out(rest) or {}

    params, rest = jax.eval_shape(draw)
    weights = {
        name: (device_params(model, params.get(name, {})), rest.get(name, {}))
        for name in ("embed", "blocks", "head")
    }
    # Of one block: without the axis of layers.
    block = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), weights["blocks"]
    )
    return weights["embed"], block, weights["head"]


def tied_output(model: ModelConfig, embed: Pair) -> Pair:
    """Returns the output layer that the head takes from "embed"; no weights if it has its own."""

    def tokens(tree):
        tied = model.tied_embeddings and tree and "tokens" in tree
        return {"tokens": tree["tokens"]} if tied else {}

    params, rest = embed
    return tokens(params), tokens(rest)


def functions(model: ModelConfig, adapted: bool = False) -> Programs[Callable]:
    """Returns the training programs as pure functions; arguments as in `section_weights`."""
    embed_weights = section_weights(model, adapted)[0]

    def embed(weights, inputs):
        params = merged(*weights)
        return _map(lambda tokens, _: gpt.embed(model, params, tokens), NO_BATCH, inputs)

    def forward(weights, x, batch):
        block = functools.partial(gpt.block, model, layer_weights(model, merged(*weights)))
        return _accumulated(block, batch, x)

    def head(weights, tied, x, batch):
        (params, rest), (tied_params, tied_rest) = weights, tied

        def micro_batch(x, batch):
            def loss(params, tied_params, x):
                output = merged(tied_params, tied_rest).get("tokens", ())
                return gpt.head_loss(model, merged(params, rest), output, x, batch)

            # One pass gives the loss, the gradients of the head, and dx for the last block.
            value, pull, metrics = jax.vjp(loss, params, tied_params, x, has_aux=True)
            *gradients, dx = pull(jnp.ones_like(value))
            return dx, (metrics, tuple(gradients))

        dx, (metrics, gradients) = _accumulated(micro_batch, batch, x)
        return metrics, dx, _cast_like((params, tied_params), gradients)

    def backward(weights, x, dy, batch):
        params, rest = weights

        def micro_batch(x, dy, batch):
            def block(params, x):
                layer = layer_weights(model, merged(params, rest))
                x, metrics = gpt.block(model, layer, x, batch)
                return gpt.with_auxiliary_losses(model, x, metrics, batch, UNSHARDED)

            # Runs the forward pass again: of the first one, only the input of the block was kept.
            _, pull = jax.vjp(block, params, x)
            gradient, dx = pull(dy)
            return dx, gradient

        dx, gradient = _accumulated(micro_batch, batch, x, dy)
        return dx, _cast_like(params, gradient)

    def embed_backward(inputs, dx, tied_gradient):
        # Embedding is linear in its params, so its gradient does not depend on them.
        zeros, rest = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), embed_weights)

        def micro_batch(tokens, dx, _):
            _, pull = jax.vjp(lambda p: gpt.embed(model, merged(p, rest), tokens), zeros)
            return (), pull(dx)[0]

        gradient = dict(_accumulated(micro_batch, NO_BATCH, inputs, dx)[1])
        # A tied embedding is read at both ends, so its gradient is the sum of both.
        for name, other in tied_gradient.items():
            gradient[name] += other.astype(gradient[name].dtype)
        return _cast_like(zeros, gradient)

    return Programs(embed, forward, head, backward, embed_backward)


def eval_functions(model: ModelConfig, adapted: bool = False) -> EvalPrograms[Callable]:
    """Returns the evaluation programs as pure functions; arguments as in `functions`."""
    model = model.dropless()
    training = functions(model, adapted)

    def forward(weights, x, batch):
        linears = layer_weights(model, merged(*weights))
        return _map(lambda x, at: gpt.block(model, linears, x, at)[0], batch, x)

    def head(weights, tied, x, batch):
        params, output = merged(*weights), merged(*tied).get("tokens", ())

        def metrics(x, batch):
            _, metrics = gpt.head_loss(model, params, output, x, batch, scored=True)
            return (), evaluated(metrics)

        return _accumulated(metrics, batch, x)[1]

    return EvalPrograms(training.embed, forward, head)


def arguments(
    model: ModelConfig,
    shape: tuple[int, int, int],
    groups: Mapping[str, Groups | None] = {},
    options: Options = NO_OPTIONS,
) -> Programs[tuple]:
    """Returns the shapes and dtypes of each program's arguments.

    Args:
      model: model config of any depth; its first layer gives the shapes of the layouts.
      shape: (micro-batches, sequences in each, tokens in a sequence).
      groups: projection -> groups of its layout, which the programs are specialised to.
      options: of the training.
    """
    embed, block, head = section_weights(model, options.adapted)
    batch = batch_shapes(model, shape, options)
    dims = *batch.tokens.shape, model.d_model + model.side_width
    x = jax.ShapeDtypeStruct(dims, jnp.dtype(model.compute_dtype))
    stored = stacks.stored_layouts(dataclasses.replace(model, num_layers=1))

    def abstract(place, layout):
        layer = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape[1:], t.dtype), layout)
        return layer._replace(groups=groups.get(place.projection))

    if stored:
        layouts = stacks.map_placed_layouts(abstract, stored)
        block = block[0], merged(block[1], layouts["blocks"])
    tied = tied_output(model, embed)
    return Programs(
        embed=(embed, batch.tokens),
        forward=(block, x, batch.for_blocks()),
        head=(head, tied, x, batch),
        backward=(block, x, x, batch.for_blocks()),
        embed_backward=(batch.tokens, x, tied[0]),
    )


def batch_shapes(model: ModelConfig, shape: tuple[int, int, int], options: Options) -> Batch:
    """Returns the shapes of `whole.micro_batches`; arguments as in `arguments`."""
    count, rows, length = shape
    ids = jax.ShapeDtypeStruct((count * rows, length), jnp.int32)
    batch = Batch(ids, ids, jax.ShapeDtypeStruct((count * rows, length), jnp.float32))
    if options.teacher_width:
        dtype = jnp.dtype(model.compute_dtype)
        sides = (
            (count * rows, length, options.teacher_width),
            (model.vocab_size, options.teacher_width),
        )
        hidden, output = (jax.eval_shape(lambda s=side: jnp.zeros(s, dtype)) for side in sides)
        batch = dataclasses.replace(batch, teacher_hidden=hidden, teacher=(output, jnp.float32(0)))
    split = functools.partial(micro_batches, model, count=count, padded=options.padded)
    return jax.eval_shape(split, batch)


def lower(
    programs: Programs | EvalPrograms,
    arguments: Programs[tuple],
    mesh: Mesh | None = None,
    **options,
) -> Programs | EvalPrograms:
    """Lowers each program for its arguments.

    With a mesh, `DATA_AXIS` shards the rows of every micro-batch, params and gradients are
    replicated, and the programs reduce the gradients.

    Args:
      programs: result of `functions` or `eval_functions`.
      arguments: result of `arguments`.
      mesh: mesh of the devices; the default device if None.
      options: options of `jax.stages.Traced.lower`.
    """
    lowered = {}
    for name, function in programs._asdict().items():
        structs, out = getattr(arguments, name), None
        if mesh is not None:
            structs, out = _sharded(name, structs, mesh, isinstance(programs, EvalPrograms))
        # dx has the shape of dy and takes its memory: there is one such buffer at any depth.
        donated = (2,) if name == "backward" else ()
        jitted = jax.jit(function, donate_argnums=donated, out_shardings=out)
        lowered[name] = jitted.trace(*structs).lower(**options)
    return type(programs)(**lowered)


@functools.cache
def layer_kinds(model: ModelConfig, changing: bool) -> tuple[tuple[ModelConfig, frozenset], ...]:
    """Returns for each layer what its programs depend on: its model, and its layouts' groups.

    Layers of one density that are not neighbours may have other groups.
    """
    layouts = stacks.stored_layouts(model)
    layouts = layouts if changing else stacks.with_groups(layouts)
    # Groups are part of the compiled program (its loops have their sizes), so they are part of its
    # key.
    structures = [
        frozenset((name, stacked.groups) for name, stacked in group.items())
        for group in split_groups(stacks.layouts_by_name(layouts))
    ]
    # A block's program does not depend on depth, so its model has depth 1. A model that grows in
    # depth compiles nothing again.
    one = functools.partial(dataclasses.replace, num_layers=1, shared_layers=False)
    return tuple(
        (one(layer_model(model, layer)), structures[group_index(model, layer)])
        for layer in range(model.num_layers)
    )


def compile_groups(
    model: ModelConfig,
    shape: tuple[int, int, int],
    mesh: Mesh | None = None,
    evaluation: bool = False,
    changing: bool = True,
    options: Options = NO_OPTIONS,
) -> tuple[Programs[Compiled] | EvalPrograms[Compiled], ...]:
    """Compiles the programs of each of `layer_kinds` for the default backend.

    Programs are cached; models that differ in depth alone share them.

    Args:
      shape: (micro-batches, sequences in each, tokens in a sequence).
      mesh: as in `lower`.
      evaluation: whether to compile the evaluation programs.
      changing: whether layouts may change; otherwise the programs are specialised to their groups.
      options: of the training.
    """
    first, *others = dict.fromkeys(layer_kinds(model, changing))
    arguments = shape, mesh, evaluation, options
    # Embedding and head are compiled once, with the first kind of layer.
    shared = _compiled(*first, *arguments)
    return shared, *(_compiled(*each, *arguments, shared) for each in others)


@functools.cache
def _compiled(model, structure, shape, mesh, evaluation, options, shared=None):
    """Compiles a model of equal layers; only its block programs if others are `shared`.

    `structure` has (projection, groups of its tables).
    """
    pure = (eval_functions if evaluation else functions)(model, options.adapted)
    programs = lower(pure, arguments(model, shape, dict(structure), options), mesh)
    compiled = {
        name: program.compile()
        for name, program in programs._asdict().items()
        if shared is None or name in ("forward", "backward")
    }
    return type(programs)(**compiled) if shared is None else shared._replace(**compiled)


def refuse_unsupported(training: TrainingConfig, devices: int) -> None:
    """Refuses micro-batches that the devices do not divide.

    Raises:
      UserError: naming the legal values.
    """
    rows = training.batch // training.micro_batches
    if rows % devices:
        raise UserError(
            f"A micro-batch of {rows} sequences cannot be sharded over {devices} devices; legal: a "
            f"--batch and a training.micro_batches whose quotient is a multiple of {devices}."
        )


def data_shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Returns the shardings of ([M, B, ...] arrays, params) on a mesh."""
    rows = NamedSharding(mesh, PartitionSpec(None, DATA_AXIS))
    return rows, NamedSharding(mesh, PartitionSpec())


def _sharded(name, structs, mesh, evaluation):
    rows, replicated = data_shardings(mesh)
    # Numbers of the arguments that all devices have whole: params, and the tied gradient.
    params = {"embed": [0], "forward": [0], "head": [0, 1], "backward": [0], "embed_backward": [2]}

    def to(sharding):
        return lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def placed(number, tree):
        if isinstance(tree, Batch):
            return jax.tree.map(to(replicated), tree).map_rows(to(rows))
        return jax.tree.map(to(replicated if number in params[name] else rows), tree)

    structs = tuple(placed(number, tree) for number, tree in enumerate(structs))
    out = {
        "embed": rows,
        "forward": rows if evaluation else (rows, replicated),
        "head": replicated if evaluation else (replicated, rows, replicated),
        "backward": (rows, replicated),
        "embed_backward": replicated,
    }[name]
    return structs, out


def _map(function, batch, *arrays):
    """Maps `function` over micro-batches and their arrays; without a loop for a single one."""
    if len(arrays[0]) == 1:
        return function(*(array[0] for array in arrays), _first(batch))[None]
    return lax.map(
        lambda micro: function(*micro[0], batch.with_rows(micro[1])), (arrays, batch.rows)
    )


def _accumulated(function, batch, *arrays):
    """Maps `function` -> (y, gradients or metrics) as `_map` does; returns (all y, the others
    combined)."""
    if len(arrays[0]) == 1:
        y, one = function(*(array[0] for array in arrays), _first(batch))
        return jax.tree.map(lambda leaf: leaf[None], y), one
    # Gradients are carried and y is stacked: so one gradient exists, not one for each micro-batch.
    first = jax.eval_shape(function, *(array[0] for array in arrays), _first(batch))[1]

    def accumulate(total, micro):
        y, more = function(*micro[0], batch.with_rows(micro[1]))
        return step_metrics.combined(total, more), y

    total, y = lax.scan(accumulate, step_metrics.empty(first), (arrays, batch.rows))
    return y, total


def _first(batch):
    return batch.map_rows(lambda rows: rows[0])


def _cast_like(params, gradient):
    """Casts gradients to the dtypes of the params."""
    return jax.tree.map(lambda p, g: g.astype(p.dtype), params, gradient)
