"""Least-squares weights on a support.

The fit is that of arXiv 2301.00774 (SparseGPT) on its support, exactly: the weights that stay make
up for those that go, for the inputs that the layer reads.
"""

import dataclasses
import functools

import numpy as np
from scipy import linalg

from sparse_dataflow.pruning.columns import for_each
from sparse_dataflow.pruning.moments import Moments


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A least-squares problem with damping: minimises the squared error plus that of the weights.

    Attributes:
      hessian: [in, in].
      products: [in, out]; the solution without a mask is hessian⁻¹ products.
    """

    hessian: np.ndarray
    products: np.ndarray

    @functools.cached_property
    def inverse(self) -> np.ndarray:
        """The inverse of the Hessian, by its Cholesky factor."""
        factor, _ = linalg.cho_factor(self.hessian, lower=True, check_finite=False)
        inverse, _ = linalg.lapack.dpotri(factor, lower=True, overwrite_c=True)
        return np.where(np.tri(len(inverse), dtype=bool), inverse, inverse.T)

    @functools.cached_property
    def single(self) -> tuple[np.ndarray, ...]:
        """The Hessian, its inverse and the solution in float32."""
        arrays = self.hessian, self.inverse, self.solution
        return tuple(each.astype(np.float32) for each in arrays)

    @functools.cached_property
    def solution(self) -> np.ndarray:
        """The least-squares weights without a mask."""
        return self.inverse @ self.products

    @classmethod
    def of(cls, moments: Moments, kernel: np.ndarray, damping: float) -> "Problem":
        """Returns the problem whose damping pulls the weights to the old ones.

        So an input that no token has keeps its weights, and damping alone changes no weight.

        Args:
          moments: of inputs and wanted outputs.
          kernel: [in, out], the old weights.
          damping: relative to the mean of the squared inputs.
        """
        size = len(moments.inputs)
        # Where all inputs are zero their trace is too, and the damping alone keeps the matrix
        # definite.
        added = damping * np.trace(moments.inputs) / size or damping
        hessian = moments.inputs + added * np.eye(size)
        return cls(hessian, moments.products + added * np.asarray(kernel, np.float64))


RUN = 128
"""Outputs whose arrays are small enough for a cache."""
STEPS = 30
"""Most steps of conjugate gradients."""
TOLERANCE = 1e-4
"""Share of the error that the steps so far removed, below which a step is the last one."""
SLOWER = 6
"""How many times longer an operation of a small factorisation takes than one of a large product."""


def refit(problem: Problem, mask: np.ndarray, cols: int = 1) -> np.ndarray:
    """Returns float64 [in, out], the least-squares weights that are zero outside of a mask.

    By one factorisation for each support, or by conjugate gradients where these take less time.

    Args:
      problem: moments of the projection.
      mask: bool [in, out]; equal in each run of `cols` outputs.
      cols: consecutive outputs that share their inputs.
    """
    inputs, outputs = mask.shape
    # A Cholesky factor takes n^3 / 3 operations, a step of gradients 2 inputs^2 for each output.
    factorisations = SLOWER * np.power(mask[:, ::cols].sum(0), 3.0).sum() / 3
    if factorisations > STEPS * 2.0 * inputs**2 * outputs:
        return by_gradients(problem, mask)
    weights = np.zeros(problem.products.shape)
    supports: dict[bytes, list[int]] = {}
    for column in range(0, weights.shape[1], cols):
        supports.setdefault(mask[:, column].tobytes(), []).append(column)

    def solve(columns):  # Outputs of equal support share one factorisation.
        chosen = np.flatnonzero(mask[:, columns[0]])
        outputs = (np.asarray(columns)[:, None] + np.arange(cols)).ravel()
        products = problem.products[np.ix_(chosen, outputs)]
        matrix = problem.hessian[np.ix_(chosen, chosen)]
        factor = linalg.cho_factor(matrix, overwrite_a=True, check_finite=False)
        solution = linalg.cho_solve(factor, products, check_finite=False)
        weights[np.ix_(chosen, outputs)] = solution

    supports.pop(bytes(inputs), None)  # No inputs.
    for_each(solve, supports.values(), inputs)
    return weights


def runs(outputs: int, width: int = RUN) -> list[slice]:
    """Returns runs of outputs, which are computed together."""
    return [slice(start, min(start + width, outputs)) for start in range(0, outputs, width)]


def by_gradients(problem: Problem, mask: np.ndarray) -> np.ndarray:
    """Returns the weights of `refit` by conjugate gradients, within about `TOLERANCE` of its error.

    Args:
      problem: moments of the projection.
      mask: bool [in, out].
    """
    weights = np.where(mask, problem.single[2], 0)

    def approach(columns):
        descend(problem, mask[:, columns], weights[:, columns], columns, STEPS, TOLERANCE)

    for_each(approach, runs(mask.shape[1]), len(mask))
    return weights.astype(np.float64)


def descend(
    problem: Problem,
    mask: np.ndarray,
    weights: np.ndarray,
    columns: slice,
    steps: int,
    tolerance: float = 0.0,
) -> None:
    """Moves weights to the least-squares ones of a mask, by conjugate gradients in float32.

    The inverse without the inputs that went is near to the inverse of what is left of the Hessian,
    so few steps suffice.

    Args:
      problem: moments of the projection.
      mask: bool [in, columns].
      weights: float32 [in, columns], zero outside of the mask; changed in place.
      columns: outputs of the weights.
      steps: most steps.
      tolerance: see `TOLERANCE`.
    """
    hessian, inverse, solution = problem.single
    least, mask = np.finfo(weights.dtype).tiny, mask.astype(weights.dtype)
    # Of small differences: the products themselves would cancel in float32.
    residual = mask * (hessian @ (solution[:, columns] - weights))
    direction, before, removed = np.zeros_like(weights), np.inf, 0.0
    for _ in range(steps):
        # The preconditioner: the inverse of the whole Hessian, without what the mask removes.
        scaled = mask * (inverse @ residual)
        power = np.einsum("io,io->o", residual, scaled)
        # Fletcher-Reeves; before the first step `before` is infinite, and the direction starts at
        # zero.
        direction *= power / np.maximum(before, least)
        direction += scaled
        product = mask * (hessian @ direction)
        length = power / np.maximum(np.einsum("io,io->o", direction, product), least)
        weights += length * direction
        residual -= length * product
        # By how much a step lowers the error, summed over the outputs.
        gain = float(length @ power)
        removed += gain
        if gain < tolerance * removed:
            break
        before = power
