"""Prunes one projection: which groups of weights stay, the weights that are left, their damping."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy import linalg

from sparse_dataflow.core.layouts.balance import balanced_top
from sparse_dataflow.core.ops.hadamard.transform import hadamard
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.pruning import second_order
from sparse_dataflow.pruning.columns import one_thread
from sparse_dataflow.pruning.groups import Groups
from sparse_dataflow.pruning.moments import Moments
from sparse_dataflow.pruning.refit import Problem, refit

DAMPINGS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Dampings that are tried, relative to the mean squared input."""
FIRST = DAMPINGS.index(1e-2)
"""The first damping that is tried."""
ROUNDS = 8
"""Rounds of selection: more change little."""
SAMPLE = 64
"""Groups of outputs that the damping is chosen by."""
LARGE = 1024
"""Inputs from which it is chosen by a quarter of these groups: each is fitted for each damping."""


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """What is left of a projection.

    Attributes:
      groups: what is kept or removed together.
      stay: groups of each pool that stay.
      rounds: in how many rounds the others go, see `second_order`; 0 for `ROUNDS`.
      fan_out: groups that stay along each input; 0 for any numbers.
      allowed: bool [in groups, out groups] that may stay; None for all.
      support: bool [in groups, out groups] that stay, where that is decided; else None.
      hadamard: width of the Walsh-Hadamard transform of the inputs that the weights read; or 0.
    """

    groups: Groups
    stay: int
    rounds: int = 1
    fan_out: int = 0
    allowed: np.ndarray | None = None
    support: np.ndarray | None = None
    hadamard: int = 0

    @classmethod
    def balanced(
        cls, shape: tuple[int, int], block: int, density: float, rounds: int, **others: Any
    ) -> "Target":
        """Returns the target of square blocks with equal fan-in and equal fan-out.

        Args:
          shape: [in, out] of the matrix.
          block: side of a block.
          density: one that a balanced layout has.
          rounds: see `Target`.
          **others: further attributes.
        """
        groups = Groups(block, block)
        rows, cols = groups.grid(shape)
        ring = math.gcd(rows, cols)
        degree = round(density * ring)
        fan_in, fan_out = degree * rows // ring, degree * cols // ring
        return cls(groups, fan_in, rounds, fan_out, **others)

    def select_outputs(self, outputs: np.ndarray) -> "Target":
        """Returns the target of some groups of outputs, in one round and with any fan-out."""
        allowed, support = (
            None if mask is None else mask[:, outputs] for mask in (self.allowed, self.support)
        )
        return dataclasses.replace(self, rounds=1, fan_out=0, allowed=allowed, support=support)


class Pruned(NamedTuple):
    """A pruned projection.

    Attributes:
      kernel: float64 [in, out], zero outside of the mask.
      mask: bool [in groups, out groups] that stay.
      damping: the one of least held-out error.
      error: squared error of the outputs on held-out tokens, relative to the squared outputs.
    """

    kernel: np.ndarray
    mask: np.ndarray
    damping: float
    error: float


def prune(fit: Moments, held_out: Moments, kernel: np.ndarray, target: Target) -> Pruned:
    """Returns a projection with few weights, whose outputs are nearest to the wanted ones.

    The damping is the one with which one round of selection and a fit to `fit` give the least error
    on held-out tokens, over at most `SAMPLE` groups of outputs, or a quarter of them if groups of
    several outputs have `LARGE` or more inputs.  With it, groups and weights are chosen from all
    tokens.

    Raises:
      UserError: the moments have no positive definite matrix at any damping.
    """
    with one_thread(len(kernel)):
        return _pruned(fit, held_out, kernel, target)


def _pruned(fit, held_out, kernel, target):
    if target.hadamard:
        bare = dataclasses.replace(target, hadamard=0)
        first, second = (_mixed(each, target.hadamard) for each in (fit, held_out))
        result = prune(first, second, _transformed(kernel, target.hadamard), bare)
        return result._replace(kernel=_transformed(result.kernel, target.hadamard))
    count = kernel.shape[1] // target.groups.cols
    # Damping is chosen on a sample of outputs, as each try costs a whole selection.  Outputs have
    # problems of their own with the same inputs, so a sample says enough.
    is_large = kernel.shape[0] >= LARGE and target.groups.cols >= 4
    most = SAMPLE // 4 if is_large else SAMPLE
    sample = np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))
    columns = second_order.expanded(np.isin(np.arange(count), sample)[None], target.groups)[0]
    columns = np.flatnonzero(columns)
    few_fit, few_held_out = fit.outputs(columns), held_out.outputs(columns)

    def error(damping, target):
        try:
            problem = Problem.of(few_fit, kernel[:, columns], damping)
            mask = chosen_groups(problem, target)
            return few_held_out.error(_refit(problem, mask, target.groups))
        except linalg.LinAlgError:
            return math.inf

    one_round = target.select_outputs(sample)
    damping = _least(lambda each: error(each, one_round))
    # With the damping chosen, the held-out inputs are inputs as well.
    problem = Problem.of(fit + held_out, kernel, damping)
    try:
        mask = chosen_groups(problem, target)
        weights = _refit(problem, mask, target.groups)
    except linalg.LinAlgError:
        raise UserError(
            "The inputs have no positive definite second moments; legal: finite activations."
        ) from None
    # The error of the sample's groups as they were chosen in the end, on tokens that are in the fit
    # by now.
    kept = dataclasses.replace(one_round, support=mask[:, sample])
    return Pruned(weights, mask, damping, error(damping, kept))


def chosen_groups(problem: Problem, target: Target) -> np.ndarray:
    """Returns bool [in groups, out groups] that stay."""
    if target.support is not None:
        return target.support
    groups, stay = target.groups, target.stay
    costs = second_order.costs(problem, groups, stay, target.rounds or ROUNDS, target.allowed)
    if not target.fan_out:
        return second_order.select(costs, groups, stay)
    forbidden = None if target.allowed is None else ~target.allowed
    # Costs of forbidden blocks are -inf, which the program of the layout does not take.
    finite = np.where(np.isfinite(costs), costs, 0.0)
    return balanced_top(finite, stay, target.fan_out, forbidden=forbidden)


def _least(error):
    """Returns the damping of least error, walking from the middle as long as the error falls."""
    errors = {}

    def at(number):
        if number not in errors:
            errors[number] = error(DAMPINGS[number]) if 0 <= number < len(DAMPINGS) else math.inf
        return errors[number]

    best = FIRST
    # The error is taken to have one minimum, so a side on which it falls is the side of it.
    for step in (-1, 1):
        while at(best + step) < at(best):
            best += step
        if best != FIRST:
            break
    return DAMPINGS[best]


def _refit(problem, mask, groups):
    return refit(problem, second_order.expanded(mask, groups), groups.cols)


def _transformed(rows: np.ndarray, width: int) -> np.ndarray:
    """Returns the Walsh-Hadamard transform of the first axis."""
    # `hadamard` transforms the last axis.
    return np.asarray(hadamard(jnp.asarray(rows.T, jnp.float32), width), np.float64).T


def _mixed(moments: Moments, width: int) -> Moments:
    """Returns the moments of transformed inputs."""
    halves = _transformed(_transformed(moments.inputs, width).T, width)
    return dataclasses.replace(
        moments,
        # H M H^T from both sides; float32 rounding leaves it not quite symmetric.
        inputs=(halves + halves.T) / 2,
        products=_transformed(moments.products, width),
        input_sum=_transformed(moments.input_sum[:, None], width)[:, 0],
    )
