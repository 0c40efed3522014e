"""A language model with few weights in its projections, fitted to the outputs of the dense one."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparse_dataflow.core.config.layer_groups import layer_linear
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import KEY_VALUE, MLP, ROW_PARALLEL
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.model.partition import without_tables
from sparse_dataflow.core.model.stacks import ModelWeights
from sparse_dataflow.core.training.transitions import host_masks
from sparse_dataflow.core.weights.kind import BIAS, LEAVES, Leaf
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.layer_by_layer import Site, as_params, pruned_layers
from sparse_dataflow.pruning.projection import Pruned, Target, prune

_LOG = logging.getLogger(__name__)


class Rebuilt(NamedTuple):
    """A dense model whose projections have few weights.

    Attributes:
      model: without block-sparse projections.
      params: of the model, float32 on the host.
      masks: projection -> bool [in groups, out groups] of each layer, the groups that stay.
      errors: "layer 1, mlp_in" -> squared error on held-out tokens, relative to the outputs.
    """

    model: ModelConfig
    params: dict
    masks: dict[str, list[np.ndarray]]
    errors: dict[str, float]


def rebuilt(
    model: ModelConfig,
    weights: ModelWeights,
    batches: Sequence[np.ndarray],
    targets: Mapping[str, Callable[[int], Target | None]],
) -> Rebuilt:
    """Returns a model whose projections have few weights, one projection after the other.

    A line says the held-out error of each.

    Args:
      model: of the weights.
      weights: on the host; block-sparse ones are read as dense ones with zeros.
      batches: int32 [B, T] token ids.
      targets: projection -> (layer) -> what is left of it; None for all of it, as it is.

    Raises:
      UserError: activations are not finite.
    """
    masks: dict[str, list[np.ndarray]] = {name: [] for name in targets}
    errors: dict[str, float] = {}

    def fitted(site: Site):
        target = targets[site.name](site.layer)
        if target is None:
            return site.kernel
        result = prune(site.fit, site.held_out, site.kernel, target)
        masks[site.name].append(result.mask)
        errors[site.path] = result.error
        report(site.path, site.fit.tokens, result, model.num_layers)
        return result.kernel

    layers = pruned_layers(model, weights, batches, tuple(targets), fitted)
    dense = dataclasses.replace(model, linears={}, density_by_depth=())
    params = {**weights.merged, "blocks": as_params(layers, model.num_layers)}
    return Rebuilt(dense, params, masks, errors)


def report(path: str, tokens: int, result: Pruned, layers: int | None = None) -> None:
    """Says the held-out error of a projection, and warns if its tokens do not determine weights.

    Args:
      path: its name, such as "layer 1, mlp_in".
      tokens: of the fit.
      result: the pruned projection.
      layers: number of layers of a language model.
    """
    of = f" of {layers}" if layers else ""
    name, inputs = path.replace(",", of + ",", 1), len(result.kernel)
    say(f"prune: {name}: keeps {result.mask.mean():.1%}, held-out error {result.error:.2%}")
    if tokens < inputs:
        _LOG.warning(
            "%s has %d inputs and %d tokens to fit its weights to, so a damping of %g keeps them "
            "near the old ones; give more batches", name, inputs, tokens, result.damping,
        )  # fmt: skip


def becomes_sparser(old: ModelConfig, new: ModelConfig, name: str) -> bool:
    """Returns whether a projection stores fewer weights in some layer of `new`."""
    if not new.linear(name).weight.is_partial or (new.experts and name in MLP):
        return False
    specs = ([layer_linear(each, name, n) for each in (old, new)] for n in range(new.num_layers))
    return any(_stored(before) != _stored(after) for before, after in specs)


def _stored(spec):
    """Returns what decides how many weights are stored."""
    return spec.weight, spec.density


def prunes(old: ModelConfig, new: ModelConfig) -> bool:
    """Returns whether a projection stores fewer weights in `new`."""
    return any(becomes_sparser(old, new, name) for name in new.projections)


def is_possible(model: ModelConfig) -> bool:
    """Returns whether `to_blocks` loses nothing of a model but blocks.

    It would lose a low-rank term, and layouts of experts.
    """
    partial = model.partial_projections
    ranks = any(model.linear(name).rank for name in partial)
    return not ranks and not (model.experts and set(partial) & set(MLP))


def to_blocks(
    old: ModelConfig,
    weights: ModelWeights,
    new: ModelConfig,
    batches: Sequence[np.ndarray],
    given: Mapping[str, Sequence[BlockLayout]] | None = None,
    rounds: int = 0,
) -> tuple[Rebuilt, dict[str, list[Any]]]:
    """Returns dense weights with zeros for a sparser model, and what it stores.

    Layouts are balanced.  A layer whose density does not change keeps its weights.

    Args:
      old: of the weights.
      new: the same shape, with sparser projections.
      given: projection -> layout of each layer; None for the blocks that cost most to remove.
      rounds: see `Target`.

    Returns:
      The weights, and for each projection the layout of each layer, or the mask, bool [in, out], of
      a masked weight: `given` of `transitions.change_model`.
    """
    stored = stacks.layouts_of(old, weights.merged)
    old_masks = host_masks(without_tables(weights.merged)[1])
    names = [name for name in new.projections if becomes_sparser(old, new, name)]

    def target(name, layer):
        before, spec = (layer_linear(model, name, layer) for model in (old, new))
        if _stored(before) == _stored(spec):
            return None
        shape = new.projection_shape(name)
        if spec.weight.has_mask:
            groups = Groups(*spec.block_sides, spec.span)
            mask = old_masks.get(name)
            allowed = None if mask is None else spec.weight.block_mask(mask[layer], spec)
            stay = max(1, round((spec.span or shape[0] // spec.block) * spec.density))
            return Target(groups, stay, rounds, allowed=allowed, hadamard=spec.hadamard)
        return Target.balanced(
            shape,
            spec.block,
            spec.density,
            rounds,
            allowed=stored[name][layer].mask if name in stored else None,
            support=given[name][layer].mask if given else None,
            hadamard=spec.hadamard,
        )

    targets = {name: functools.partial(target, name) for name in names}
    result = rebuilt(old, weights, batches, targets)
    before: dict[str, Any] = {**stored, **old_masks}
    kept: dict[str, list[Any]] = {}
    for name in new.partial_projections:
        spec = new.linear(name)
        if new.experts and name in MLP:
            continue
        masks = iter(result.masks.get(name, ()))
        kept[name] = [
            _stored_of(next(masks), spec)
            if name in targets and target(name, layer)
            else before[name][layer]
            for layer in range(new.num_layers)
        ]
    return result, kept


def _stored_of(mask, spec):
    """Returns the layout, or the mask of single entries, of a mask by blocks."""
    if spec.weight.has_mask:
        return spec.weight.entry_mask(mask, spec)
    return BlockLayout.from_mask(mask, spec.block)


def narrowed(
    model: ModelConfig,
    weights: ModelWeights,
    batches: Sequence[np.ndarray],
    density: float,
    rounds: int = 0,
) -> Rebuilt:
    """Returns a dense model with fewer heads and hidden features, fitted to the outputs of all.

    The rival of every sparse model of equal cost.  Heads go with their keys and values; of grouped
    queries equally many of each group go, and the keys and values stay.

    Args:
      density: fraction of the heads and of the hidden features that stay.

    Raises:
      UserError: the model has experts or norms over all heads, or no such number of heads.
    """
    model.refuse_experts("narrow", "a block")
    if model.qk_norm and model.qk_norm_scope != "head":
        raise UserError("narrow drops heads, over which norms reach; legal: models without them.")
    group = model.num_heads // model.kv_heads
    pool = group if group > 1 else model.num_heads
    if abs(density * pool - round(density * pool)) > 1e-6 or not round(density * pool):
        raise UserError(
            f"density={density:g} of {pool} heads{' of a group' * (group > 1)} is no number of "
            f"heads; legal: multiples of 1/{pool} up to 1."
        )
    heads = Groups(model.head_width, model.d_model, pool, round(density * pool))
    outs = {"attn_out": heads, "mlp_out": Groups(1, model.d_model)}

    def target(name, layer):
        shape = model.projection_shape(name)
        groups = outs.get(name) or Groups(*shape)
        if name in outs:
            stay = groups.stay or groups.count(shape, density)
            return Target(groups, stay, rounds)
        return Target(groups, 1, support=np.ones((1, 1), bool))

    targets = {name: functools.partial(target, name) for name in model.projections}
    result = rebuilt(model, weights, batches, targets)
    kept = {name: np.stack(result.masks[name])[:, :, 0] for name in ROW_PARALLEL}
    counts = {name: int(rows[0].sum()) for name, rows in kept.items()}
    narrow = dataclasses.replace(
        result.model,
        head_dim=model.head_width,
        num_heads=counts["attn_out"],
        num_kv_heads=model.kv_heads if group > 1 else counts["attn_out"],
        d_ff=counts["mlp_out"],
    )
    blocks = result.params["blocks"]
    layers = [
        {name: _sliced(model, name, leaves, layer, kept) for name, leaves in params.items()}
        for layer, params in enumerate(stacks.layers(blocks))
    ]
    params = {**result.params, "blocks": stacks.stacked_layers(narrow, layers)}
    return Rebuilt(narrow, params, {}, result.errors)


def _sliced(model, name: str, leaves: Any, layer: int, kept: Mapping[str, np.ndarray]) -> Any:
    """Returns the arrays of a module of a layer without the heads and hidden features that go."""
    heads, group = kept["attn_out"][layer], model.num_heads // model.kv_heads
    if name in ROW_PARALLEL:
        rows = np.repeat(
            kept[name][layer], model.projection_shape(name)[0] // len(kept[name][layer])
        )
        return _cut(leaves, rows, lambda leaf: leaf.input_dim)
    if name in MLP:
        columns = kept["mlp_out"][layer]
    elif name == "q" or (name in KEY_VALUE and group == 1):
        columns = np.repeat(heads, model.head_width)
    elif name == "qkv":
        # Of each key and value head: its queries, the key, the value.
        queries = heads.reshape(-1, group)
        both = queries if group == 1 else np.ones((len(queries), 1), bool)
        columns = np.repeat(np.concatenate([queries, both, both], 1), model.head_width)
    else:
        return leaves
    return _cut(leaves, columns, lambda leaf: leaf.output_dim)


def _cut(arrays: Mapping[str, Any], stay: np.ndarray, dim: Callable[[Leaf], int | None]) -> Any:
    """Returns the arrays of a projection with some entries of a dimension; others as they are."""
    dims = {name: dim(LEAVES.get(name, BIAS)) for name in arrays}
    return {
        name: array if dims[name] is None else np.compress(stay, array, axis=dims[name])
        for name, array in arrays.items()
    }
