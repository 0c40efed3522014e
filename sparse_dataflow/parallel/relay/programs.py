"""The relay's programs: one for each kind of section and direction, whatever the depth.

Layers that store unequally much (`models.groups`) are of several kinds: each group has its own
programs of a block.

Each takes one section's parameters, as the device holds them, and all micro-batches of a step.

Shapes in names: M micro-batches, B their batch, T tokens, D d_model, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.models import gpt
from sparse_dataflow.models.groups import layer_groups

DATA_AXIS = "data"


T = TypeVar("T")


class Programs(NamedTuple, Generic[T]):
    """What a training step runs on the device, or a T for each of it.

    Attributes:
      embed: (embed params, int32 inputs [M, B, T]) -> x [M, B, T, D].
      forward: (block params, its tables, x) -> x of the next boundary.
      head: (head params, embedding [V, D], x, int32 targets, float32 weights [M, B, T]) ->
        (float32 [] loss, dx, (gradient of the head, of the embedding)).
      backward: (block params, its tables, x, dy) -> (dx, gradient); dy is donated. The block's
        forward is computed again.
      embed_backward: (inputs, dx, the head's gradient of the embedding) -> gradient of the embed
        section; the embedding is tied, so both of its gradients are summed.
    """

    embed: T
    forward: T
    head: T
    backward: T
    embed_backward: T


class EvalPrograms(NamedTuple, Generic[T]):
    """What an evaluation runs: as in `Programs`; `head` gives the loss alone."""

    embed: T
    forward: T
    head: T


def device_dtype(model: ModelConfig, path: tuple) -> jnp.dtype:
    """What the device holds of a parameter: the compute dtype, but norms stay float32, as the
    model reads them."""
    norm = any(getattr(key, "key", "").startswith("norm") for key in path)
    return jnp.dtype("float32" if norm else model.compute_dtype)


def device_params(model: ModelConfig, params: Any) -> Any:
    """Shapes and dtypes of parameters as the device holds them."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, device_dtype(model, path)), params
    )


def section_shapes(model: ModelConfig) -> tuple[Any, Any, Any]:
    """(embed, one block, head) float32 parameters' shapes; nothing is drawn."""
    drawn = jax.eval_shape(lambda: gpt.init(model, jax.random.key(0)))
    block = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), drawn["blocks"]
    )
    return drawn["embed"], block, drawn["head"]


def functions(model: ModelConfig) -> Programs[Callable]:
    """The programs before compiling, as pure functions."""
    embed_params = device_params(model, section_shapes(model)[0])

    def embed(params, inputs):
        return _each(lambda tokens: gpt.embed(model, params, tokens), inputs)

    def forward(params, tables, x):
        return _each(lambda x: gpt.block(model, params, tables, x), x)

    def head(params, embedding, x, targets, weights):
        def one(x, targets, weights):
            loss, pull = jax.vjp(
                lambda p, e, x: gpt.head_loss(model, p, e, x, targets, weights),
                params,
                embedding,
                x,
            )
            head, embedding_gradient, dx = pull(jnp.ones_like(loss))
            return dx, (loss, head, embedding_gradient)

        dx, (loss, head, embedding_gradient) = _summed(one, x, targets, weights)
        return loss, dx, _returned((params, embedding), (head, embedding_gradient))

    def backward(params, tables, x, dy):
        def one(x, dy):
            _, pull = jax.vjp(lambda p, x: gpt.block(model, p, tables, x), params, x)
            gradient, dx = pull(dy)
            return dx, gradient

        dx, gradient = _summed(one, x, dy)
        return dx, _returned(params, gradient)

    def embed_backward(inputs, dx, embedding_gradient):
        # Embedding is linear in its parameters: their values play no part in the gradient.
        params = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), embed_params)

        def one(tokens, dx):
            _, pull = jax.vjp(lambda p: gpt.embed(model, p, tokens), params)
            return (), pull(dx)[0]

        gradient = dict(_summed(one, inputs, dx)[1])
        gradient["tokens"] += embedding_gradient.astype(gradient["tokens"].dtype)
        return _returned(params, gradient)

    return Programs(embed, forward, head, backward, embed_backward)


def eval_functions(model: ModelConfig) -> EvalPrograms[Callable]:
    """The same for an evaluation."""
    training = functions(model)

    def head(params, embedding, x, targets, weights):
        losses = _each(
            lambda x, t, w: gpt.head_loss(model, params, embedding, x, t, w), x, targets, weights
        )
        return jnp.sum(losses)

    return EvalPrograms(training.embed, training.forward, head)


def arguments(model: ModelConfig, tables: dict, shape: tuple[int, int, int]) -> Programs[tuple]:
    """Shapes and dtypes of each program's arguments.

    Args:
      model: its config; its depth plays no part.
      tables: of one layer, or their shapes.
      shape: (micro-batches, sequences in each, tokens in a sequence).
    """
    embed, block, head = (device_params(model, part) for part in section_shapes(model))
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32)
    x = jax.ShapeDtypeStruct((*shape, model.d_model), jnp.dtype(model.compute_dtype))
    tables = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), tables)
    return Programs(
        embed=(embed, tokens),
        forward=(block, tables, x),
        head=(head, embed["tokens"], x, tokens, weights),
        backward=(block, tables, x, x),
        embed_backward=(tokens, x, embed["tokens"]),
    )


def lowered(
    programs: Programs | EvalPrograms, given: Programs[tuple], mesh: Mesh | None = None, **options
) -> Programs | EvalPrograms:
    """Each program lowered for its arguments.

    With a mesh the batch of every micro-batch is cut over its axis `DATA_AXIS`, parameters and
    gradients are whole on every device, and the programs reduce the gradients.

    Args:
      programs: of `functions` or `eval_functions`.
      given: of `arguments`.
      mesh: of the devices; the default device where None.
      options: of `jax.stages.Traced.lower`.
    """
    found = {}
    for name, function in programs._asdict().items():
        structs, out = getattr(given, name), None
        if mesh is not None:
            structs, out = _sharded(name, structs, mesh, isinstance(programs, EvalPrograms))
        donated = (3,) if name == "backward" else ()
        jitted = jax.jit(function, donate_argnums=donated, out_shardings=out)
        found[name] = jitted.trace(*structs).lower(**options)
    return type(programs)(**found)


def compiled(
    model: ModelConfig,
    shape: tuple[int, int, int],
    mesh: Mesh | None = None,
    evaluation: bool = False,
) -> tuple[Programs[Compiled] | EvalPrograms[Compiled], ...]:
    """Each group's programs for the default backend, the same ones for every depth of a model.

    Args:
      model: its config.
      shape: (micro-batches, sequences in each, tokens in a sequence).
      mesh: as in `lowered`.
      evaluation: whether those of an evaluation.
    """
    first, *others = (
        dataclasses.replace(group.model, num_layers=1) for group in layer_groups(model)
    )
    whole = _compiled(first, shape, mesh, evaluation)
    return whole, *(_compiled(own, shape, mesh, evaluation, whole) for own in others)


@functools.cache
def _compiled(model, shape, mesh, evaluation, shared=None):
    """The programs of a model of one group; all but a block's own are `shared`, where given."""
    made = (eval_functions if evaluation else functions)(model)
    programs = lowered(made, arguments(model, layer_tables(model), shape), mesh)
    found = {
        name: program.compile()
        for name, program in programs._asdict().items()
        if shared is None or name in ("forward", "backward")
    }
    return type(programs)(**found) if shared is None else shared._replace(**found)


def layer_tables(model: ModelConfig) -> dict:
    """Tables of the first layer's own layouts, in numpy; every layer's have these shapes."""
    first = gpt.layout_tables(gpt.layouts(dataclasses.replace(model, num_layers=1)))
    return jax.tree.map(lambda stacked: stacked[0], first)


def refuse_uncut(training: TrainingConfig, devices: int) -> None:
    """Refuses a micro-batch that does not cut over the devices, and a state that is not float32.

    Raises:
      UserError: naming what would do.
    """
    if training.state_dtype != "float32":
        raise UserError(
            f"The relay updates float32 moments in host memory, not {training.state_dtype} ones; "
            "legal with it: --set training.state_dtype=float32."
        )
    rows = training.batch // training.micro_batches
    if rows % devices:
        raise UserError(
            f"A micro-batch of {rows} sequences does not cut over {devices} devices; legal: a "
            f"--batch and an training.micro_batches whose quotient is a multiple of {devices}."
        )


def data_shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """(of [M, B, ...] arrays, of parameters) on a mesh."""
    cut = NamedSharding(mesh, PartitionSpec(None, DATA_AXIS))
    return cut, NamedSharding(mesh, PartitionSpec())


def _sharded(name, structs, mesh, evaluation):
    cut, whole = data_shardings(mesh)
    parameters = {"embed": 1, "forward": 2, "head": 2, "backward": 2, "embed_backward": 0}[name]
    placed = [whole if n < parameters else cut for n in range(len(structs))]
    if name == "embed_backward":
        placed[-1] = whole
    structs = tuple(
        jax.tree.map(lambda s, to=to: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to), part)
        for part, to in zip(structs, placed)
    )
    out = {
        "embed": cut,
        "forward": cut,
        "head": whole if evaluation else (whole, cut, whole),
        "backward": (cut, whole),
        "embed_backward": whole,
    }[name]
    return structs, out


def _each(function, *batches):
    """`function` of each micro-batch; alone, one needs no loop."""
    if len(batches[0]) == 1:
        return function(*(batch[0] for batch in batches))[None]
    return lax.map(lambda micro: function(*micro), batches)


def _summed(function, *batches):
    """`function` -> (y, gradient) of each micro-batch: every y, and the gradients' float32 sum."""
    if len(batches[0]) == 1:
        y, gradient = function(*(batch[0] for batch in batches))
        return jax.tree.map(lambda leaf: leaf[None], y), gradient
    first = jax.eval_shape(function, *(batch[0] for batch in batches))[1]
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), first)

    def accumulate(total, micro):
        y, gradient = function(*micro)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, gradient), y

    total, y = lax.scan(accumulate, zeros, batches)
    return y, total


def _returned(params, gradient):
    """Gradients leave the device in the dtype that parameters came in."""
    return jax.tree.map(lambda p, g: g.astype(p.dtype), params, gradient)
