"""Second moments of a projection's inputs and wanted outputs, summed over tokens in one pass.

They are about a centre near the mean: differences of large raw moments would cancel, in float32
from a mean of a few hundred deviations on.
"""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.files.errors import UserError

Rows = np.ndarray | jax.Array
"""Rows of activations, or their mean: float64 sums for numpy, float32 for jax."""

HELD_OUT = 5
"""One in so many tokens is held out of fits: of all batches together, the last ones of each."""


def held_out_rows(seen: int, rows: int) -> int:
    """Returns how many of the next rows are held out, after `seen` rows of earlier batches."""
    # Counted over all batches, so that batches shorter than HELD_OUT rows give held-out rows too.
    return (seen + rows) // HELD_OUT - seen // HELD_OUT


@dataclasses.dataclass(frozen=True, eq=False)
class Moments:
    """Sums over the tokens that a projection reads; add those of several batches.

    The squared error of any weight follows from them, so no activation has to be stored.  They are
    of deviations x - centre_x and y - centre_y.

    Attributes:
      inputs: float64 [in, in], xᵀ x.
      products: float64 [in, out], xᵀ y of inputs and wanted outputs.
      squares: float64 [out], the sums of y².
      input_sum: float64 [in].
      output_sum: float64 [out].
      tokens: number of rows.
      centre: float64 [in] and [out], (centre_x, centre_y).
    """

    inputs: np.ndarray
    products: np.ndarray
    squares: np.ndarray
    input_sum: np.ndarray
    output_sum: np.ndarray
    tokens: int
    centre: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, x: Rows, y: Rows, centre: tuple[Rows, Rows] | None = None) -> "Moments":
        """Returns the moments of inputs [tokens, in] and wanted outputs [tokens, out].

        Sums of a batch of jax arrays are float32 products at full precision, those of numpy arrays
        float64.  Sums of several batches are float64.

        Args:
          centre: near the means, or that of other moments, to add these to them.  0 if None.
        """
        if centre is None:
            centre = np.zeros(x.shape[1]), np.zeros(y.shape[1])
        if isinstance(x, np.ndarray):
            x, y = (np.asarray(a, np.float64) - c for a, c in zip((x, y), centre))
            sums = x.T @ x, x.T @ y, np.square(y).sum(0), x.sum(0), y.sum(0)
        else:
            sums = jax.device_get(_batch_sums(x, y, *(jnp.asarray(c, jnp.float32) for c in centre)))
        inputs, products, squares, input_sum, output_sum = (
            np.asarray(each, np.float64) for each in sums
        )
        near = np.asarray(centre[0]), np.asarray(centre[1])
        return cls(inputs, products, squares, input_sum, output_sum, len(x), near)

    def __add__(self, other: "Moments") -> "Moments":
        return self._plus(other, np.add)

    def __iadd__(self, other: "Moments") -> "Moments":
        return self._plus(other, operator.iadd)

    def _plus(self, other, add):
        """Returns the moments of the tokens of both, about the centre of this one."""
        pairs = zip(self.centre, other.centre, strict=True)
        if not all(np.array_equal(mine, yours) for mine, yours in pairs):
            other = other.about(*self.centre)
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("tokens", "centre")]
        sums = {name: add(getattr(self, name), getattr(other, name)) for name in names}
        return dataclasses.replace(self, tokens=self.tokens + other.tokens, **sums)

    def outputs(self, columns: slice | np.ndarray) -> "Moments":
        """Returns the moments of some of the outputs."""
        return dataclasses.replace(
            self,
            products=self.products[:, columns],
            squares=self.squares[columns],
            output_sum=self.output_sum[columns],
            centre=(self.centre[0], self.centre[1][columns]),
        )

    @property
    def finite(self) -> bool:
        """Whether every input and wanted output was finite."""
        return bool(np.isfinite(self.input_sum).all() and np.isfinite(self.squares).all())

    def about(self, centre_x: object, centre_y: object) -> "Moments":
        """Returns the moments about another centre; 0 for those of x and y themselves."""
        move_x, move_y = self.centre[0] - centre_x, self.centre[1] - centre_y
        moved_x = self.input_sum + self.tokens * move_x
        moved_y = self.output_sum + self.tokens * move_y
        # With d = centre - new centre and s the sums, sum (x + d)(x + d)^T = sum x x^T + (s + n d)
        # d^T + d s^T.
        inputs = self.inputs + np.outer(moved_x, move_x)
        inputs += np.outer(move_x, self.input_sum)
        products = self.products + np.outer(moved_x, move_y)
        products += np.outer(move_x, self.output_sum)
        squares = self.squares + move_y * (self.output_sum + moved_y)
        centre = self.centre[0] - move_x, self.centre[1] - move_y
        return Moments(inputs, products, squares, moved_x, moved_y, self.tokens, centre)

    def error(self, weights: np.ndarray) -> float:
        """Returns the squared error of weights [in, out], relative to the squared outputs."""
        weights = np.asarray(weights, np.float64)
        # |XW - Y|² in moments: wᵀ(XᵀX)w - 2 wᵀ(XᵀY) + |Y|².  No input is needed any more.
        fitted = np.einsum("io,io->", weights, self.inputs @ weights - 2 * self.products)
        return max(0.0, float((fitted + self.squares.sum()) / (self.squares.sum() or 1.0)))


class SplitMoments:
    """The moments of a stream of batches: those to fit, and those held out."""

    def __init__(self) -> None:
        self._halves: list[Moments | None] = [None, None]
        self._rows = 0

    def add(self, x: Rows, y: Rows) -> None:
        """Adds the rows of a batch; see `Moments.of`."""
        cut = len(x) - held_out_rows(self._rows, len(x))
        self._rows += len(x)
        # One centre for all batches: moments about different ones would have to be moved before
        # each sum.
        centre = next((half.centre for half in self._halves if half), None)
        centre = centre or (_near_mean(x), _near_mean(y))
        for index, rows in enumerate((slice(None, cut), slice(cut, None))):
            if len(x[rows]):
                new, before = Moments.of(x[rows], y[rows], centre), self._halves[index]
                if before is None:
                    self._halves[index] = new
                else:
                    before += new
                    self._halves[index] = before

    @property
    def means(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean input [in] and mean wanted output [out] of all rows."""
        fit, held_out = self._both
        sums = zip((fit.input_sum, fit.output_sum), (held_out.input_sum, held_out.output_sum))
        tokens = fit.tokens + held_out.tokens
        mean_x, mean_y = (c + (a + b) / tokens for c, (a, b) in zip(fit.centre, sums, strict=True))
        return mean_x, mean_y

    def read(self, has_bias: bool) -> tuple[Moments, Moments]:
        """Returns the moments to fit and those held out: about the means of all rows where a bias
        makes up for these, else about 0.

        Raises:
          UserError: there are too few rows to hold one out.
        """
        centre = self.means if has_bias else (0.0, 0.0)
        fit, held_out = self._both
        return fit.about(*centre), held_out.about(*centre)

    @property
    def _both(self):
        fit, held_out = self._halves
        if fit is None or held_out is None:
            raise UserError(
                f"The batches have {self._rows} rows, of which one in {HELD_OUT} is held out; "
                f"legal: {HELD_OUT} rows or more."
            )
        return fit, held_out


def _near_mean(rows):
    """Returns the mean of rows, rounded: float32 deviations from it are small and exact."""
    if not len(rows):
        return np.zeros(rows.shape[1])
    xp = np if isinstance(rows, np.ndarray) else jnp
    mean = np.asarray(xp.mean(rows.astype(xp.float32), axis=0), np.float64)
    return np.where(np.isfinite(mean), mean, 0.0)


@jax.jit
def _batch_sums(x: jax.Array, y: jax.Array, *centre: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the sums of `Moments` of one batch in float32: x [tokens, in], y [tokens, out]."""
    # Before the products: a mean far from 0 would take the digits of float32 from the deviations.
    x, y = (a.astype(jnp.float32) - c for a, c in zip((x, y), centre))
    product = lambda a, b: jnp.matmul(a.T, b, precision=jax.lax.Precision.HIGHEST)  # noqa: E731
    return product(x, x), product(x, y), jnp.square(y).sum(0), x.sum(0), y.sum(0)
