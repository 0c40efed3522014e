"""From one layout, or one model, to the next: parameters and both Adam moments move together.

Whatever stays keeps its bits.  What is new starts with zero weights and zero moments.  Zero second
moments are safe: Adam's count goes on, so nothing is divided by a small bias correction, and with
m and v both from zero |m| / sqrt(v) <= (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), which is 1.2 for
b1 0.9 and b2 0.95 (Cauchy-Schwarz); a new weight moves no faster than an old one.

Projections move one at a time, those of one group of layers after another's (`models.groups`), and
each old array is freed before the next is made, so that beside the state there is never more than
one array of one projection.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.config.model import PROJECTIONS, ModelConfig
from sparse_dataflow.distributed.processes import to_host
from sparse_dataflow.kernels.hadamard.api import hadamard
from sparse_dataflow.models import gpt
from sparse_dataflow.models.groups import (
    join_groups,
    layer_groups,
    layer_linear,
    split_groups,
)
from sparse_dataflow.optim.optimizers import adam, map_moments
from sparse_dataflow.optim.train_state import TrainState
from sparse_dataflow.sparsity.evolution import Update, block_sources, largest_blocks
from sparse_dataflow.sparsity.layout import BlockLayout

LOW_RANK = ("a_kernel", "b_kernel", "gate")


def update_layouts(
    state: TrainState,
    model: ModelConfig,
    update: Update,
    share: float,
    gradient_norms: dict[str, np.ndarray] | None = None,
) -> TrainState:
    """The state with every layout updated; the one given must not be used again.

    Random choices are drawn from the state's key and step, and so are the same after a resume.

    Args:
      state: its tables are concrete.
      model: its config.
      update: of a method, see `sparsity.evolution`.
      share: fraction of stored blocks to exchange.
      gradient_norms: of `block_gradient_norms`, where the update reads them.
    """
    key = jax.random.key_data(jax.random.fold_in(state.key, state.step))
    seed = np.asarray(jax.device_get(key)).ravel().tolist()
    layouts = gpt.layouts_from_tables(model, state.tables)
    for name, old in layouts.items():
        new = []
        for place in _places(name, [group.layers for group in layer_groups(model)]):
            norms = _norms_by_block(place.module(state.params)["values"])
            for layer, by_slot in zip(place.layers, norms, strict=True):
                gradients = None if gradient_norms is None else gradient_norms[name][layer]
                rng = np.random.default_rng([*seed, PROJECTIONS.index(name), layer])
                new.append(update(old[layer], by_slot, gradients, share, rng))
            sources = np.stack([block_sources(old[i], new[i]) for i in place.layers])
            state = _moved(state, place, "values", "values", lambda a, s=sources: _carry(a, s))
        layouts[name] = new
    return state._replace(tables=gpt.layout_tables(layouts))


def change_model(state: TrainState, old: ModelConfig, new: ModelConfig) -> TrainState:
    """The state of `old` as one of `new`; the one given must not be used again.

    A block-sparse weight becomes dense with its stored blocks where they belong, and takes in its
    Hadamard transform and its low-rank term: the function stays.  A weight that gets sparser keeps
    its largest blocks, a dense one those of what reads the transform.  A low-rank term joins with
    its second factor zero: the function stays.
    """
    key = jax.random.fold_in(state.key, state.step)
    before, after = ([group.layers for group in layer_groups(model)] for model in (old, new))
    both = _common(before, after)
    state, layouts = _regrouped(state, before, both), gpt.layouts_from_tables(old, state.tables)
    for name in PROJECTIONS:
        stored = layouts.pop(name, None)
        found: list[BlockLayout] = []
        for place in _places(name, both):
            own = stored and [stored[layer] for layer in place.layers]
            state, chosen = _changed(state, place, own, old, new, key)
            found += chosen or ()
        if found:
            layouts[name] = found
    return _regrouped(state, both, after)._replace(tables=gpt.layout_tables(layouts))


def _changed(state, place: "_Place", stored: list[BlockLayout] | None, old, new, key):
    """(state, layouts) with one projection of one group of layers as `new` has it."""
    before, after = (layer_linear(model, place.name, place.layers.start) for model in (old, new))
    if (before.kind, before.density) != (after.kind, after.density):
        if after.kind == "dense":
            assert stored is not None
            move = functools.partial(_expanded, *_positions(stored), grid=stored[0].mask.shape)
            state, stored = _moved(state, place, "values", "kernel", move), None
            state = _transformed(state, place, before.hadamard)
        else:
            if before.kind == "dense":
                state = _transformed(state, place, after.hadamard)
            state, stored = _pruned(state, place, stored, after)
    if before.rank and not after.rank and after.kind == "dense":
        state = _with_low_rank_taken_in(state, place)
    if after.rank and not before.rank:
        state = _with_low_rank(state, place, _fresh_low_rank(new, place.name)(key, place.layers))
    return state, stored


@dataclasses.dataclass(frozen=True)
class _Place:
    """One projection of one group of layers.

    Attributes:
      name: of the projection.
      group: number of the group among `parts` of params["blocks"].
      layers: its layers.
    """

    name: str
    group: int
    layers: range

    def module(self, params: dict) -> dict[str, Any]:
        """The leaves, stacked over the layers."""
        return split_groups(params["blocks"])[self.group][self.name]

    def with_module(self, params: dict, module: dict[str, Any]) -> dict:
        """The params with other leaves there."""
        found = list(split_groups(params["blocks"]))
        found[self.group] = {**found[self.group], self.name: module}
        return {**params, "blocks": join_groups(found)}


def _places(name, ranges):
    return [_Place(name, group, layers) for group, layers in enumerate(ranges)]


def _common(*divisions: Sequence[range]) -> list[range]:
    """The fewest ranges of layers that divide each of the divisions' ranges."""
    starts = sorted({layers.start for ranges in divisions for layers in ranges})
    return [range(*ends) for ends in itertools.pairwise([*starts, divisions[0][-1].stop])]


def _regrouped(state, before: Sequence[range], after: Sequence[range]):
    """The state with blocks stacked over other ranges of layers; those joined hold like leaves."""
    if list(before) == list(after):
        return state

    def one(tree):
        given = [jax.tree.leaves(part) for part in split_groups(tree["blocks"])]
        # Leaf by leaf, so that what is there twice is never more than one.
        columns = [_restacked(leaves, before, after) for leaves in zip(*given, strict=True)]
        like = jax.tree.structure(split_groups(tree["blocks"])[0])
        blocks = [jax.tree.unflatten(like, leaves) for leaves in zip(*columns)]
        return {**tree, "blocks": join_groups(blocks)}

    return state._replace(params=one(state.params), moments=map_moments(one, state.moments))


def _restacked(leaves, before, after):
    """Arrays stacked over the layers of `before` -> over those of `after`; gives them up."""
    found = []
    for layers in after:
        within = [
            leaf[max(layers.start, own.start) - own.start : layers.stop - own.start]
            for leaf, own in zip(leaves, before, strict=True)
            if own.start < layers.stop and layers.start < own.stop
        ]
        join = np.concatenate if isinstance(within[0], np.ndarray) else jnp.concatenate
        found.append(within[0] if len(within) == 1 else join(within))
    jax.block_until_ready(found)
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not any(leaf is kept for kept in found):
            leaf.delete()
    return found


@jax.jit
def carried(values: jax.Array, sources: jax.Array) -> jax.Array:
    """Values (or moments) at new layouts.

    Args:
      values: float [layers, nnz, block, block] at the old layouts.
      sources: int32 [layers, new nnz] of `block_sources`.

    Returns:
      float [layers, new nnz, block, block]: the same bits where a block stays, 0 where it is new.
    """
    layer = jnp.arange(len(values))[:, None]
    taken = values[layer, jnp.maximum(sources, 0)]
    return jnp.where((sources >= 0)[:, :, None, None], taken, 0)


def _carry(values, sources):
    """`carried`; of values in host memory, a layer after the other and there."""
    if not isinstance(values, np.ndarray):
        return carried(values, sources)
    new = np.empty((*sources.shape, *values.shape[2:]), values.dtype)
    for layer, source in enumerate(sources):
        np.take(values[layer], np.maximum(source, 0), axis=0, out=new[layer])
        new[layer][source < 0] = 0
    return new


def _norms_by_block(values):
    """[layers, nnz] Euclidean norms, in numpy."""
    if not isinstance(values, np.ndarray):
        return to_host(_stored_norms(values))
    return np.stack([np.sqrt(np.einsum("nij,nij->n", layer, layer)) for layer in values])


@functools.partial(jax.jit, static_argnames="grid")
def _expanded(rows, cols, values, grid):
    """[L, nnz, b, b] at rows, cols [L, nnz] of a grid -> dense [L, in, out]."""
    layers, _, block, _ = values.shape
    blocks = jnp.zeros((layers, *grid, block, block), values.dtype)
    blocks = blocks.at[jnp.arange(layers)[:, None], rows, cols].set(values)
    return blocks.swapaxes(2, 3).reshape(layers, grid[0] * block, grid[1] * block)


@functools.partial(jax.jit, static_argnames="block")
def _collected(rows, cols, dense, block):
    """The inverse of `_expanded`."""
    blocks = _grid(dense, block)
    return blocks[jnp.arange(len(dense))[:, None], rows, :, cols]


@jax.jit
def _stored_norms(values):
    return jnp.sqrt(jnp.sum(jnp.square(values), axis=(2, 3)))


@functools.partial(jax.jit, static_argnames="block")
def _grid_norms(dense, block):
    return jnp.sqrt(jnp.sum(jnp.square(_grid(dense, block)), axis=(2, 4)))


def _grid(dense, block):
    layers, inside, outside = dense.shape
    return dense.reshape(layers, inside // block, block, outside // block, block)


def _pruned(state, place, old: list[BlockLayout] | None, spec):
    """(state, layouts) with the largest blocks of one projection that `spec`'s density stores."""
    module = place.module(state.params)
    if old is None:
        norms = to_host(_grid_norms(module["kernel"], spec.block))
        stored: list[np.ndarray | None] = [None] * len(norms)
    else:
        by_slot = to_host(_stored_norms(module["values"]))
        norms = np.zeros((len(old), *old[0].mask.shape), by_slot.dtype)
        for layer, layout in enumerate(old):
            norms[layer, layout.rows, layout.cols] = by_slot[layer]
        stored = [layout.mask for layout in old]
    degree = round(spec.density * np.gcd(*norms[0].shape))
    new = [largest_blocks(n, spec.block, degree, mask) for n, mask in zip(norms, stored)]
    if old is None:
        move = functools.partial(_collected, *_positions(new), block=spec.block)
        return _moved(state, place, "kernel", "values", move), new
    sources = np.stack([block_sources(before, after) for before, after in zip(old, new)])
    return _moved(state, place, "values", "values", lambda a: carried(a, sources)), new


def _positions(layouts):
    return np.stack([lay.rows for lay in layouts]), np.stack([lay.cols for lay in layouts])


def _moved(state, place: _Place, before: str, after: str, move: Callable):
    """The state with one leaf of a projection moved, in the parameters and in both moments."""
    one = functools.partial(_moved_leaf, place=place, before=before, after=after, move=move)
    return state._replace(params=one(state.params), moments=map_moments(one, state.moments))


def _transformed(state, place, width):
    """The state with one dense weight W as the H W of the same function after a transform H.

    First moments follow as the gradients do.  Of second ones, squares alone, there is only what
    they would be if the gradients of a group's inputs were independent: their mean.
    """
    if not width:
        return state
    one = functools.partial(_moved_leaf, place=place, before="kernel", after="kernel")
    mixed = functools.partial(one, move=functools.partial(_mixed_inputs, width=width))
    mean = functools.partial(one, move=functools.partial(_mean_of_inputs, width=width))
    moments = map_moments(mixed, state.moments, second=mean)
    return state._replace(params=mixed(state.params), moments=moments)


@functools.partial(jax.jit, static_argnames="width")
def _mixed_inputs(kernel, width):
    """H W of every [in, out] of [layers, in, out]."""
    return hadamard(kernel.swapaxes(1, 2), width).swapaxes(1, 2)


@functools.partial(jax.jit, static_argnames="width")
def _mean_of_inputs(second, width):
    """[layers, in, out] with every `width` neighbouring inputs at their mean."""
    layers, inside, outside = second.shape
    groups = second.reshape(layers, inside // width, width, outside)
    mean = jnp.mean(groups, axis=2, keepdims=True)
    return jnp.broadcast_to(mean, groups.shape).reshape(second.shape)


def _moved_leaf(tree, place, before, after, move):
    module = dict(place.module(tree))
    leaf = module.pop(before)
    module[after] = jax.block_until_ready(move(leaf))
    if isinstance(leaf, jax.Array):
        leaf.delete()
    return place.with_module(tree, module)


@functools.partial(jax.jit, donate_argnums=0)
def _sum_with_low_rank(kernel, a_kernel, b_kernel, gate):
    """[L, in, out] + gate [L] x [L, in, r] [L, r, out]."""
    return kernel + gate[:, None, None] * (a_kernel @ b_kernel)


def _with_low_rank_taken_in(state, place):
    """The state with one projection's low-rank term added to its dense weight; what the moments
    knew of the term is let go."""
    terms = [place.module(state.params)[leaf] for leaf in LOW_RANK]
    take_in = lambda kernel: _sum_with_low_rank(kernel, *terms)  # noqa: E731
    params = _moved_leaf(state.params, place, "kernel", "kernel", take_in)

    def without(tree):
        kept = {k: v for k, v in place.module(tree).items() if k not in LOW_RANK}
        return place.with_module(tree, kept)

    return state._replace(params=without(params), moments=map_moments(without, state.moments))


@functools.cache
def _fresh_low_rank(model, name):
    """(key, layers) -> a projection's low-rank leaves there as `gpt.init` draws them; nothing else
    is made."""

    @functools.partial(jax.jit, static_argnames="layers")
    def draw(key, layers):
        modules = [part[name] for part in split_groups(gpt.init(model, key)["blocks"])]
        stacked = {leaf: jnp.concatenate([own[leaf] for own in modules]) for leaf in LOW_RANK}
        return {leaf: array[layers.start : layers.stop] for leaf, array in stacked.items()}

    return draw


def _with_low_rank(state, place, fresh):
    def add(tree, leaves):
        return place.with_module(tree, {**place.module(tree), **leaves})

    dtype = jax.tree.leaves(adam(state.moments).mu)[0].dtype

    def zeros():
        """Made for each moment anew: a step gives every buffer away once."""
        return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype), fresh)

    moments = map_moments(lambda tree: add(tree, zeros()), state.moments)
    return state._replace(params=add(state.params, fresh), moments=moments)
