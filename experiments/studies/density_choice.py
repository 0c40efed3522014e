"""The choice of densities by projection and depth: the least sum of measured rises in a budget."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from sparse_dataflow.files.errors import UserError

FIRST, EQUAL = "first", "equal density"
SPENT = 0.97
"""Least part of the budget that a choice spends, so that bad choices are not merely cheap ones."""

COMPARED = 5
MOST_CHOICES = 2_000_000
Key = tuple[str, int]
"""(projection, part of the depth)"""

Rises = Mapping[Key, Mapping[float, float]]
"""Density below 1 -> rise of the loss if the projection alone has it there, in nats a token."""

Costs = Mapping[str, Mapping[float, float]]
"""Projection -> legal density -> cost."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A density for each projection, and a multiple of all of them for each part of the depth.

    Attributes:
      cost: over that of the budget.
      rise: predicted rise of the loss, in nats a token.
    """

    densities: Mapping[str, float]
    depth: tuple[float, ...]
    cost: float
    rise: float

    @property
    def is_flat(self) -> bool:
        """Whether all layers have equal densities."""
        return len({*self.depth}) == 1

    @property
    def budget(self) -> str:
        """The value of `sparsity.budget` that trains it."""
        names = ",".join(f"{name}:{density:.6g}" for name, density in self.densities.items())
        multiples = ",".join(f"{multiple:.6g}x" for multiple in self.depth)
        return names if self.is_flat else f"{names},depth:{multiples}"


def curve(rises: Mapping[float, float]) -> Callable[[float], float]:
    """Returns (density) -> rise: linear over the logarithm between measurements.

    It is 0 at density 1, and never less at a lower density.

    Args:
      rises: see `Rises`.
    """
    points = {**rises, 1.0: 0.0}
    densities = sorted(points)
    falling = np.maximum.accumulate([points[d] for d in reversed(densities)])[::-1]
    return lambda density: float(np.interp(math.log(density), np.log(densities), falling))


def profiles(thirds: int, multiples: Iterable[float]) -> list[tuple[float, ...]]:
    """Returns the multiples of each part of the depth whose mean is 1, equal ones first."""
    products = itertools.product(multiples, repeat=thirds)
    return list(
        dict.fromkeys([(1.0,) * thirds, *(m for m in products if math.isclose(sum(m), thirds))])
    )


def ranked(
    rises: Rises,
    costs: Costs,
    budget: float,
    depths: Sequence[tuple[float, ...]] = ((1.0,),),
    legal: Callable[[str, float], bool] = lambda name, density: True,
) -> list[Choice]:
    """Returns the choices that spend a budget, the one with the least sum of rises first.

    Args:
      budget: cost that none exceeds, and of which each spends `SPENT`.
      depths: see `profiles`; a mean of 1 leaves the cost.
      legal: (projection, density) -> whether a part of the depth may have it.

    Raises:
      UserError: there are too many to compare.
    """
    curves, result = {key: curve(each) for key, each in rises.items()}, []
    for depth in depths:
        levels = [
            [d for d in each if all(legal(name, d * m) for m in depth)]
            for name, each in costs.items()
        ]
        if (count := math.prod(map(len, levels))) > MOST_CHOICES:
            raise UserError(f"{count:,} choices are too many; legal: fewer --densities.")
        index = np.indices([*map(len, levels)]).reshape(len(levels), -1)
        spent, rise = np.zeros(index.shape[1]), np.zeros(index.shape[1])
        for name, each, at in zip(costs, levels, index):
            spent += np.array([costs[name][d] for d in each])[at]
            rise += np.array(
                [sum(curves[name, third](d * m) for third, m in enumerate(depth)) for d in each]
            )[at]
        for number in np.flatnonzero((spent <= budget * (1 + 1e-9)) & (spent >= budget * SPENT)):
            densities = {name: d[i] for name, d, i in zip(costs, levels, index[:, number])}
            share, sum_of_rises = float(spent[number] / budget), float(rise[number])
            result.append(Choice(densities, depth, share, sum_of_rises))
    return sorted(result, key=lambda choice: choice.rise)


def compared(order: Sequence[Choice], density: float) -> dict[str, Choice]:
    """Returns name -> choice: the first one, and up to four rivals.

    These are the best one that treats the depth in the other way, equal density, one in the middle
    of the order and the last; the next best in place of those that are the same.
    """
    first = order[0]
    other = [choice for choice in order if choice.is_flat != first.is_flat]
    equal = [c for c in order if c.is_flat and {*c.densities.values()} == {density}]
    named = {
        FIRST: [first],
        "unequal over depth" if first.is_flat else "equal over depth": other,
        EQUAL: equal,
        "middle": [order[len(order) // 2]],
        "last": [order[-1]],
        **{f"rank {number}": [each] for number, each in enumerate(order[1:COMPARED], 2)},
    }
    result: dict[str, Choice] = {}
    for name, candidates in named.items():
        if candidates and candidates[0] not in result.values() and len(result) < COMPARED:
            result[name] = candidates[0]
    return result
