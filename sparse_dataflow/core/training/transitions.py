"""Transitions from one layout, or one model, to the next, of parameters and moments.

Blocks that stay keep their bits.  New blocks start with zero weights and zero moments.  Zero second
moments are safe.  Adam's count goes on, so the bias correction is not small, and with m and v both
from zero |m| / sqrt(v) <= (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)) (Cauchy-Schwarz), which is 1.2
for b1 0.9 and b2 0.95.  So a new weight moves no faster than an old one.  Muon has no second
moment, and every block that has a gradient moves equally.

Projections are converted one at a time, one layer group (`config.layer_groups`) after another.
Each old array is freed before the next one is converted, so the extra memory is one array of one
projection.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.collectives import to_host
from sparse_dataflow.core.config.layer_groups import (
    join_groups,
    layer_groups,
    layer_linear,
    split_groups,
)
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.executors.sharding import COLUMN_PARALLEL
from sparse_dataflow.core.layouts.evolution import Update, block_sources, largest_blocks
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.layouts.model_layouts import with_room
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.blocks import (
    collect,
    expand,
    gather_blocks,
    grid_norms,
    stored_norms,
)
from sparse_dataflow.core.ops.hadamard.transform import hadamard
from sparse_dataflow.core.optim.optimizers import TrainState, adam_state, map_moments
from sparse_dataflow.core.optim.weight_state import WeightState
from sparse_dataflow.core.weights.block_sparse import BlockSparse
from sparse_dataflow.core.weights.dense import Dense
from sparse_dataflow.core.weights.kind import TABLE
from sparse_dataflow.core.weights.masked import Masked

(KERNEL,) = Dense.leaves()
(STORED,) = (name for name, leaf in BlockSparse.leaves().items() if leaf.role != TABLE)
(MASK,) = (name for name, leaf in Masked.leaves().items() if leaf.role == TABLE)
"""Arrays of block-sparse, dense and masked weights, which transitions turn into one another."""

Batches = Iterable[Batch]
"""Training batches from the step of a state on, as put by the executor."""

Change = Callable[[TrainState, ModelConfig, ModelConfig, Batches], TrainState]
"""(canonical state, its model, the model of the next phase, batches) -> state of the next model.

Training reads the same batches again, so a resumed run makes the same change."""


def update_layouts(
    state: TrainState,
    model: ModelConfig,
    update: Update,
    share: float | Callable[[int], float],
    gradient_norms: dict[str, np.ndarray] | None = None,
    row_shards: int = 1,
    mask_gain: float = 0.0,
) -> TrainState:
    """Returns the state with every layout and mask updated.

    Random choices follow from the state's key and step, so a resumed run makes the same ones.

    Args:
      state: canonical, with concrete layouts; must not be used again.
      model: config of the state's model.
      update: update rule of a method; see `layouts.evolution`.
      share: fraction of stored blocks to exchange, or number of stored blocks of a weight -> it.
      gradient_norms: from `block_gradient_norms`; None if the update does not read them.
      row_shards: see `EvolutionConfig.row_shards`.
      mask_gain: see `Method`.
    """
    share_of: Any = share if callable(share) else lambda _: share
    key = jax.random.key_data(jax.random.fold_in(state.key, state.step))
    # The key is the same on all processes, so numpy draws the same numbers on each.
    seed = np.asarray(jax.device_get(key)).ravel().tolist()
    layouts = stacks.layouts_of(model, state.rest)
    for name, old in layouts.items():
        new = []
        # Column-parallel weights are cut by outputs, and each output keeps its number of blocks.
        shards = 1 if name in COLUMN_PARALLEL else row_shards
        for place in _places(name, [group.layers for group in layer_groups(model)]):
            norms = _block_norms(place.module(state.params)[STORED])
            for layer, layer_norms in zip(place.layers, norms, strict=True):
                gradients = None if gradient_norms is None else gradient_norms[name][layer]
                # A stream for each layer and projection: a choice does not depend on the order of
                # the loops, or on which process makes it.
                rng = np.random.default_rng([*seed, model.projections.index(name), layer])
                new.append(
                    update(
                        old[layer], layer_norms, gradients, share_of(old[layer].nnz), shards, rng
                    )
                )
            layers = slice(place.layers.start, place.layers.stop)
            state = _moved_blocks(state, place, old[layers], new[layers])
        layouts[name] = new
    state = state.with_layouts(model, layouts)
    return _with_exchanged_masks(state, model, share_of, gradient_norms, mask_gain)


def _with_exchanged_masks(state, model, share, gradient_norms, gain):
    """Returns the state with every mask updated: small weights are dropped, others added at zero.

    What is added has the largest gradients, or is drawn where these are not given.
    """
    key = jax.random.fold_in(state.key, state.step)
    for number, name in enumerate(model.projections):
        spec = model.linear(name)
        if not spec.weight.has_mask:
            continue
        for place in _places(name, [group.layers for group in layer_groups(model)]):
            kernel = place.module(state.params)[KERNEL]
            mask = place.module(state.rest)[MASK]
            norms = jnp.sqrt(spec.weight.scores(kernel, spec))
            if gradient_norms is None:
                # A stream for each projection and group, so that the order of the loops does not
                # matter.
                drawn = jax.random.fold_in(jax.random.fold_in(key, number), place.layers.start)
                growth = jax.random.uniform(drawn, norms.shape)
            else:
                growth = jnp.asarray(gradient_norms[name][np.asarray(place.layers)])
            # Masks are of single entries, and equally many of each layer of a group are stored.
            stored = int(mask[0].sum()) // math.prod(spec.block_sides)
            moved = round(share(stored) * stored)
            mask = jax.vmap(functools.partial(_exchanged, spec=spec, gain=gain), (0, 0, 0, None))(
                mask, norms, growth, moved
            )
            state = _with_mask(state, place, mask)
    return state


def host_masks(model: ModelConfig, rest: stacks.ArrayTree) -> dict[str, np.ndarray]:
    """Returns masked projection -> bool [layers, in, out] of `TrainState.rest`, in numpy."""
    groups = split_groups((rest or {}).get("blocks", {}))
    names = [name for name in model.masked_projections if name in groups[0]]  # Not of experts.
    return {n: np.concatenate([to_host(group[n][MASK]) for group in groups]) for n in names}


@functools.partial(jax.jit, static_argnames=("spec", "gain"))
def _exchanged(mask, norms, growth, count, spec, gain):
    return spec.weight.exchanged(mask, norms, growth, spec, count, gain)


def _with_mask(state, place, mask):
    """Returns the state with a projection's mask replaced, and zeros where it has none."""
    under = lambda array: array * mask.astype(array.dtype)  # noqa: E731
    state = _with_converted(state, place, KERNEL, KERNEL, under, counts=lambda count: count)
    rest = state.rest or {"blocks": _empty_groups(state.params)}
    module = {**split_groups(rest["blocks"])[place.group].get(place.name, {}), MASK: mask}
    return state._replace(rest=place.with_module(rest, module))


def _without_mask(state, place):
    """Returns the state without a projection's mask."""
    blocks = list(split_groups(state.rest["blocks"]))
    blocks[place.group] = {n: m for n, m in blocks[place.group].items() if n != place.name}
    rest = {**state.rest, "blocks": join_groups(blocks)} if any(blocks) else ()
    return state._replace(rest=rest)


def _empty_groups(params):
    return join_groups([{} for _ in split_groups(params["blocks"])])


def change_model(
    state: TrainState,
    old: ModelConfig,
    new: ModelConfig,
    batches: Batches = (),
    *,
    given: Mapping[str, Sequence[object]] | None = None,
) -> TrainState:
    """Returns a state of model `old` as a state of model `new`; it must not be used again.

    A block-sparse weight becomes a dense one of the same function: its stored blocks in place, with
    its Hadamard transform and its low-rank term merged in.  A weight that gets sparser keeps its
    largest blocks; if the new weight reads a Hadamard transform, those of the transformed weight.
    A new low-rank term has a zero second factor, so the function stays.  A block that all layers
    share becomes one for each, of equal parameters, with the moments of its mean gradient.

    Args:
      state: canonical, with concrete layouts.
      old: config of the state's model.
      batches: not read; see `Change`.
      given: projection -> what is stored of a weight that gets sparser: the layout of each layer,
        or of a masked weight the mask, bool [in, out]; None for the largest blocks.
    """
    assert not (old.left_out or new.left_out), "see pruning.omission"
    if old.shared_layers:
        return _untied(state, old)
    key = jax.random.fold_in(state.key, state.step)
    before, after = ([group.layers for group in layer_groups(model)] for model in (old, new))
    # Old and new models group their layers differently.  Both groupings are cut at the borders of
    # either, so that each projection of a common range is converted as one stack.
    common = _common_ranges(before, after)
    layouts = stacks.layouts_of(old, state.rest)
    state = _regroup(state.without_layouts(), before, common)
    for name in new.projections:
        old_layouts = layouts.pop(name, None)
        new_layouts: list[BlockLayout] = []
        for place in _places(name, common):
            stored = old_layouts and [old_layouts[layer] for layer in place.layers]
            chosen = given and [given[name][layer] for layer in place.layers if name in given]
            state, chosen = _change_projection(state, place, stored, old, new, key, chosen)
            new_layouts += chosen or ()
        if new_layouts:
            layouts[name] = [
                with_room(layout, layer_linear(new, name, layer))
                for layer, layout in enumerate(new_layouts)
            ]
    return _regroup(state, common, after).with_layouts(new, layouts)


def _untied(state, model):
    """Returns a state whose layers have copies of the block that they shared.

    The gradient of a shared block is the sum over its layers, whose mean is what a copy's moments
    stand for: first moments are divided by the number of layers, second ones by its square.  So the
    direction of a step stays, and new gradients weigh in at their own scale.
    """
    layers = model.num_layers

    def copies(scale):
        return lambda tree: {**tree, "blocks": copied_blocks(tree["blocks"], layers, scale)}

    moments = map_moments(copies(1 / layers), state.moments, copies(1 / layers**2))
    rest = state.without_layouts().rest
    after = state._replace(
        params=copies(1.0)(state.params), moments=moments, rest=rest and copies(1.0)(rest)
    )
    return after.with_layouts_of(state)


def copied_blocks(shared: object, layers: int, scale: float = 1.0) -> stacks.ArrayTree:
    """Returns every leaf [1, ...] of a shared block, times `scale`, as [layers, ...]."""

    def copied(leaf):
        xp: Any = np if isinstance(leaf, np.ndarray) else jnp
        return xp.repeat(leaf * leaf.dtype.type(scale), layers, axis=0)

    return jax.tree.map(copied, shared)


def _change_projection(
    state, place: "_Place", stored: list[BlockLayout] | None, old, new, key, given
):
    """Converts one projection of one group of layers; returns (state, its layouts or None)."""
    before, after = (layer_linear(model, place.name, place.layers.start) for model in (old, new))
    if (before.weight, before.density) != (after.weight, after.density):
        for spec in (before, after):
            spec.weight.require("evolution", f"{place.name}: a change of what is stored")
    if after.weight.has_mask:
        assert not before.weight.stores_blocks  # `_refuse_mismatch` and phases have none.
        if (before.weight, before.density) != (after.weight, after.density):
            # The new weight reads H x, and H is its own inverse: H W computes what W did.
            if not before.weight.has_mask:
                state = _merge_hadamard(state, place, after.hadamard)
            if given:
                mask = jnp.asarray(np.stack(given))
            else:
                allowed = place.module(state.rest)[MASK] if before.weight.has_mask else None
                scores = after.weight.scores(place.module(state.params)[KERNEL], after)
                mask = after.weight.best(scores, after, allowed)
            state = _with_mask(state, place, mask)
    elif before.weight.has_mask:
        state = _merge_hadamard(_without_mask(state, place), place, before.hadamard)
    elif (before.weight, before.density) != (after.weight, after.density):
        if not after.weight.stores_blocks:
            assert stored is not None
            dense = functools.partial(expand, *_positions(stored), grid=stored[0].mask.shape)
            state, stored = _with_converted(state, place, STORED, KERNEL, dense), None
            state = _merge_hadamard(state, place, before.hadamard)
        else:
            if not before.weight.stores_blocks:
                state = _merge_hadamard(state, place, after.hadamard)
            state, stored = _prune(state, place, stored, after, given)
    if before.term and not after.term and not after.weight.stores_blocks:
        state = _merge_term(state, place, before.term)
    if after.term and not before.term:
        state = _add_term(state, place, _term_init(new, place.name)(key, place.layers))
    return state, stored


@dataclasses.dataclass(frozen=True)
class _Place:
    """One projection of one group of layers.

    Attributes:
      group: index of the group among `split_groups` of params["blocks"].
      layers: the group's layers.
    """

    name: str
    group: int
    layers: range

    def module(self, params: dict) -> dict:
        """Returns the projection's leaves, stacked over the layers."""
        return split_groups(params["blocks"])[self.group][self.name]

    def with_module(self, params: dict, module: dict) -> dict:
        """Returns the params with the projection's leaves replaced."""
        blocks = list(split_groups(params["blocks"]))
        blocks[self.group] = {**blocks[self.group], self.name: module}
        return {**params, "blocks": join_groups(blocks)}


def _places(name, ranges):
    return [_Place(name, group, layers) for group, layers in enumerate(ranges)]


def _common_ranges(*divisions: Sequence[range]) -> list[range]:
    """Returns the fewest ranges of layers of which every range in `divisions` is a union."""
    starts = sorted({layers.start for ranges in divisions for layers in ranges})
    return [range(*ends) for ends in itertools.pairwise([*starts, divisions[0][-1].stop])]


def _regroup(state, before: Sequence[range], after: Sequence[range]):
    """Returns the state with its blocks stacked over other ranges of layers."""
    if list(before) == list(after):
        return state

    def regroup(tree):
        groups = split_groups(tree["blocks"])
        # Leaf by leaf, so that at most one leaf is in memory twice.
        restacked = [
            _restack(leaves, before, after)
            for leaves in zip(*map(jax.tree.leaves, groups), strict=True)
        ]
        structure = jax.tree.structure(groups[0])
        blocks = [jax.tree.unflatten(structure, leaves) for leaves in zip(*restacked)]
        return {**tree, "blocks": join_groups(blocks)}

    return _map_trees(regroup, state)


def _map_trees(function, state, second=None):
    """Returns the state with `function` of the params and the moments; see `map_moments`."""
    moments = map_moments(function, state.moments, second)
    return state._replace(params=function(state.params), moments=moments)


def _restack(leaves, before, after):
    """Arrays stacked over the layer ranges `before` -> over those of `after`; frees the old."""
    restacked = []
    for layers in after:
        # The part of each old group that lies in a new one.
        slices = [
            leaf[max(layers.start, old.start) - old.start : layers.stop - old.start]
            for leaf, old in zip(leaves, before, strict=True)
            if old.start < layers.stop and layers.start < old.stop
        ]
        concatenate = np.concatenate if isinstance(slices[0], np.ndarray) else jnp.concatenate
        restacked.append(slices[0] if len(slices) == 1 else concatenate(slices))
    # The copies must be made before the old arrays are deleted.
    jax.block_until_ready(restacked)
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not any(leaf is array for array in restacked):
            leaf.delete()
    return restacked


def _moved_blocks(state, place, old: Sequence[BlockLayout], new: Sequence[BlockLayout]):
    """Moves the stored blocks of one projection from old to new layouts of its layers.

    What an optimizer knows of a whole block, such as a count, a new block gets from another one;
    its random key is folded with its place.
    """
    sources = np.stack([block_sources(before, after) for before, after in zip(old, new)])
    # A block that stays, of each layer: counts are those of the run, alike for all blocks.
    any_block = np.maximum(sources.max(axis=1, keepdims=True), 0)
    entries = functools.partial(_gather_blocks, sources=sources)
    from sparse_dataflow.core.optim import by_weight

    def counts(array):
        array = _gather_blocks(array, np.where(sources < 0, any_block, sources))
        return by_weight.with_new_keys(array, sources < 0)

    return _with_converted(state, place, STORED, STORED, entries, counts=counts)


def _gather_blocks(values: jax.Array | np.ndarray, sources: np.ndarray) -> jax.Array | np.ndarray:
    """Returns `gather_blocks`, in device or host memory as `values`."""
    if not isinstance(values, np.ndarray):
        return gather_blocks(values, sources)
    new = np.empty((*sources.shape, *values.shape[2:]), values.dtype)
    for layer, source in enumerate(sources):
        # New blocks have the source -1.
        np.take(values[layer], np.maximum(source, 0), axis=0, out=new[layer])
        new[layer][source < 0] = 0
    return new


def _block_norms(values):
    """Returns float [layers, nnz] Euclidean norms of the stored blocks, in numpy."""
    if not isinstance(values, np.ndarray):
        return to_host(stored_norms(values))
    return np.stack([np.sqrt(np.einsum("nij,nij->n", layer, layer)) for layer in values])


def _prune(state, place, old: list[BlockLayout] | None, spec, given=None):
    """Keeps the largest blocks of one projection at `spec`'s density, or those of the layouts
    `given`; returns (state, layouts)."""
    module = place.module(state.params)
    if given:
        if old is None:
            return _with_stored(state, place, given, spec.block), given
        return _moved_blocks(state, place, old, given), given
    if old is None:
        norms = to_host(grid_norms(module[KERNEL], spec.block))
        stored: list[np.ndarray | None] = [None] * len(norms)
    else:
        norms_of_stored = to_host(stored_norms(module[STORED]))
        norms = np.zeros((len(old), *old[0].mask.shape), norms_of_stored.dtype)
        for layer, layout in enumerate(old):
            norms[layer, layout.rows, layout.cols] = norms_of_stored[layer]
        stored = [layout.mask for layout in old]
    # Cells of the ring that each cell reads; see `layouts.patterns`.
    degree = round(spec.density * np.gcd(*norms[0].shape))
    new = [largest_blocks(n, spec.block, degree, mask) for n, mask in zip(norms, stored)]
    if old is None:
        return _with_stored(state, place, new, spec.block), new
    return _moved_blocks(state, place, old, new), new


def _with_stored(state, place, layouts, block):
    """Keeps the blocks of layouts of one dense projection."""
    blocks = functools.partial(collect, *_positions(layouts), block=block)
    return _with_converted(state, place, KERNEL, STORED, blocks)


def _positions(layouts):
    return np.stack([lay.rows for lay in layouts]), np.stack([lay.cols for lay in layouts])


def _with_converted(
    state,
    place: _Place,
    before: str,
    after: str,
    convert: Callable,
    second=None,
    counts=None,
):
    """Replaces leaf `before` of a projection by `after`, in params and moments.

    `second` converts second moments; `convert` if None.  `counts` converts state arrays without
    an axis of the weight; only where layouts change is there an optimizer that has any.
    """
    leaf = functools.partial(_convert_leaf, place=place, before=before, after=after, counts=counts)
    first = functools.partial(leaf, convert=convert)
    return _map_trees(first, state, functools.partial(leaf, convert=second or convert))


def _merge_hadamard(state, place, width):
    """Replaces a dense weight W that reads a transform H by H W, which computes the same function.

    First moments transform as gradients do.  Second moments, being squares, do not; they become
    the mean over the inputs of a transform, as if the gradients of these were independent.
    """
    if not width:
        return state
    mix = functools.partial(_mix_inputs, width=width)
    mean = functools.partial(_average_inputs, width=width)
    return _with_converted(state, place, KERNEL, KERNEL, mix, second=mean)


@functools.partial(jax.jit, static_argnames="width")
def _mix_inputs(kernel, width):
    """Returns H W for every [in, out] of [layers, in, out]."""
    return hadamard(kernel.swapaxes(1, 2), width).swapaxes(1, 2)


@functools.partial(jax.jit, static_argnames="width")
def _average_inputs(second, width):
    """Returns [layers, in, out] with every `width` neighbouring inputs replaced by their mean."""
    layers, inputs, outputs = second.shape
    groups = second.reshape(layers, inputs // width, width, outputs)
    mean = jnp.mean(groups, axis=2, keepdims=True)
    return jnp.broadcast_to(mean, groups.shape).reshape(second.shape)


def _convert_leaf(tree, place, before, after, convert, counts=None):
    """Replaces one leaf of a projection, if the tree has it, and frees the old array."""
    module = dict(place.module(tree))
    if before not in module:  # Muon's matrices have no second moment.
        return tree
    leaf = module.pop(before)
    is_state = isinstance(leaf, WeightState)
    new = leaf.map(convert, counts) if is_state else convert(leaf)
    module[after] = jax.block_until_ready(new)
    stays = set(map(id, jax.tree.leaves(new)))
    for array in jax.tree.leaves(leaf):
        if isinstance(array, jax.Array) and id(array) not in stays:
            array.delete()
    return place.with_module(tree, module)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="term")
def _sum_with_term(kernel, arrays, term):
    """Returns the dense form [L, in, out] of a weight with its low-rank term."""
    return term(Dense(kernel), **arrays).dense()


def _merge_term(state, place, term):
    """Adds a projection's low-rank term to its dense weight; drops the moments of the term."""
    arrays = {leaf: place.module(state.params)[leaf] for leaf in term.leaves()}
    merge = lambda kernel: _sum_with_term(kernel, arrays, term)  # noqa: E731
    params = _convert_leaf(state.params, place, KERNEL, KERNEL, merge)

    def without_term(tree):
        module = {k: v for k, v in place.module(tree).items() if k not in arrays}
        return place.with_module(tree, module)

    return _map_trees(without_term, state._replace(params=params))


@functools.cache
def _term_init(model, name):
    """Returns (key, layers) -> a projection's low-rank leaves as `gpt.init` draws them.

    XLA removes the draws of all other leaves.
    """

    @functools.partial(jax.jit, static_argnames="layers")
    def draw(key, layers):
        modules = [group[name] for group in split_groups(gpt.init(model, key)["blocks"])]
        leaves = model.linear(name).term_leaves
        stacked = {leaf: jnp.concatenate([m[leaf] for m in modules]) for leaf in leaves}
        return {leaf: array[layers.start : layers.stop] for leaf, array in stacked.items()}

    return draw


def _add_term(state, place, leaves):
    """Adds low-rank leaves to a projection, with zero moments."""

    def add(tree, leaves):
        return place.with_module(tree, {**place.module(tree), **leaves})

    state = state._replace(params=add(state.params, leaves))
    if not state.moments:  # Weights of another run, before an optimizer has any.
        return state
    # That of the other moments, which may be narrow.
    dtype = jax.tree.leaves(adam_state(state.moments).mu)[0].dtype

    def add_zeros(tree):
        # New arrays for each moment: a step donates every buffer once.
        return add(tree, jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype), leaves))

    return state._replace(moments=map_moments(add_zeros, state.moments))
