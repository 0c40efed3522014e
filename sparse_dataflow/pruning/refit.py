"""Least-squares weights on a support.

The fit is that of arXiv 2301.00774 (SparseGPT) on its support, exactly: the weights that stay make
up for those that go, for the inputs that the layer reads.
"""

from typing import NamedTuple

import numpy as np
from scipy import linalg

from sparse_dataflow.pruning.columns import for_each
from sparse_dataflow.pruning.moments import Moments


class Problem(NamedTuple):
    """A least-squares problem with damping: minimises the squared error plus that of the weights.

    Attributes:
      hessian: float64 [in, in].
      products: float64 [in, out]; the solution without a mask is hessian⁻¹ products.
    """

    hessian: np.ndarray
    products: np.ndarray

    @property
    def inverse(self) -> np.ndarray:
        """The inverse of the Hessian, by its Cholesky factor."""
        factor, _ = linalg.cho_factor(self.hessian, lower=True, check_finite=False)
        inverse, _ = linalg.lapack.dpotri(factor, lower=True, overwrite_c=True)
        lower = np.tril(inverse)
        return lower + np.tril(lower, -1).T

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
        added = damping * np.trace(moments.inputs) / size or damping
        hessian = moments.inputs + added * np.eye(size)
        return cls(hessian, moments.products + added * np.asarray(kernel, np.float64))


STEPS = 60
"""Most steps of conjugate gradients."""
TOLERANCE = 1e-6
"""Share of the error that the steps so far removed, below which a step is the last one."""


def refit(problem: Problem, mask: np.ndarray, cols: int = 1) -> np.ndarray:
    """Returns float64 [in, out], the least-squares weights that are zero outside of a mask.

    By one factorisation for each support, or by conjugate gradients of all outputs where these need
    fewer operations.

    Args:
      problem: moments of the projection.
      mask: bool [in, out]; equal in each run of `cols` outputs.
      cols: consecutive outputs that share their inputs.
    """
    inputs, outputs = mask.shape
    factorisations = np.power(mask[:, ::cols].sum(0), 3.0).sum() / 3
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


def by_gradients(problem: Problem, mask: np.ndarray, steps: int = STEPS) -> np.ndarray:
    """Returns the weights of `refit` by conjugate gradients, within `TOLERANCE` of its error.

    A step multiplies the Hessian with one matrix, so all outputs share their products.
    """
    diagonal = np.diag(problem.hessian)[:, None]
    weights = np.zeros(mask.shape)
    residual = np.where(mask, problem.products, 0)
    direction = residual / diagonal
    power = (residual * direction).sum(0)
    removed = 0.0
    for _ in range(steps):
        product = np.where(mask, problem.hessian @ direction, 0)
        length = power / np.maximum((direction * product).sum(0), np.finfo(float).tiny)
        weights += length * direction
        residual -= length * product
        gain = float((length * power).sum())
        removed += gain
        if gain < TOLERANCE * removed:
            break
        before, scaled = power, residual / diagonal
        power = (residual * scaled).sum(0)
        direction = scaled + power / np.maximum(before, np.finfo(float).tiny) * direction
    return weights
