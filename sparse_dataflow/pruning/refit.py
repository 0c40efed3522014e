"""Least-squares weights on a support.

The fit is that of arXiv 2301.00774 (SparseGPT) on its support, exactly: the weights that stay make
up for those that go, for the inputs that the layer reads.
"""

from typing import NamedTuple

import numpy as np
from scipy import linalg

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


def refit(problem: Problem, mask: np.ndarray, cols: int = 1) -> np.ndarray:
    """Returns float64 [in, out], the least-squares weights that are zero outside of a mask.

    Args:
      problem: moments of the projection.
      mask: bool [in, out]; equal in each run of `cols` outputs.
      cols: consecutive outputs that share their inputs.
    """
    weights = np.zeros(problem.products.shape)
    supports: dict[bytes, list[int]] = {}
    for column in range(0, weights.shape[1], cols):
        supports.setdefault(mask[:, column].tobytes(), []).append(column)
    for columns in supports.values():  # Outputs of equal support share one factorisation.
        chosen = np.flatnonzero(mask[:, columns[0]])
        if not len(chosen):
            continue
        outputs = (np.asarray(columns)[:, None] + np.arange(cols)).ravel()
        products = problem.products[np.ix_(chosen, outputs)]
        matrix = problem.hessian[np.ix_(chosen, chosen)]
        factor = linalg.cho_factor(matrix, overwrite_a=True, check_finite=False)
        solution = linalg.cho_solve(factor, products, check_finite=False)
        weights[np.ix_(chosen, outputs)] = solution
    return weights
