"""The numbers that a training step reports, by name.

A metric is one line where its values are, such as `metrics["largest_input"] = Max(abs(x).max())` in
a section, of an `x` without gradient.  Its kind says how values of several layers, micro-batches
and devices become one.  Executors, the training loop, files, trackers and pages take any name.

| kind | several values | number |
|---|---|---|
| `Sum` | are added | the sum |
| `Mean` | sums and counts are added | sum / count, divided once, on the host |
| `Max` | the largest | the largest |
| `Norm` | squares are added | the root of their sum |
| `Load` | choices of each expert are added | load of the busiest expert over an even load |

Every device of a mesh has a value.  So a `Sum` is of a device's share, while a `Mean` and a `Max`
may be of values that several devices have.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

T = TypeVar("T")


class Reduction(NamedTuple):
    """How two arrays, or those of the devices along mesh axes, become one; and an empty one."""

    pair: Callable
    devices: Callable
    empty: float


ADDED = Reduction(jnp.add, lax.psum, 0.0)
LARGEST = Reduction(jnp.maximum, lax.pmax, -math.inf)


class Metric:
    """Values of one name: a pytree of float32 arrays, of one layer or stacked over layers."""

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


@dataclass_transform(frozen_default=True, eq_default=False)
def _kind(cls: type[T]) -> type[T]:
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, eq=False)(cls))


@_kind
class Sum(Metric):
    """A sum."""

    total: jax.Array

    def number(self) -> float:
        return float(np.sum(self.total))


@_kind
class Mean(Metric):
    """A mean: the sum of the values, and their number or weight; 0 of no values."""

    total: jax.Array
    count: jax.Array

    def number(self) -> float:
        return float(_divided(np.sum(self.total), np.sum(self.count)))


@_kind
class Max(Metric):
    """A largest value."""

    reduction: ClassVar[Reduction] = LARGEST

    largest: jax.Array

    def number(self) -> float:
        return float(np.max(self.largest))


@_kind
class Norm(Metric):
    """A Euclidean norm: {part: sum of squares}."""

    squares: Mapping[str, Any]

    def number(self) -> float:
        return math.sqrt(math.fsum(float(np.sum(square)) for square in self.squares.values()))

    def by_part(self) -> dict[str, float]:
        return {name: math.sqrt(np.sum(square)) for name, square in self.squares.items()}


@_kind
class Load(Metric):
    """How evenly choices are spread: [..., experts], number of choices of each expert."""

    choices: jax.Array

    def number(self) -> float:
        return float(np.max(self.shares())) * self.choices.shape[-1]

    def shares(self) -> np.ndarray:
        """Returns the share of all choices of a layer that each expert has, [..., experts]."""
        return _divided(self.choices, np.sum(self.choices, -1, keepdims=True))


def _divided(total, count):
    return np.divide(total, np.where(count == 0, 1, count))


def _map(function, *trees):
    """Maps (reduction, array, ...) -> array over trees of arrays, which add up, and metrics."""

    def mapped(node, *others):
        reduction = getattr(node, "reduction", ADDED)
        return jax.tree.map(lambda *leaves: function(reduction, *leaves), node, *others)

    return jax.tree.map(mapped, *trees, is_leaf=lambda node: isinstance(node, Metric))


def combined(total: T, more: T) -> T:
    """Returns two trees of arrays and metrics as one: arrays are added, metrics by their kind."""
    return _map(lambda reduction, a, b: reduction.pair(a, b), total, more)


def over_devices(tree: T, axes: Sequence[str]) -> T:
    """Returns a tree of arrays and metrics as one over mesh axes, inside `shard_map`."""
    return _map(lambda reduction, leaf: reduction.devices(leaf, axes), tree)


def empty(shapes: object, *leading: int) -> Any:
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


@_kind
class StepReport:
    """The result of a training step: its metrics, among them "loss" and "gradient_norm"."""

    metrics: Metrics

    @property
    def loss(self) -> jax.Array:
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
        """Yields the metrics that are not finite, besides those of `loss` and `gradient_norms`,
        with their first such part, as in "router_z_loss of layer 1"."""
        for name, metric in self.metrics.items():
            if name not in ("loss", "gradient_norm") and not math.isfinite(metric.number()):
                parts = (f" of {k}" for k, v in metric.by_part().items() if not math.isfinite(v))
                yield name + next(parts, "")
