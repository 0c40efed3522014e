"""Exchanges of features that put large weights where a pattern stores blocks.

A model computes the same function if features of its residual stream change places, or features
and heads within a layer.  The stored blocks of a pattern stay where they are, so products of equal
groups stay batches of dense products, and what is stored of the weights grows.

The order is searched in turns, each of which keeps the others: the features of every MLP, the heads
of every layer, then the residual stream.  A turn exchanges pairs of features while the stored sum
grows; heads are assigned optimally.  So the result is no worse than the order before it.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP, ROW_PARALLEL
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.model import stacks
from sparse_dataflow.interchange.width import Sources

LEAST_GAIN = 1e-3
"""Relative growth of the stored sum below which the search ends."""

MOST_TURNS = 8
"""Most turns of all layers and the residual stream."""

MOST_SWEEPS = 3
"""Most sweeps over the pairs of places in one turn."""


@dataclasses.dataclass(frozen=True)
class FeatureOrder:
    """An order of a model's features.

    Attributes:
      sources: old feature of each new one, for every layer; all have one residual stream.
      before: share of the scores that the layouts store in the old order.
      after: share that they store in this order.
    """

    sources: tuple[Sources, ...]
    before: float
    after: float


def search(
    model: ModelConfig,
    params: Mapping,
    layouts: Mapping[str, Sequence[BlockLayout]],
) -> FeatureOrder:
    """Returns an order in which layouts store a large part of the squared weights.

    Args:
      model: config of a dense model without experts.
      params: its parameters in numpy.
      layouts: projection -> layout of each layer, for the projections that will be block-sparse.
    """
    trees = list(stacks.layers(params["blocks"]))
    layers = [
        _Layer(
            model,
            {name: _Scores(tree[name]["kernel"]) for name in layouts},
            {name: layer_layouts[i] for name, layer_layouts in layouts.items()},
        )
        for i, tree in enumerate(trees)
    ]
    total = sum(scores.total() for layer in layers for scores in layer.scores.values())
    stream = _Places.of([mask for layer in layers for mask in layer.stream_masks()])
    stored = [_stored(_stream_scores(layers, stream), stream, layers[0].sources.stream)]
    # In turns: hidden features and heads belong to one layer, the stream's order to all of them.
    for _ in range(MOST_TURNS):
        for layer in layers:
            layer.exchange_hidden()
            layer.exchange_heads()
        scores = _stream_scores(layers, stream)
        order = stream.exchanged(scores, layers[0].sources.stream)
        for layer in layers:
            layer.sources = layer.sources._replace(stream=order)
        stored.append(_stored(scores, stream, order))
        if stored[-1] - stored[-2] <= LEAST_GAIN * stored[-2]:
            break
    return FeatureOrder(
        tuple(layer.sources for layer in layers), stored[0] / total, stored[-1] / total
    )


def _stream_scores(layers, stream):
    masks = iter(stream.masks)
    return sum(layer.stream_scores([next(masks) for _ in layer.layouts]) for layer in layers)


def _stored(scores, places, order):
    """Returns the sum of the scores of features where they are."""
    return float(scores[order, places.place_kinds].sum())


class _Scores:
    """Squares of a weight [in, out]; made again for every use."""

    def __init__(self, kernel):
        self._kernel = kernel

    def squares(self):
        return np.square(np.asarray(self._kernel, np.float32))

    def total(self):
        return float(self.squares().sum(dtype=np.float64))

    def by_input(self, outputs, block):
        """Returns float [in, out_blocks], sums over the blocks of outputs in an order."""
        squares = self.squares()[:, outputs]
        return squares.reshape(len(squares), -1, block).sum(2, dtype=np.float64)

    def by_output(self, inputs, block):
        """Returns float [out, in_blocks], sums over the blocks of inputs in an order."""
        squares = self.squares()[inputs]
        return squares.reshape(-1, block, squares.shape[1]).sum(1, dtype=np.float64).T


@dataclasses.dataclass(frozen=True)
class _Places:
    """Places of features that layouts treat equally.

    Attributes:
      masks: one for each weight, bool [kinds, blocks of its other side], what a kind of place
        stores.
      place_kinds: int [features], kind of each place.
    """

    masks: tuple[np.ndarray, ...]
    place_kinds: np.ndarray

    @classmethod
    def of(cls, masks: Sequence[tuple[np.ndarray, int]]) -> "_Places":
        """Returns the kinds of places of masks [blocks of features, other blocks], with blocks."""
        rows = np.concatenate([mask for mask, _ in masks], axis=1)
        _, first, kinds = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        block = masks[0][1]
        return cls(tuple(mask[first] for mask, _ in masks), np.repeat(kinds.ravel(), block))

    def exchanged(self, scores, order):
        """Returns the order after exchanges of features between kinds, float [features, kinds]."""
        kinds = np.empty_like(self.place_kinds)
        kinds[order] = self.place_kinds
        new_kinds = _exchanged(scores, kinds)
        if np.array_equal(new_kinds, kinds):
            return order
        new_order = np.empty_like(order)
        # Both sorts put kinds in order, and a kind has as many places as features: the i-th feature
        # of a kind takes its i-th place.
        by_place = np.argsort(self.place_kinds, kind="stable")
        new_order[by_place] = np.argsort(new_kinds, kind="stable")
        return new_order


class _Layer:
    """A layer's weights, their layouts, and the order of its features so far."""

    def __init__(self, model: ModelConfig, scores, layouts: Mapping[str, BlockLayout]):
        self.model, self.scores, self.layouts = model, scores, layouts
        self.sources = Sources.of(model, model)

    def stream_masks(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yields (bool [blocks of the residual stream, other blocks], block) of each weight."""
        for name, layout in self.layouts.items():
            yield layout.mask.T if name in ROW_PARALLEL else layout.mask, layout.block

    def stream_scores(self, masks: Sequence[np.ndarray]) -> np.ndarray:
        """Returns float [features, kinds], what a feature stores at each kind of place.

        Args:
          masks: `_Places.masks` of this layer's weights.
        """
        others = [self._other_sums(name, name in ROW_PARALLEL) for name in self.scores]
        return _scores(others, masks)

    def exchange_hidden(self) -> None:
        """Exchanges the features of the MLP."""
        names = [name for name in self.layouts if name in MLP]
        if not names:
            return
        masks = [
            (lay.mask if name in ROW_PARALLEL else lay.mask.T, lay.block)
            for name, lay in self.layouts.items()
            if name in names
        ]
        places = _Places.of(masks)
        sums = [self._other_sums(name, name not in ROW_PARALLEL) for name in names]
        order = places.exchanged(_scores(sums, places.masks), self.sources.hidden)
        self.sources = self.sources._replace(hidden=order)

    def exchange_heads(self) -> None:
        """Exchanges heads, of keys and values with their queries."""
        from scipy.optimize import linear_sum_assignment

        units, gains = self.model.kv_heads, 0.0
        names = [name for name in self.layouts if name not in MLP]
        if not names or units == 1:
            return
        for name in names:
            mask = self.layouts[name].mask if name in ROW_PARALLEL else self.layouts[name].mask.T
            sums = self._other_sums(name, name not in ROW_PARALLEL)
            by_block = (sums @ mask.T.astype(sums.dtype)).reshape(units, -1, len(mask))
            features = np.arange(len(sums)).reshape(units, -1) // self.layouts[name].block
            each = np.arange(features.shape[1])
            # [heads, places]: feature j of a head takes feature j of the head at a place.  Only
            # whole heads change places, since attention mixes the features of one.
            gains = gains + by_block[:, each, features].sum(-1)
        heads, places = linear_sum_assignment(-gains)
        order = heads[np.argsort(places)]
        moved = lambda n: np.arange(n).reshape(units, -1)[order].ravel()  # noqa: E731
        self.sources = self.sources._replace(
            attended=moved(len(self.sources.attended)),
            heads={name: moved(len(index)) for name, index in self.sources.heads.items()},
        )

    def _other_sums(self, name, outputs):
        """Returns float [features, other blocks] of the outputs or inputs of a weight, in the old
        order of these features and the present order of the others."""
        others = self.sources.projection(name)[0 if outputs else 1]
        scores, block = self.scores[name], self.layouts[name].block
        return scores.by_output(others, block) if outputs else scores.by_input(others, block)


def _scores(sums, masks):
    return sum(each @ mask.T.astype(each.dtype) for each, mask in zip(sums, masks, strict=True))


def _exchanged(scores: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Returns kinds after exchanges of pairs that raise the sum of the features' scores.

    Args:
      scores: float [features, kinds].
      kinds: int [features]; every kind keeps its number of features.
    """
    kinds, least = kinds.copy(), 1e-9 * float(np.abs(scores).max(initial=0.0))
    pairs = list(itertools.combinations(range(scores.shape[1]), 2))
    for _ in range(MOST_SWEEPS):
        moved = False
        for pair in pairs:
            sides = []
            for kind, other in (pair, pair[::-1]):
                members = np.flatnonzero(kinds == kind)
                gain = scores[members, other] - scores[members, kind]
                best = np.argsort(-gain, kind="stable")
                sides.append((members[best], gain[best]))
            (left, left_gain), (right, right_gain) = sides
            count = min(len(left), len(right))
            # Both gains fall, and so do their sums: the pairs worth a swap come first.  No other
            # pairing of these two kinds stores more.  `least` keeps rounding from swapping for
            # ever.
            swaps = int(np.count_nonzero(left_gain[:count] + right_gain[:count] > least))
            kinds[left[:swaps]], kinds[right[:swaps]] = pair[1], pair[0]
            moved = moved or swaps > 0
        if not moved:
            break
    return kinds
