"""Which axes of a mesh cut which parameter: one table, and what `--zero` makes of it.

Moments and gradients of a parameter follow its row.  To change how something is laid out, change
its row.
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_dataflow.config.model import PROJECTIONS, ModelConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.parallel.mesh import BATCH_AXES, AnyMesh, batch_parts
from sparse_dataflow.parallel.whole import FETCHED

COLUMN_PARALLEL = ("qkv", "mlp_in")
ROW_PARALLEL = ("attn_out", "mlp_out")

_COLUMN, _ROW = "|".join(COLUMN_PARALLEL), "|".join(ROW_PARALLEL)
_BLOCKS = r"blocks\.(?:\d+\.)?"
"""Of all blocks, or of one group of them (see `models.groups`)."""

RULES = (
    # The first row whose expression matches the whole path says which axes cut each dimension.
    (r"embed\.tokens", P("tensor", "fsdp")),
    (r"embed\.positions", P(None, "fsdp")),
    (rf"{_BLOCKS}({_COLUMN})\.values", P("stage", ("tensor", "fsdp"))),
    (rf"{_BLOCKS}({_COLUMN})\.(kernel|b_kernel)", P("stage", "fsdp", "tensor")),
    (rf"{_BLOCKS}({_COLUMN})\.a_kernel", P("stage", "fsdp")),
    (rf"{_BLOCKS}({_COLUMN})\.bias", P("stage", "tensor")),
    (rf"{_BLOCKS}({_ROW})\.values", P("stage", ("tensor", "fsdp"))),
    (rf"{_BLOCKS}({_ROW})\.(kernel|a_kernel)", P("stage", "tensor", "fsdp")),
    (rf"{_BLOCKS}({_ROW})\.b_kernel", P("stage", "fsdp")),
    (r"blocks\..*", P("stage")),
    (r"head\..*", P()),
)
"""A row's "fsdp" goes to the next dimension that it divides, or nowhere, where it does not divide
the one named; "stage" on the layers likewise goes nowhere, and "tensor" on a vocabulary that is not
filled up (`filled`)."""

ZERO = {"moments": 1, "gradients": 2, "params": 3}
"""From which `--zero` on something is dealt out over "fsdp" (arXiv 1910.02054, section 5)."""


def spec(path: str, shape: tuple[int, ...], mesh: AnyMesh, fsdp: bool = True) -> P:
    """How a parameter, its gradient or a moment is cut.

    Args:
      path: of the parameter, "blocks.qkv.values", or "blocks.1.qkv.values" in a group of layers.
      shape: of the whole array.
      mesh: the devices.
      fsdp: whether it is dealt out over that axis.
    """
    row = next(row for expression, row in RULES if re.fullmatch(expression, path))
    cuts = [list(names(entry)) for entry in [*row, *[None] * (len(shape) - len(row))]]
    if path == "embed.tokens" and shape[0] % mesh.shape["tensor"]:
        cuts[0].remove("tensor")
    if cuts and "stage" in cuts[0] and shape[0] % mesh.shape["stage"]:
        cuts[0].remove("stage")
    wanted = next((i for i, axes in enumerate(cuts) if "fsdp" in axes), None)
    if wanted is not None:
        cuts[wanted].remove("fsdp")
        if fsdp:
            fits = lambda i: shape[i] % (_ways(cuts[i], mesh) * mesh.shape["fsdp"]) == 0  # noqa: E731
            found = next(filter(fits, range(wanted, len(shape))), None)
            if found is not None:
                cuts[found].append("fsdp")
    kept = [tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in cuts]
    while kept and not kept[-1]:
        kept.pop()
    return P(*(axes or None for axes in kept))


VOCABULARY_MULTIPLE = 128
"""Rows of a filled vocabulary on one device are a multiple of this: tiles of a product are then
whole (as Megatron-LM's --make-vocab-size-divisible-by, arXiv 1909.08053, section 4)."""


def filled(rows: int, mesh: AnyMesh) -> int:
    """Rows of the embedding as it is placed: more where "tensor" would not cut it evenly."""
    tensor = mesh.shape["tensor"]
    whole = VOCABULARY_MULTIPLE * tensor
    return rows if rows % tensor == 0 else -(-rows // whole) * whole


def names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The axes of one dimension of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _ways(axes, mesh):
    return math.prod(mesh.shape[axis] for axis in axes)


def axes_of(spec: P) -> set[str]:
    """The axes that a spec names."""
    return {name for entry in spec for name in names(entry)}


def specs(params: dict, mesh: AnyMesh, fsdp: bool = True) -> dict:
    """`spec` of every leaf of a tree like the params."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: spec(dotted(path), leaf.shape, mesh, fsdp), params
    )


def state_shardings(state: Any, mesh: AnyMesh, zero: int) -> Any:
    """Shardings of a training state's arrays (without its tables).

    Args:
      state: has `params` and `moments`; leaves have shapes.
      mesh: the devices.
      zero: 0 to 3.
    """

    def sharding(path, leaf):
        keys = [_name(key) for key in path]
        start = next((i for i, key in enumerate(keys) if key in ("embed", "blocks", "head")), 0)
        if not start:  # Step, key, the optimizer's count.
            return NamedSharding(mesh, P())
        dealt = zero >= ZERO[keys[0]]
        return NamedSharding(mesh, spec(".".join(keys[start:]), leaf.shape, mesh, dealt))

    return jax.tree_util.tree_map_with_path(sharding, state)


def _name(key) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))


def dotted(path) -> str:
    """A path of `jax.tree_util` as "blocks.qkv.values"."""
    return ".".join(map(_name, path))


def fetch(params: dict, specs: dict, dtype: jnp.dtype) -> dict:
    """What "fsdp" dealt out, brought together in the compute dtype, inside `shard_map`.

    The gradient goes back the same way: summed in float32 over the axis, and dealt out.

    Args:
      params: a section's, as they are kept; of one layer where specs are of one.
      specs: their specs.
      dtype: to compute in.
    """

    def one(leaf, spec):
        for dim, entry in enumerate(spec):
            if "fsdp" in names(entry):
                return checkpoint_name(_gathered(leaf, dim, jnp.dtype(dtype)), FETCHED)
        return leaf

    return jax.tree.map(one, params, specs)


def _gathered(leaf, dim, dtype):
    @jax.custom_vjp
    def gather(leaf):
        return lax.all_gather(leaf.astype(dtype), "fsdp", axis=dim, tiled=True)

    def forward(leaf):
        return gather(leaf), None

    def backward(_, gradient):
        wide = gradient.astype(leaf.dtype)
        return (lax.psum_scatter(wide, "fsdp", scatter_dimension=dim, tiled=True),)

    gather.defvjp(forward, backward)
    return gather(leaf)


def of_layer(specs: dict) -> dict:
    """Specs of the stacked blocks -> those of one layer."""
    return jax.tree.map(lambda spec: P(*spec[1:]), specs, is_leaf=lambda s: isinstance(s, P))


def scattered(gradient: jax.Array, kept: P, wanted: P) -> jax.Array:
    """A device's gradient of a parameter that is whole over "fsdp", summed over it and dealt out.

    Args:
      gradient: cut as `kept`, or as `wanted` already; summed in float32 whatever its dtype.
      kept: spec of the parameter.
      wanted: spec of the gradient; as it is returned.
    """
    if "fsdp" in axes_of(wanted) and "fsdp" not in axes_of(kept):
        dim = next(i for i, entry in enumerate(wanted) if "fsdp" in names(entry))
        wide = gradient.astype(jnp.float32)
        dealt = lax.psum_scatter(wide, "fsdp", scatter_dimension=dim, tiled=True)
        return dealt.astype(gradient.dtype)
    return gradient


def summed(gradient: jax.Array, spec: P, mesh: AnyMesh) -> jax.Array:
    """The sum of the devices' gradients over every axis that does not cut it, made in float32."""
    over = tuple(
        axis
        for axis in (*BATCH_AXES, "tensor")
        if mesh.shape[axis] > 1 and axis not in axes_of(spec)
    )
    if not over:
        return gradient
    return lax.psum(gradient.astype(jnp.float32), over).astype(gradient.dtype)


def refuse_unfit(
    mesh: AnyMesh, model: ModelConfig, batch: int, micro_batches: int, sequence: int
) -> None:
    """Refuses a mesh that cannot cut this model and batch evenly.

    Args:
      mesh: the devices.
      model: its config.
      batch: sequences in a step.
      micro_batches: parts it is accumulated over.
      sequence: tokens in a sequence.

    Raises:
      UserError: naming what does not divide, and the legal sizes.
    """
    tensor, parts = mesh.shape["tensor"], batch_parts(mesh)
    if batch % (parts * micro_batches):
        raise UserError(
            f"A batch of {batch} sequences in {micro_batches} micro-batches cannot be dealt out "
            f"to {parts} devices (data:{mesh.shape['data']} x fsdp:{mesh.shape['fsdp']}); legal: "
            f"a --batch that is a multiple of {parts * micro_batches}."
        )
    cut = {f"{model.num_heads} heads": model.num_heads, f"{sequence} tokens": sequence}
    for name in PROJECTIONS:
        linear, (inside, outside) = model.linear(name), model.projection_shape(name)
        side, features = ("output", outside) if name in COLUMN_PARALLEL else ("input", inside)
        if linear.kind == "block_sparse":
            blocks = features // linear.block
            cut[f"the {blocks} {side} blocks of {name}"] = blocks
            if linear.hadamard and side == "input":
                groups = features // linear.hadamard
                cut[f"the {groups} groups of --hadamard={linear.hadamard} of {name}"] = groups
        else:
            cut[f"the {features} {side} features of {name}"] = features
    for words, count in cut.items():
        if count % tensor:
            together = math.gcd(*cut.values())
            legal = [str(n) for n in range(1, together + 1) if together % n == 0]
            raise UserError(
                f"tensor:{tensor} does not divide {words}; legal for this model: "
                f"{', '.join(legal)}."
            )
