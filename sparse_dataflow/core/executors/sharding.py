"""Table of the mesh axes that shard each parameter, and the effect of `parallel.zero`.

Moments and gradients of a parameter follow its row. To change a sharding, change its row.
"""

import math
import re

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import (
    KEY_NORMS,
    KEY_VALUE,
    PROJECTIONS,
    QUERY_NORMS,
    ROW_PARALLEL,
)
from sparse_dataflow.core.executors.mesh import (
    BATCH_AXES,
    MODEL_AXES,
    STATE_AXES,
    AnyMesh,
    batch_shards,
    describe,
)
from sparse_dataflow.core.executors.mesh_axes import key_value_copies
from sparse_dataflow.core.executors.state_roles import dotted_path, parameter_shapes, roles
from sparse_dataflow.core.executors.whole import GATHERED
from sparse_dataflow.core.model.partition import ArrayTree
from sparse_dataflow.core.weights.kind import BIAS, LAYOUT, array_path, leaf_of
from sparse_dataflow.files.errors import UserError

COLUMN_PARALLEL = tuple(name for name in PROJECTIONS if name not in ROW_PARALLEL)
TABLES = P("stage", "tensor")
"""Partition spec of the tables of a layout, [layers, shards, lines, fan]."""

VOCABULARY_ROWS = ("embed.tokens", "head.output", "head.output_bias")
"""Parameters whose rows are the vocabulary."""

_COLUMN, _ROW = "|".join(COLUMN_PARALLEL), "|".join(ROW_PARALLEL)
_BLOCKS = r"blocks\.(?:\d+\.)?"
"""Path prefix of all blocks, or of one layer group (see `config.layer_groups`)."""

_EXPERTS = rf"{_BLOCKS}experts\."
_MODULE = re.compile(
    rf"{_BLOCKS}(?P<experts>experts\.)?(?P<shared>shared\.)?(?P<projection>{_COLUMN}|{_ROW})\."
    r"(?P<name>\w+)(?:\.\w+)?"
)
"""Path of an array of a projection, of one of experts or of the expert that all tokens have."""

RULES = (
    # The first row whose expression matches the full path gives the axes that shard each dimension.
    # Arrays of weights are in no row: their kinds say how they are cut.
    (r"embed\.tokens|head\.output", P(MODEL_AXES, "fsdp")),
    (r"head\.output_bias", P(MODEL_AXES)),
    (r"embed\.(positions|prompt)", P(None, "fsdp")),
    (rf"{_EXPERTS}({_COLUMN})\.bias", P("stage", None, "tensor")),
    (rf"{_BLOCKS}(?:experts\.shared\.)?({_COLUMN})\.bias", P("stage", MODEL_AXES)),
    (rf"{_BLOCKS}(?:experts\.shared\.)?({_ROW})\.bias", P("stage", "feature")),
    (rf"{_BLOCKS}norm[12](_out)?\..*", P("stage", "feature")),
    (rf"{_BLOCKS}side\.down", P("stage", "feature")),
    (r"head\.side\.down", P("feature")),
    (r"head\.side\.up", P(None, "feature")),
    (rf"{_BLOCKS}left_out\.\w+\.\w+", P("stage", "fsdp")),
    (rf"{_BLOCKS}({QUERY_NORMS}|{KEY_NORMS})\..*", P("stage", MODEL_AXES)),
    (r"blocks\..*", P("stage")),
    (r"head\.norm\..*", P("feature")),
    (r"head\..*", P()),
)
""""fsdp" stands for STATE_AXES.  If they do not divide its dimension, they shard the next divisible
one, or none. "stage" is dropped if it does not divide the layers, and MODEL_AXES if they do not
divide the vocabulary (see `padded_rows`)."""

ZERO = {"moments": 1, "gradients": 2, "params": 3, "rest": 3}
"""Lowest `parallel.zero` that shards a kind of array over "fsdp" (arXiv 1910.02054, section 5)."""


def spec(
    model: ModelConfig, path: str, shape: tuple[int, ...], mesh: AnyMesh, fsdp: bool = True
) -> P:
    """Returns the partition spec of a parameter, its gradient or a moment.

    Args:
      path: such as "blocks.qkv.values", or "blocks.1.qkv.values" in a layer group.
      shape: global shape.
      mesh: the devices.
      fsdp: whether to shard over "fsdp".
    """
    row = _row(model, path)
    # Mesh axes of each dimension; a row of the table may be shorter than the shape.
    cuts = [list(entry_axes(entry)) for entry in [*row, *[None] * (len(shape) - len(row))]]
    # What the model axes cannot cut is whole on each of their devices.
    odd = path in VOCABULARY_ROWS and shape[0] % model_shards(mesh)
    copied = path.split(".")[-2] in (*KEY_VALUE, KEY_NORMS)
    if odd or (copied and key_value_copies(model, mesh.shape["tensor"]) > 1):
        cuts = [[axis for axis in axes if axis not in MODEL_AXES] for axes in cuts]
    if cuts and "stage" in cuts[0] and shape[0] % mesh.shape["stage"]:
        cuts[0].remove("stage")
    first = next((i for i, axes in enumerate(cuts) if "fsdp" in axes), None)
    if first is not None:
        cuts[first].remove("fsdp")
        if fsdp:
            shards = _shards(STATE_AXES, mesh)
            fits = lambda i: shape[i] % (_shards(cuts[i], mesh) * shards) == 0  # noqa: E731
            # From the named axis on; a parameter without one that divides is replicated.
            dim = next(filter(fits, range(first, len(shape))), None)
            if dim is not None:
                cuts[dim] += STATE_AXES
    entries = [tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in cuts]
    # jax compares specs as they are written: P() and P(None) differ.
    while entries and not entries[-1]:
        entries.pop()
    return P(*(axes or None for axes in entries))


VOCABULARY_MULTIPLE = 128
"""Rows per device of a padded vocabulary are a multiple of this, so that matrix tiles are full (as
in Megatron-LM's --make-vocab-size-divisible-by, arXiv 1909.08053, section 4)."""


def padded_rows(rows: int, mesh: AnyMesh) -> int:
    """Returns the rows of the placed embedding, padded if MODEL_AXES do not divide `rows`."""
    multiple = VOCABULARY_MULTIPLE * model_shards(mesh)
    return rows if rows % model_shards(mesh) == 0 else -(-rows // multiple) * multiple


def _row(model, path):
    """Returns the axes that shard each dimension of a parameter."""
    module = _MODULE.fullmatch(path)
    if module and module["name"] == LAYOUT:
        return TABLES
    if module and (leaf := model.linear(module["projection"]).leaves.get(module["name"])):
        is_expert = bool(module["experts"]) and not module["shared"]
        return P("stage", *leaf.cuts(module["projection"] in ROW_PARALLEL, is_expert))
    return next(row for expression, row in RULES if re.fullmatch(expression, path))


def residual_dim(model: ModelConfig, parameter: str) -> int | None:
    """Returns the dimension of a parameter that has the features of `residual.order`, or None.

    "feature" cuts each block of stored values, whose order it does not change.

    Args:
      parameter: dotted path.
    """
    module = _MODULE.fullmatch(parameter)
    if module and model.linear(module["projection"]).leaves.get(module["name"], BIAS).is_blocks:
        return None
    firsts = [entry_axes(entry)[:1] for entry in _row(model, parameter)]
    return firsts.index(("feature",)) if ("feature",) in firsts else None


def model_shards(mesh: AnyMesh) -> int:
    """Returns the number of devices that share a layer."""
    return _shards(MODEL_AXES, mesh)


def entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the axes of one dimension of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _shards(axes, mesh):
    return math.prod(mesh.shape[axis] for axis in axes)


def axes_of(spec: P) -> set[str]:
    """Returns all axes of a spec."""
    return {name for entry in spec for name in entry_axes(entry)}


def specs(params: dict, model: ModelConfig, mesh: AnyMesh, fsdp: bool = True) -> dict:
    """Returns `spec` of every leaf of a tree like the params of the model."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: spec(model, dotted_path(path), leaf.shape, mesh, fsdp), params
    )


def state_shardings(state: object, model: ModelConfig, mesh: AnyMesh, zero: int) -> ArrayTree:
    """Returns the shardings of a training state without layouts.

    Args:
      state: has `params`, `moments` and `rest`, without layouts; leaves have shapes.
      mesh: the devices.
      zero: `parallel.zero`, 0 to 3.
    """
    shapes = parameter_shapes(state)

    def sharding(path, leaf, role):
        if not role.parameter:  # Step, key, the optimizer's count.
            return NamedSharding(mesh, P())
        fsdp = zero >= ZERO[dotted_path(path[:1])]
        shape = shapes.get(role.parameter, leaf.shape)
        entries = spec(model, role.parameter, shape, mesh, fsdp)
        return NamedSharding(mesh, _axes_spec(entries, role.axes))

    return jax.tree_util.tree_map_with_path(sharding, state, roles(model, state))


def _axes_spec(parameter_spec, axes):
    """Returns the spec of an array, some of whose axes are the parameter's; see `Role`."""
    by_axis = dict(enumerate(parameter_spec))
    # A mesh axis shards one axis of an array, also if two are the same of the parameter.
    entries = [by_axis.get(axis) if axis not in axes[:i] else None for i, axis in enumerate(axes)]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def gather(params: dict, specs: dict, dtype: jnp.dtype) -> dict:
    """All-gathers params over STATE_AXES in the compute dtype, inside `shard_map`.

    Its transpose reduce-scatters the gradient in float32.

    Args:
      params: a section's shards, or the weights of these; of one layer if the specs are of one.
      specs: partition specs of the params; what has none, such as a layout, stays as it is.
    """
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, P))
    by_path = {dotted_path(array_path(path)): spec for path, spec in leaves}

    def gather_leaf(path, leaf):
        for dim, entry in enumerate(by_path.get(dotted_path(array_path(path)), ())):
            if axes := _state_axes(entry):
                # int8 numbers are cast where they are multiplied, and a mask is no number.
                to = jnp.dtype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
                return checkpoint_name(_all_gather(leaf, dim, to, axes), GATHERED)
        return leaf

    return jax.tree_util.tree_map_with_path(gather_leaf, params)


def gathered_specs(model: ModelConfig, specs: dict, exchange: bool) -> dict:
    """Returns the specs of params to `gather`: without axes for experts that tokens travel to.

    Args:
      specs: partition specs of all params, or of the blocks.
      exchange: whether tokens travel to the experts over "fsdp".
    """

    def gathered(path, spec):
        # All but the shared expert, which each device has.
        is_expert = re.search(_EXPERTS + r"(?!shared)\w+\.", dotted_path(path))
        return P() if exchange and is_expert and leaf_of(model, path) else spec

    is_spec = lambda leaf: isinstance(leaf, P)  # noqa: E731
    return jax.tree_util.tree_map_with_path(gathered, specs, is_leaf=is_spec)


def _state_axes(entry):
    """Returns those of STATE_AXES that shard a dimension of a spec."""
    return tuple(axis for axis in entry_axes(entry) if axis in STATE_AXES)


def _all_gather(leaf, dim, dtype, axes):
    @jax.custom_vjp
    def gather(leaf):
        return lax.all_gather(leaf.astype(dtype), axes, axis=dim, tiled=True)

    def forward(leaf):
        return gather(leaf), None

    def backward(_, gradient):
        # The transpose of an all-gather.  It sums in the parameter's dtype: a sum over devices in
        # 16 bits loses what one of them adds.
        wide = gradient.astype(leaf.dtype)
        return (lax.psum_scatter(wide, axes, scatter_dimension=dim, tiled=True),)

    gather.defvjp(forward, backward)
    return gather(leaf)


def layer_specs(specs: dict) -> dict:
    """Returns the specs of one layer from those of the stacked blocks."""
    # The first dimension is the layers, of which one is taken.
    return jax.tree.map(lambda spec: P(*spec[1:]), specs, is_leaf=lambda s: isinstance(s, P))


def reduce_scatter(gradient: jax.Array, param_spec: P, gradient_spec: P) -> jax.Array:
    """Reduce-scatters a gradient over STATE_AXES that shard it but not the parameter.

    Args:
      gradient: sharded as `param_spec` or `gradient_spec`; summed in float32 whatever its dtype.
      param_spec: spec of the parameter.
      gradient_spec: spec of the result.
    """
    for dim, entry in enumerate(gradient_spec):
        axes = _state_axes(entry)
        if axes and not axes_of(param_spec) & set(axes):
            wide = gradient.astype(jnp.float32)
            shard = lax.psum_scatter(wide, axes, scatter_dimension=dim, tiled=True)
            return shard.astype(gradient.dtype)
    return gradient


def all_reduce(gradient: jax.Array, spec: P, mesh: AnyMesh) -> jax.Array:
    """Sums a gradient in float32 over every axis that does not shard it."""
    # Over an axis that shards it, each device has its own part of the gradient.  Over any other,
    # each has the gradient of its share of the loss, and the sum of these is the gradient.
    over = tuple(
        axis
        for axis in dict.fromkeys((*BATCH_AXES, *STATE_AXES, *MODEL_AXES))
        if mesh.shape[axis] > 1 and axis not in axes_of(spec)
    )
    if not over:
        return gradient
    return lax.psum(gradient.astype(jnp.float32), over).astype(gradient.dtype)


def refuse_indivisible(
    mesh: AnyMesh, model: ModelConfig, batch: int, micro_batches: int, sequence: int
) -> None:
    """Refuses a mesh that does not divide this model and batch.

    Args:
      mesh: the devices.
      batch: sequences per step.
      micro_batches: micro-batches per step.
      sequence: tokens per sequence.

    Raises:
      UserError: naming the count that is not divisible, and the legal sizes; or the kind of weight
        that the axis "tensor" does not cut.
    """
    tensor, shards, context = mesh.shape["tensor"], batch_shards(mesh), mesh.shape["context"]
    if context > 1 and sequence % (2 * context * tensor):
        raise UserError(
            f"context:{context} with tensor:{tensor} does not divide {sequence} tokens into two "
            f"chunks a device; legal: a sequence of a multiple of {2 * context * tensor} tokens."
        )
    if batch % (shards * micro_batches):
        raise UserError(
            f"A batch of {batch} sequences in {micro_batches} micro-batches cannot be sharded over "
            f"{shards} devices (data:{mesh.shape['data']} x fsdp:{mesh.shape['fsdp']}); legal: a "
            f"--batch that is a multiple of {shards * micro_batches}."
        )
    if tensor > 1:
        model.require("tensor_axis", f"tensor:{tensor}")
    if words := _indivisible(model, sequence, tensor):
        sizes = range(1, model.num_heads + 1)
        legal = [str(size) for size in sizes if not _indivisible(model, sequence, size)]
        raise UserError(
            f"tensor:{tensor} does not divide {words}; legal for this model: {', '.join(legal)}."
        )


def refuse_exchange(mesh: AnyMesh, model: ModelConfig) -> None:
    """Refuses a mesh whose axis "fsdp" does not divide the experts, to which tokens travel.

    Raises:
      UserError: naming the legal values.
    """
    if mesh.shape["context"] > 1:
        raise UserError(
            f"--set parallel.experts=exchange on --mesh={describe(mesh)}, whose axis context cuts "
            "the experts' weights too; legal: --set parallel.experts=gather, or a mesh without "
            "context."
        )
    if model.experts % mesh.shape["fsdp"]:
        sizes = range(1, model.experts + 1)
        legal = ", ".join(str(size) for size in sizes if model.experts % size == 0)
        raise UserError(
            f"--set parallel.experts=exchange on fsdp:{mesh.shape['fsdp']}, which does not divide "
            f"the {model.experts} experts; legal for this model: {legal}."
        )


def _indivisible(model, sequence, tensor):
    """Returns what a tensor axis does not divide, for a message; empty if it shards the model."""
    copied = KEY_VALUE if key_value_copies(model, tensor) > 1 else ()
    heads = f"{model.kv_heads} key/value heads"
    counts = {f"{model.num_heads} heads": model.num_heads, f"{sequence} tokens": sequence}
    if tensor % model.kv_heads or not copied:
        counts[heads] = model.kv_heads
    for name in model.projections:
        linear, (inside, outside) = model.linear(name), model.projection_shape(name)
        side, features = ("output", outside) if name in COLUMN_PARALLEL else ("input", inside)
        words, count = f"the {features} {side} features of {name}", features
        if linear.weight.stores_blocks:
            count = features // linear.block
            words = f"the {count} {side} blocks of {name}"
        if name not in copied:
            counts[words] = count
        elif count % model.kv_heads:
            return words
        if linear.hadamard and side == "input":
            count = features // linear.hadamard
            words = f"the {count} groups of --set sparsity.hadamard={linear.hadamard} of {name}"
            counts[words] = count
    return next((words for words, count in counts.items() if count % tensor), "")
