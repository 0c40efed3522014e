"""Wider models that begin with the function of given weights (Net2Net, arXiv 1511.05641).

A feature of the wider model is a copy of a feature of the old one.  Every copy of an input has a
share of its weight; the shares of a weight sum to 1.  All features of the residual stream have
equally many copies, so a norm sees the same mean and variance.

Shares are drawn for each weight.  With one share for all outputs, Adam would move all copies alike
for ever, because it divides a gradient by its own scale.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from sparse_dataflow.core.config.model import GROWN, ModelConfig
from sparse_dataflow.core.config.projections import (
    KEY_NORMS,
    MLP,
    PROJECTIONS,
    QUERY_NORMS,
    ROW_PARALLEL,
)
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.weights.kind import BIAS, LAYOUT, ROUTER
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.equivalent_forms import dense_module

SPREAD = 0.5
"""Largest deviation of a share before centring, relative to an equal share."""

WIDTHS = tuple(name for name in GROWN if name != "num_layers")
"""Fields of `ModelConfig` in which a wider model may differ."""


class Sources(NamedTuple):
    """Old feature of each new one, int [new features].

    Attributes:
      stream: of the residual stream.
      hidden: of the MLP.
      attended: of all heads' outputs, the inputs of `attn_out`.
      heads: of the outputs of qkv, q, k and v, by name.
    """

    stream: np.ndarray
    hidden: np.ndarray
    attended: np.ndarray
    heads: dict[str, np.ndarray]

    @classmethod
    def of(cls, old: ModelConfig, new: ModelConfig) -> "Sources":
        """Returns the sources of a model of the widths of `new`; both have one head width."""
        queries, keys = head_sources(old, new)
        width, groups = old.head_width, old.kv_heads
        features = lambda heads: (heads[:, None] * width + np.arange(width)).ravel()  # noqa: E731
        per_group = old.num_heads // groups
        group = keys[:, None] * (per_group + 2)
        # [kv heads, (queries..., key, value)], the order of the heads in qkv.
        fused = np.concatenate(
            [group + queries % per_group, group + per_group, group + per_group + 1], axis=1
        )
        heads = {"qkv": fused, "q": queries, "k": keys, "v": keys}
        return cls(
            np.arange(new.d_model) % old.d_model,
            np.arange(new.d_ff) % old.d_ff,
            features(queries.ravel()),
            {name: features(index.ravel()) for name, index in heads.items()},
        )

    def projection(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sources of a projection's inputs and outputs."""
        inputs = {"attn_out": self.attended, "mlp_out": self.hidden}.get(name, self.stream)
        outputs = self.stream if name in ROW_PARALLEL else self.heads.get(name, self.hidden)
        return inputs, outputs


def head_sources(old: ModelConfig, new: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the old head of each new one: queries int [kv heads, queries of each], keys int [kv
    heads].

    The queries of all copies of a key take the queries of its source in turn.
    """
    before, after = (model.num_heads // model.kv_heads for model in (old, new))
    copy, keys = np.divmod(np.arange(new.kv_heads), old.kv_heads)
    turn = copy[:, None] * after + np.arange(after)
    return keys[:, None] * before + turn % before, keys


def wider_config(old: ModelConfig, new: ModelConfig) -> ModelConfig:
    """Returns the config that `wider` returns.

    Raises:
      UserError: `new` stores blocks of a projection that cannot have the old ones.
    """
    sources, names = Sources.of(old, new), old.sparse_projections
    unstored = [name for name in names if not _repeats(sources, name)]
    for name in names:
        _refuse_other_blocks(old, new, name, name in unstored)
    linears = {n: spec for n, spec in dict(old.linears).items() if n not in unstored}
    widths = {name: getattr(new, name) for name in WIDTHS}
    return dataclasses.replace(old, **widths, linears=linears)


def wider(
    old: ModelConfig, params: dict, new: ModelConfig, rng: np.random.Generator
) -> tuple[ModelConfig, dict]:
    """Returns (config, params) of the widths of `new`, with equal logits.

    Stored blocks stay stored blocks where every feature has equally many copies: the layout is
    repeated.  Elsewhere they become dense.

    Args:
      params: with concrete layouts.
      new: config of the wider model; `growth.grown` refuses other shapes.
      rng: draws the shares.

    Raises:
      UserError: see `wider_config`.
    """
    sources, config = Sources.of(old, new), wider_config(old, new)
    layouts = stacks.layouts_of(old, params)
    linears = dict(config.linears)
    unstored = [name for name in layouts if name not in linears]
    wide_layouts: dict[str, list[BlockLayout]] = {}
    layers = []
    arrays, _ = stacks.split_layouts(params)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), arrays)
    for i, layer in enumerate(stacks.layers(params["blocks"])):
        for name in unstored:
            layer[name] = dense_module(old, name, {**layer[name], LAYOUT: layouts[name][i]})
        stored = {name: layouts[name][i] for name in linears if name in layouts}
        for name, layout in stored.items():
            wide_layouts.setdefault(name, []).append(_repeated(layout, sources, name))
        repeated = {name: (layout, wide_layouts[name][i]) for name, layout in stored.items()}
        layers.append(_block(config, layer, sources, repeated, rng))
    # The logits sum over all copies, which SuPar divides by the width.
    factor = np.float32(new.d_model / old.d_model if old.supar else 1)
    embed = {name: leaf[:, sources.stream] for name, leaf in params["embed"].items()}
    norm, head = params["head"]["norm"], dict(params["head"])
    if old.tied_embeddings:
        # As the output layer, the embedding would sum all copies of a feature: the norm before it
        # has their shares.
        shared = {n: _shared(leaf[:, None], sources.stream, rng) for n, leaf in norm.items()}
        head["norm"] = {name: factor * leaf[:, 0] for name, leaf in shared.items()}
    else:
        head["norm"] = {name: leaf[sources.stream] for name, leaf in norm.items()}
        head["output"] = factor * _shared(head["output"].T, sources.stream, rng).T
    blocks = stacks.stacked_layers(config, layers)
    wide_params = {"embed": embed, "blocks": blocks, "head": head}
    return config, merged(wide_params, stacks.stored_layouts(config, wide_layouts))


def reordered(
    model: ModelConfig, params: Mapping[str, dict], sources: Sequence[Sources]
) -> dict[str, object]:
    """Returns the parameters of a dense model whose features have another order.

    The model computes the same function, to rounding.

    Args:
      params: its parameters in numpy.
      sources: old feature of each new one for every layer, all with one residual stream; heads
        change places with the queries of their keys.
    """
    stream, rng = sources[0].stream, np.random.default_rng()
    trees = stacks.layers(params["blocks"])
    layers = [_block(model, tree, source, {}, rng) for tree, source in zip(trees, sources)]
    norm = {name: leaf[stream] for name, leaf in params["head"]["norm"].items()}
    head = {**params["head"], "norm": norm}
    if not model.tied_embeddings:
        head["output"] = params["head"]["output"][:, stream]
    embed = {name: leaf[:, stream] for name, leaf in params["embed"].items()}
    return {"embed": embed, "blocks": stacks.stacked_layers(model, layers), "head": head}


def _block(model, tree, sources, layouts, rng):
    """Returns the wider parameters of a block, of its experts or of the shared expert."""
    result = {}
    for name, module in tree.items():
        if name in PROJECTIONS:
            result[name] = _projection(model, name, module, sources, layouts.get(name), rng)
        elif name == ROUTER:
            result[name] = _shared(module, sources.stream, rng)
        elif name in ("norm1", "norm2", "norm1_out", "norm2_out"):
            result[name] = {leaf: array[sources.stream] for leaf, array in module.items()}
        elif name in (QUERY_NORMS, KEY_NORMS):
            index = sources.heads[name[0]]
            result[name] = {leaf: _select_heads(array, index) for leaf, array in module.items()}
        elif name in ("experts", "shared"):
            result[name] = _block(model, module, sources, layouts, rng)
        else:  # Norms of queries and keys, over the width of a head.
            result[name] = module
    return result


def _projection(model, name, module, sources, layouts, rng):
    """Returns the wider leaves of a projection; `layouts` are (old, new) or None."""
    inputs, outputs = sources.projection(name)
    result, leaves = {}, model.linear(name).leaves
    for leaf, array in module.items():
        known = leaves.get(leaf, BIAS)
        if known.is_blocks:
            array = layouts[0].to_dense(array)
        if known.output_dim is not None:
            array = array[..., outputs]
        if known.input_dim is not None or known.is_blocks:
            array = _shared(array, inputs, rng)
        result[leaf] = layouts[1].from_dense(array) if known.is_blocks else array
    return result


def _select_heads(array, index):
    """Returns the features of an array of heads at an index into all of them, in its shape."""
    return array.reshape(-1)[index].reshape(-1, *array.shape[1:])


def _copies(source):
    """Returns whether a feature has several copies."""
    return len(source) > source.max() + 1


def _shared(weight, source, rng):
    """Returns a weight [..., in, out] of repeated inputs, whose copies sum to the old ones."""
    if not _copies(source):
        return weight[..., source, :]
    counts = np.bincount(source)
    rows = weight[..., source, :]
    noise = rng.uniform(-SPREAD, SPREAD, rows.shape).astype(np.float32)
    order = np.argsort(source, kind="stable")
    starts = np.cumsum(counts) - counts
    # In this order the copies of a feature lie side by side, so a sum of each run is that of a
    # feature.
    means = np.add.reduceat(noise[..., order, :], starts, axis=-2) / counts[:, None]
    # The noise of a feature's copies has the mean 0, so their shares sum to 1.
    shares = (1 + noise - means[..., source, :]) / counts[source][:, None]
    return (rows * shares).astype(np.float32)


def _repeats(sources, name):
    """Returns whether the features of a projection are all old ones in order, again and again."""
    return all(
        np.array_equal(source, np.arange(len(source)) % (source.max() + 1))
        and len(source) % (source.max() + 1) == 0
        for source in sources.projection(name)
    )


def _repeated(layout, sources, name):
    """Returns the layout whose grid is that of `layout` again and again."""
    sides = (len(source) // (source.max() + 1) for source in sources.projection(name))
    return BlockLayout.from_mask(np.tile(layout.mask, tuple(sides)), layout.block)


def _refuse_other_blocks(old, new, name, unstored):
    """Raises UserError if `new` stores blocks of a projection that cannot have the old ones."""
    stored = new.linear(name).weight.stores_blocks
    if stored and unstored:
        raise UserError(
            f"{name} is block-sparse in this run and in the initial weights, whose blocks cannot "
            "be repeated at these widths; legal: model.num_heads, model.num_kv_heads and "
            "model.d_ff of the initial weights times whole numbers, one number for the heads, or "
            f"sparsity.projections without {name}."
        )
    shapes = [model.projection_shape(name) for model in (old, new)]
    if old.experts and name in MLP and shapes[0] != shapes[1]:
        raise UserError(
            f"{name} of the experts is block-sparse in the initial weights, and experts have the "
            "layout that the pattern chooses at their widths; legal: "
            f"model.d_model={old.d_model} with model.d_ff={old.d_ff}."
        )
