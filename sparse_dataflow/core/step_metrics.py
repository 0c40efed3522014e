"""The numbers that a training step reports, by name.

A metric is one line where its values are: `metrics["largest_input"] = Max(abs(x).max())` in a
section's dictionary.  Its kind says how values of several layers, micro-batches and devices become
one.  Everything else takes any name: executors, the training loop, files, trackers and pages.

| kind | of several values | number |
|---|---|---|
| `Sum` | added | the sum |
| `Mean` | sums and counts are added | sum / count, divided once, on the host |
| `Max` | the largest | the largest |
| `Norm` | squares are added | the root of their sum |
| `Load` | choices of each expert are added | load of the busiest expert over an even load |

Every device of a mesh adds its value.  So a `Sum` is a device's share, while a `Mean` and a `Max`
may also be of values that several devices have.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Reduction(NamedTuple):
    """How values become one.

    Attributes:
      pair: (array, array) -> array.
      devices: (array, mesh axes) -> array, inside `shard_map`.
      empty: what no value is.
    """

    pair: Callable
    devices: Callable
    empty: float


ADDED = Reduction(jnp.add, lax.psum, 0.0)
LARGEST = Reduction(jnp.maximum, lax.pmax, -math.inf)


class Metric:
    """Values of one name: a pytree of arrays, of one layer or stacked over layers."""

    reduction: ClassVar[Reduction] = ADDED

    def number(self) -> float:
        """Returns the number of all layers."""
        raise NotImplementedError

    def by_part(self) -> dict[str, float]:
        """Returns the number of each part, here of each layer; {} for a metric without parts."""
        leaves = jax.tree.leaves(self)
        layers = len(leaves[0]) if np.ndim(leaves[0]) else 0
        each = (jax.tree.map(lambda leaf, i=i: leaf[i], self) for i in range(layers))
        return {f"layer {i}": layer.number() for i, layer in enumerate(each)}


Metrics = Mapping[str, Metric]


def _kind(cls):
    """Registers a kind of metric as a pytree."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, eq=False)(cls))


@_kind
class Sum(Metric):
    """A sum.

    Attributes:
      total: float32 [...].
    """

    total: Any

    def number(self) -> float:
        return float(np.sum(self.total))


@_kind
class Mean(Metric):
    """A mean; 0 of no values.

    Attributes:
      total: float32 [...], sum of the values.
      count: float32 [...], their number or their weight.
    """

    total: Any
    count: Any

    def number(self) -> float:
        return float(_divided(np.sum(self.total), np.sum(self.count)))


@_kind
class Max(Metric):
    """A largest value.

    Attributes:
      largest: float32 [...].
    """

    reduction: ClassVar[Reduction] = LARGEST

    largest: Any

    def number(self) -> float:
        return float(np.max(self.largest))


@_kind
class Norm(Metric):
    """A Euclidean norm.

    Attributes:
      squares: {part: float32 [...], sum of squares}.
    """

    squares: Any

    def number(self) -> float:
        return math.sqrt(math.fsum(float(np.sum(square)) for square in self.squares.values()))

    def by_part(self) -> dict[str, float]:
        return {name: math.sqrt(np.sum(square)) for name, square in self.squares.items()}


@_kind
class Load(Metric):
    """How evenly choices are spread over experts.

    Attributes:
      choices: float32 [..., experts], number of choices of each expert.
    """

    choices: Any

    def number(self) -> float:
        return float(np.max(self.shares())) * self.choices.shape[-1]

    def shares(self) -> np.ndarray:
        """Returns the share of all choices of a layer that each expert has, [..., experts]."""
        return _divided(self.choices, np.sum(self.choices, -1, keepdims=True))


def _divided(total, count):
    """Returns total / count; 0 where there is nothing."""
    return np.divide(total, np.where(count == 0, 1, count))


def _is_metric(node):
    return isinstance(node, Metric)


def _map(function, *trees):
    """Maps (reduction, array, ...) -> array over trees of arrays, which add up, and metrics."""

    def mapped(node, *others):
        reduction = node.reduction if _is_metric(node) else ADDED
        return jax.tree.map(lambda *leaves: function(reduction, *leaves), node, *others)

    return jax.tree.map(mapped, *trees, is_leaf=_is_metric)


def combined(total: Any, more: Any) -> Any:
    """Returns two trees of arrays and metrics as one: arrays are added, metrics by their kind."""
    return _map(lambda reduction, a, b: reduction.pair(a, b), total, more)


def over_devices(tree: Any, axes: Sequence[str]) -> Any:
    """Returns a tree of arrays and metrics as one over mesh axes, inside `shard_map`."""
    return _map(lambda reduction, leaf: reduction.devices(leaf, axes), tree)


def empty(shapes: Any, *leading: int) -> Any:
    """Returns the tree that changes nothing in `combined`, in float32 or wider.

    Args:
      shapes: tree of arrays or shapes, and of metrics.
      leading: axes in front of those of each array.
    """

    def filled(reduction, leaf):
        dtype = jnp.promote_types(leaf.dtype, jnp.float32)
        return jnp.full((*leading, *leaf.shape), reduction.empty, dtype)

    return _map(filled, shapes)


def stacked(layers: Sequence[Metrics]) -> Metrics:
    """Returns the metrics of each layer on the host as one, stacked over the layers."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StepReport:
    """Result of a training step.

    Attributes:
      metrics: name -> values; each step has "loss" and "gradient_norm".
    """

    metrics: Metrics

    @property
    def loss(self) -> Any:
        """The loss, in nats per token."""
        return self.metrics["loss"].total  # type: ignore[attr-defined]

    @property
    def gradient_norms(self) -> dict[str, float]:
        """The norm of the gradient of each parameter group, of a report on the host."""
        return self.metrics["gradient_norm"].by_part()

    def numbers(self) -> dict[str, float]:
        """Returns the number of each metric, of a report on the host."""
        return {name: metric.number() for name, metric in self.metrics.items()}

    def non_finite(self) -> Iterator[str]:
        """Yields what is not finite besides loss and gradients, such as "router_z_loss of layer 1",
        with the first part of each metric."""
        for name, metric in self.metrics.items():
            if name not in ("loss", "gradient_norm") and not math.isfinite(metric.number()):
                parts = (f" of {k}" for k, v in metric.by_part().items() if not math.isfinite(v))
                yield name + next(parts, "")
