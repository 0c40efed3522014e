"""The relay's programs: one per kind of section and direction, independent of depth.

Layers that differ in density or attention (`config.layer_groups.layer_models`) have block programs
of their own. A program takes the device's copy of one section's parameters and all micro-batches
of a step.

Shapes in names: M micro-batches, B their batch, T tokens, D d_model, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from sparse_dataflow.core import step_metrics
from sparse_dataflow.core.config.layer_groups import group_index, layer_model, split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.layouts.layout import Groups
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.experts import ROUTER
from sparse_dataflow.core.model.stacks import ModelWeights
from sparse_dataflow.files.errors import UserError

DATA_AXIS = "data"


T = TypeVar("T")


class Programs(NamedTuple, Generic[T]):
    """The device programs of a training step, or a T for each of them.

    Attributes:
      embed: (embed params, int32 inputs [M, B, T]) -> x [M, B, T, D].
      forward: (`ModelWeights` of a block, x) -> (x after the block, metrics).
      head: (head params, embedding [V, D] if tied else (), x, int32 targets, float32 weights
        [M, B, T]) -> (metrics, dx, (gradient of the head, of the embedding)).
      backward: (`ModelWeights` of a block, x, dy) -> (dx, gradient of its params); recomputes the
        forward pass and donates dy.
      embed_backward: (inputs, dx, the head's gradient of the embedding) -> gradient of the embed
        section; the sum of both gradients of a tied embedding.
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


def device_params(model: ModelConfig, params: Any) -> Any:
    """Returns shapes and dtypes of the device's copies of parameters."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, device_dtype(model, path)), params
    )


def section_shapes(model: ModelConfig) -> tuple[Any, Any, Any]:
    """Returns the shapes of the float32 params of (embed, one block, head)."""
    shapes = jax.eval_shape(lambda: gpt.init(model, jax.random.key(0)))
    block = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), shapes["blocks"]
    )
    return shapes["embed"], block, shapes["head"]


def functions(model: ModelConfig) -> Programs[Callable]:
    """Returns the training programs as pure functions."""
    embed_params = device_params(model, section_shapes(model)[0])

    def embed(params, inputs):
        return _map(lambda tokens: gpt.embed(model, params, tokens), inputs)

    def forward(weights, x):
        block = functools.partial(gpt.measured_block, model, weights.linears(model))
        return _accumulated(block, x)

    def head(params, embedding, x, targets, weights):
        def micro_batch(x, targets, weights):
            loss, pull, metrics = jax.vjp(
                lambda p, e, x: gpt.head_loss(model, p, e, x, targets, weights),
                params,
                embedding,
                x,
                has_aux=True,
            )
            head, embedding_gradient, dx = pull(jnp.ones_like(loss))
            return dx, (metrics, head, embedding_gradient)

        dx, (metrics, head, embedding_gradient) = _accumulated(micro_batch, x, targets, weights)
        return metrics, dx, _cast_like((params, embedding), (head, embedding_gradient))

    def backward(weights, x, dy):
        def micro_batch(x, dy):
            def block(params, x):
                layer = dataclasses.replace(weights, params=params)
                return gpt.trained_block(model, layer.linears(model), x, tokens)[0]

            _, pull = jax.vjp(block, weights.params, x)
            gradient, dx = pull(dy)
            return dx, gradient

        tokens = math.prod(x.shape[:-1])
        dx, gradient = _accumulated(micro_batch, x, dy)
        return dx, _cast_like(weights.params, gradient)

    def embed_backward(inputs, dx, embedding_gradient):
        # Embedding is linear in its params, so its gradient does not depend on them.
        params = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), embed_params)

        def micro_batch(tokens, dx):
            _, pull = jax.vjp(lambda p: gpt.embed(model, p, tokens), params)
            return (), pull(dx)[0]

        gradient = dict(_accumulated(micro_batch, inputs, dx)[1])
        if model.tied_embeddings:
            gradient["tokens"] += embedding_gradient.astype(gradient["tokens"].dtype)
        return _cast_like(params, gradient)

    return Programs(embed, forward, head, backward, embed_backward)


def eval_functions(model: ModelConfig) -> EvalPrograms[Callable]:
    """Returns the evaluation programs as pure functions."""
    model = model.dropless()
    training = functions(model)

    def forward(weights, x):
        return _map(functools.partial(gpt.block, model, weights.linears(model)), x)

    def head(params, embedding, x, targets, weights):
        losses = _map(
            lambda x, t, w: gpt.head_loss(model, params, embedding, x, t, w)[0],
            x,
            targets,
            weights,
        )
        return jnp.sum(losses)

    return EvalPrograms(training.embed, forward, head)


def arguments(
    model: ModelConfig, shape: tuple[int, int, int], groups: Mapping[str, Groups | None] = {}
) -> Programs[tuple]:
    """Returns the shapes and dtypes of each program's arguments.

    Args:
      model: model config of any depth; its first layer gives the shapes of the layouts.
      shape: (micro-batches, sequences in each, tokens in a sequence).
      groups: projection -> groups of its layout, which the programs are specialised to.
    """
    embed, block, head = (device_params(model, section) for section in section_shapes(model))
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32)
    x = jax.ShapeDtypeStruct((*shape, model.d_model), jnp.dtype(model.compute_dtype))
    stacked = stacks.layout_tables(stacks.layouts(dataclasses.replace(model, num_layers=1)))
    layouts = {
        name: jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape[1:], t.dtype), table)._replace(
            groups=groups.get(name)
        )
        for name, table in stacked.items()
    }
    layer = ModelWeights(block, layouts)
    tied = gpt.tied_output(model, embed)
    return Programs(
        embed=(embed, tokens),
        forward=(layer, x),
        head=(head, tied, x, tokens, weights),
        backward=(layer, x, x),
        embed_backward=(tokens, x, tied),
    )


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


def compile_groups(
    model: ModelConfig,
    shape: tuple[int, int, int],
    mesh: Mesh | None = None,
    evaluation: bool = False,
    changing: bool = True,
) -> tuple[Programs[Compiled] | EvalPrograms[Compiled], ...]:
    """Compiles the programs of each of `layer_models` for the default backend.

    Programs are cached; models that differ in depth alone share them.

    Args:
      shape: (micro-batches, sequences in each, tokens in a sequence).
      mesh: as in `lower`.
      evaluation: whether to compile the evaluation programs.
      changing: whether layouts may change; otherwise the programs are specialised to their groups.
    """
    tables = stacks.layout_tables(stacks.layouts(model))
    structures = [
        frozenset((name, stacked.groups) for name, stacked in group.items())
        for group in split_groups(tables if changing else stacks.with_groups(tables))
    ]
    kinds: dict[ModelConfig, frozenset] = {}
    for layer in range(model.num_layers):
        kinds.setdefault(layer_model(model, layer), structures[group_index(model, layer)])
    first, *others = (
        # A block's program does not depend on depth, so the key of the cache has depth 1. A model
        # that grows in depth compiles nothing again.
        (dataclasses.replace(each, num_layers=1, shared_layers=False), structure)
        for each, structure in kinds.items()
    )
    options = shape, mesh, evaluation
    shared = _compiled(*first, *options)
    return shared, *(_compiled(*each, *options, shared) for each in others)


@functools.cache
def _compiled(model, structure, shape, mesh, evaluation, shared=None):
    """Compiles a model of equal layers; only its block programs if others are `shared`.

    `structure` has (projection, groups of its tables).
    """
    pure = (eval_functions if evaluation else functions)(model)
    programs = lower(pure, arguments(model, shape, dict(structure)), mesh)
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
    params = {"embed": 1, "forward": 1, "head": 2, "backward": 1, "embed_backward": 0}[name]
    shardings = [replicated if n < params else rows for n in range(len(structs))]
    if name == "embed_backward":
        shardings[-1] = replicated
    structs = tuple(
        jax.tree.map(lambda s, to=to: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to), tree)
        for tree, to in zip(structs, shardings)
    )
    out = {
        "embed": rows,
        "forward": rows if evaluation else (rows, replicated),
        "head": replicated if evaluation else (replicated, rows, replicated),
        "backward": (rows, replicated),
        "embed_backward": replicated,
    }[name]
    return structs, out


def _map(function, *batches):
    """Maps `function` over micro-batches; without a loop for a single one."""
    if len(batches[0]) == 1:
        return function(*(batch[0] for batch in batches))[None]
    return lax.map(lambda micro: function(*micro), batches)


def _accumulated(function, *batches):
    """Maps `function` -> (y, gradients or metrics) over micro-batches; returns (all y, the others
    combined)."""
    if len(batches[0]) == 1:
        y, one = function(*(batch[0] for batch in batches))
        return jax.tree.map(lambda leaf: leaf[None], y), one
    first = jax.eval_shape(function, *(batch[0] for batch in batches))[1]

    def accumulate(total, micro):
        y, more = function(*micro)
        return step_metrics.combined(total, more), y

    total, y = lax.scan(accumulate, step_metrics.empty(first), batches)
    return y, total


def _cast_like(params, gradient):
    """Casts gradients to the dtypes of the params."""
    return jax.tree.map(lambda p, g: g.astype(p.dtype), params, gradient)
