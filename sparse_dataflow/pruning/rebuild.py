"""A language model with few weights in its projections, fitted to the outputs of the dense one."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparse_dataflow.core.config.layer_groups import layer_linear
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import KEY_VALUE, MLP, ROW_PARALLEL
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.messages import say
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.training.transitions import host_masks
from sparse_dataflow.core.weights.kind import BIAS, Leaf
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.layer_by_layer import (
    HeldLayers,
    Layers,
    Restored,
    Rounded,
    Site,
    as_params,
    layer_arrays,
    pruned_layers,
)
from sparse_dataflow.pruning.projection import Pruned, Target, prune

_LOG = logging.getLogger(__name__)


Targets = Mapping[str, Callable[[int], Target | None]]
"""Projection -> (layer) -> what is left of it; None for all of it, as it is."""


class RebuiltLayer(NamedTuple):
    """A layer whose projections have few weights.

    Attributes:
      number: of the layer, from 0.
      weights: `layer_weights` of dense weights, float32 on the host.
      masks: projection -> bool [in groups, out groups], the groups that stay.
      errors: "layer 1, mlp_in" -> squared error on held-out tokens, relative to the outputs.
    """

    number: int
    weights: dict[str, object]
    masks: dict[str, np.ndarray]
    errors: dict[str, float]


def rebuilt_layers(
    model: ModelConfig,
    weights: Layers,
    batches: Sequence[np.ndarray],
    targets: Targets,
    rounded: Rounded = np.asarray,
    restored: Restored = lambda number: None,
) -> Iterator[RebuiltLayer]:
    """Yields the layers of a model with few weights in its projections, one after the other.

    A line says the held-out error of each projection.

    Args:
      model: of the weights.
      weights: block-sparse ones are read as dense ones with zeros.
      batches: int32 [B, T] token ids.
      targets: what is left of each projection.
      rounded: see `pruned_layers`.
      restored: see `pruned_layers`.

    Raises:
      UserError: activations are not finite.
    """
    masks: dict[str, np.ndarray] = {}
    errors: dict[str, float] = {}

    def fitted(site: Site):
        target = targets[site.name](site.layer)
        if target is None:
            return site.kernel
        result = prune(site.fit, site.held_out, site.kernel, target)
        masks[site.name], errors[site.path] = result.mask, result.error
        report(site.path, site.fit.tokens, result, model.num_layers)
        return result.kernel

    layers = pruned_layers(model, weights, batches, tuple(targets), fitted, rounded, restored)
    # A generator: a layer is written and forgotten before the next one is read.
    for number, layer in layers:
        yield RebuiltLayer(number, layer, dict(masks), dict(errors))
        masks.clear()
        errors.clear()


class Rebuilt(NamedTuple):
    """A dense model whose projections have few weights.

    Attributes:
      model: without block-sparse projections.
      params: of the model, float32 on the host.
      masks: projection -> bool [in groups, out groups] of each layer, the groups that stay.
    """

    model: ModelConfig
    params: dict
    masks: dict[str, list[np.ndarray]]


def rebuilt(
    model: ModelConfig, params: dict, batches: Sequence[np.ndarray], targets: Targets
) -> Rebuilt:
    """Returns all of `rebuilt_layers` of params with layouts on the host, as one model."""
    masks: dict[str, list[np.ndarray]] = {name: [] for name in targets}

    def layers():
        for layer in rebuilt_layers(model, HeldLayers(params), batches, targets):
            for name, mask in layer.masks.items():
                masks[name].append(mask)
            yield layer.weights

    dense = dataclasses.replace(model, linears={}, density_by_depth=())
    return Rebuilt(dense, {**params, "blocks": as_params(layers(), model.num_layers)}, masks)


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
    params: dict,
    new: ModelConfig,
    batches: Sequence[np.ndarray],
    given: Mapping[str, Sequence[BlockLayout]] | None = None,
    rounds: int = 0,
) -> tuple[Rebuilt, dict[str, list]]:
    """Returns dense weights with zeros for a sparser model, and what it stores.

    Layouts are balanced.  A layer whose density does not change keeps its weights.

    Args:
      old: of the weights.
      params: with layouts, on the host.
      new: the same shape, with sparser projections.
      given: projection -> layout of each layer; None for the blocks that cost most to remove.
      rounds: see `Target`.

    Returns:
      The weights, and for each projection the layout of each layer, or the mask, bool [in, out], of
      a masked weight: `given` of `transitions.change_model`.
    """
    before = stored_before(old, params)
    targets = sparser_targets(old, new, before, given, rounds)
    result = rebuilt(old, params, batches, targets)
    chosen = {name: iter(masks) for name, masks in result.masks.items()}
    stored: dict[str, list] = {}
    for layer in range(new.num_layers):
        masks = {name: next(chosen[name]) for name, target in targets.items() if target(layer)}
        for name, value in stored_of_layer(new, masks, before, layer).items():
            stored.setdefault(name, []).append(value)
    return result, stored


def stored_before(model: ModelConfig, params: dict) -> dict[str, Any]:
    """Returns projection -> layout, or mask bool [in, out], of each layer of a model."""
    return {**stacks.layouts_of(model, params), **host_masks(model, params)}


def sparser_targets(
    old: ModelConfig,
    new: ModelConfig,
    before: Mapping[str, Any],
    given: Mapping[str, Sequence[BlockLayout]] | None = None,
    rounds: int = 0,
) -> Targets:
    """Returns what is left of the projections that become sparser.

    Args:
      old: of the weights.
      new: the same shape, with sparser projections.
      before: see `stored_before`.
      given: see `to_blocks`.
      rounds: see `Target`.
    """

    def target(name, layer):
        earlier, spec = (layer_linear(model, name, layer) for model in (old, new))
        if _stored(earlier) == _stored(spec):
            return None
        shape = new.projection_shape(name)
        stored = before[name][layer] if name in before else None
        if spec.weight.has_mask:
            groups = Groups(*spec.block_sides, spec.span)
            allowed = None if stored is None else spec.weight.block_mask(stored, spec)
            # Groups that stay in each span, or of all inputs.
            stay = max(1, round((spec.span or shape[0] // spec.block) * spec.density))
            return Target(groups, stay, rounds, allowed=allowed, hadamard=spec.hadamard)
        return Target.balanced(
            shape,
            spec.block,
            spec.density,
            rounds,
            allowed=None if stored is None else stored.mask,
            support=given[name][layer].mask if given else None,
            hadamard=spec.hadamard,
        )

    names = [name for name in new.projections if becomes_sparser(old, new, name)]
    return {name: functools.partial(target, name) for name in names}


def stored_of_layer(
    new: ModelConfig, masks: Mapping[str, np.ndarray], before: Mapping[str, Any], layer: int
) -> dict[str, object]:
    """Returns projection -> layout, or mask bool [in, out], of a layer of a sparser model.

    Args:
      new: the model.
      masks: by groups, of the projections that were pruned.
      before: see `stored_before`; of the others.
    """
    names = [name for name in new.partial_projections if not (new.experts and name in MLP)]
    return {
        name: _stored_of(masks[name], new.linear(name)) if name in masks else before[name][layer]
        for name in names
    }


def _stored_of(mask, spec):
    """Returns the layout, or the mask of single entries, of a mask by blocks."""
    if spec.weight.has_mask:
        return spec.weight.entry_mask(mask, spec)
    return BlockLayout.from_mask(mask, spec.block)


def narrow_targets(
    model: ModelConfig, density: float, rounds: int = 0
) -> tuple[ModelConfig, Targets]:
    """Returns a dense model with fewer heads and hidden features, and what is left of projections.

    The rival of every sparse model of equal cost.  Heads go with their keys and values; of grouped
    queries equally many of each group go, and the keys and values stay.  Heads are rounded to whole
    ones, which hidden features make up for.

    Args:
      model: of the weights.
      density: fraction of the heads and of the hidden features that stay.
      rounds: see `Target`.

    Raises:
      UserError: the model has experts or norms over all heads.
    """
    model.refuse_experts("narrow", "a block")
    if model.qk_norm and model.qk_norm_scope != "head":
        raise UserError("narrow drops heads, over which norms reach; legal: models without them.")
    # Query heads that share keys and values go one by one, and each group keeps equally many.
    # Heads with keys and values of their own go with them.
    group = model.num_heads // model.kv_heads
    pool = group if group > 1 else model.num_heads
    heads = Groups(model.head_width, model.d_model, pool, max(1, round(density * pool)))
    # One head has rows of attn_out and columns of q, and of k and v if these go with it.
    head_rows = (2 if group > 1 else 4) * model.head_width
    feature_rows = 1 + sum(name in MLP and name not in ROW_PARALLEL for name in model.projections)
    # Whole heads above the density, in all groups; hidden features give way for their weights.
    excess = (heads.stay - density * pool) * (model.num_heads // pool)
    count = round(density * model.d_ff - excess * head_rows / feature_rows)
    count = min(max(1, count), model.d_ff)
    num_heads = model.num_heads // pool * heads.stay
    hidden = Target(Groups(1, model.d_model), count, rounds)
    outs = {"attn_out": Target(heads, heads.stay, rounds), "mlp_out": hidden}

    def target(name, layer):
        # One group, which stays: `narrow_layer` cuts the outputs of these.
        whole = Groups(*model.projection_shape(name))
        return outs.get(name) or Target(whole, 1, support=np.ones((1, 1), bool))

    narrow = dataclasses.replace(
        model,
        linears={},
        density_by_depth=(),
        head_dim=model.head_width,
        num_heads=num_heads,
        num_kv_heads=model.kv_heads if group > 1 else num_heads,
        d_ff=count,
    )
    return narrow, {name: functools.partial(target, name) for name in model.projections}


def narrow_layer(model: ModelConfig, layer: RebuiltLayer) -> dict[str, object]:
    """Returns the arrays of a layer without the heads and hidden features that go.

    Args:
      model: which the layer was pruned from.
      layer: of `narrow_targets`.
    """
    remaining = {name: layer.masks[name][:, 0] for name in ROW_PARALLEL}
    params = layer_arrays(layer.weights)
    return {name: _sliced(model, name, leaves, remaining) for name, leaves in params.items()}


def _sliced(model, name: str, leaves: Any, remaining: Mapping[str, np.ndarray]) -> object:
    """Returns the arrays of a module of a layer without the heads and hidden features that go."""
    heads, group = remaining["attn_out"], model.num_heads // model.kv_heads
    if name in ROW_PARALLEL:
        rows = np.repeat(remaining[name], model.projection_shape(name)[0] // len(remaining[name]))
        return _cut(model.linear(name), leaves, rows, lambda leaf: leaf.input_dim)
    if name in MLP:
        columns = remaining["mlp_out"]
    elif name == "q" or (name in KEY_VALUE and group == 1):
        columns = np.repeat(heads, model.head_width)
    elif name == "qkv":
        # Of each key and value head: its queries, the key, the value.
        queries = heads.reshape(-1, group)
        both = queries if group == 1 else np.ones((len(queries), 1), bool)
        columns = np.repeat(np.concatenate([queries, both, both], 1), model.head_width)
    else:
        return leaves
    return _cut(model.linear(name), leaves, columns, lambda leaf: leaf.output_dim)


def _cut(spec, arrays, stay: np.ndarray, dim: Callable[[Leaf], int | None]) -> object:
    """Returns the arrays of a projection with some entries of a dimension; others as they are."""
    dims = {name: dim(spec.leaves.get(name, BIAS)) for name in arrays}
    return {
        name: array if dims[name] is None else np.compress(stay, array, axis=dims[name])
        for name, array in arrays.items()
    }
