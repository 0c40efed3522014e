"""Second moments of a projection's inputs and wanted outputs, summed over tokens in one pass."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

HELD_OUT = 5
"""One in so many tokens of a batch, the last ones, is held out of fits."""


@dataclasses.dataclass(frozen=True, eq=False)
class Moments:
    """Sums over the tokens that a projection reads; add those of several batches.

    The squared error of any weight follows from them, so no activation has to be stored.

    Attributes:
      inputs: float64 [in, in], xᵀ x.
      products: float64 [in, out], xᵀ y of inputs and wanted outputs.
      squares: float64 [out], the sums of y².
      input_sum: float64 [in].
      output_sum: float64 [out].
      tokens: number of rows.
    """

    inputs: np.ndarray
    products: np.ndarray
    squares: np.ndarray
    input_sum: np.ndarray
    output_sum: np.ndarray
    tokens: int

    @classmethod
    def of(cls, x: Any, y: Any) -> "Moments":
        """Returns the moments of inputs [tokens, in] and wanted outputs [tokens, out].

        Sums of a batch of jax arrays are float32 products at full precision, those of numpy arrays
        float64.  Sums of several batches are float64.
        """
        if isinstance(x, np.ndarray):
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            sums = x.T @ x, x.T @ y, np.square(y).sum(0), x.sum(0), y.sum(0)
        else:
            sums = jax.device_get(batch_sums(x, y))
        return cls.from_sums(sums, len(x))

    @classmethod
    def from_sums(cls, sums: Any, tokens: int) -> "Moments":
        """Returns the moments of the sums of a batch; see `batch_sums`."""
        inputs, products, squares, input_sum, output_sum = (
            np.asarray(each, np.float64) for each in sums
        )
        return cls(inputs, products, squares, input_sum, output_sum, tokens)

    def __add__(self, other: "Moments") -> "Moments":
        fields = dataclasses.fields(self)
        return Moments(*(getattr(self, f.name) + getattr(other, f.name) for f in fields))

    def __iadd__(self, other: "Moments") -> "Moments":
        for field in dataclasses.fields(self)[:-1]:
            np.add(array := getattr(self, field.name), getattr(other, field.name), out=array)
        return dataclasses.replace(self, tokens=self.tokens + other.tokens)

    def outputs(self, columns: slice | np.ndarray) -> "Moments":
        """Returns the moments of some of the outputs."""
        return dataclasses.replace(
            self,
            products=self.products[:, columns],
            squares=self.squares[columns],
            output_sum=self.output_sum[columns],
        )

    @property
    def finite(self) -> bool:
        """Whether every input and wanted output was finite."""
        return bool(np.isfinite(self.input_sum).all() and np.isfinite(self.squares).all())

    def centred(self) -> "Moments":
        """Returns the moments of deviations from the means, for which a bias makes up."""
        mean_x, mean_y = self.means
        return dataclasses.replace(
            self,
            inputs=self.inputs - self.tokens * np.outer(mean_x, mean_x),
            products=self.products - self.tokens * np.outer(mean_x, mean_y),
            squares=self.squares - self.tokens * np.square(mean_y),
            input_sum=np.zeros_like(mean_x),
            output_sum=np.zeros_like(mean_y),
        )

    @property
    def means(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean input [in] and mean wanted output [out]."""
        return self.input_sum / self.tokens, self.output_sum / self.tokens

    def error(self, weights: np.ndarray) -> float:
        """Returns the squared error of weights [in, out], relative to the squared outputs."""
        weights = np.asarray(weights, np.float64)
        fitted = np.einsum("io,io->", weights, self.inputs @ weights - 2 * self.products)
        return max(0.0, float((fitted + self.squares.sum()) / (self.squares.sum() or 1.0)))


@jax.jit
def batch_sums(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the sums of `Moments` of one batch in float32: x [tokens, in], y [tokens, out]."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    product = lambda a, b: jnp.matmul(a.T, b, precision=jax.lax.Precision.HIGHEST)  # noqa: E731
    return product(x, x), product(x, y), jnp.square(y).sum(0), x.sum(0), y.sum(0)
