"""Dense weights, and their int8 form under adapters."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparse_dataflow.core.config.projections import PRECISIONS
from sparse_dataflow.core.weights.kind import (
    ABILITIES,
    LEAF,
    MATRIX,
    METADATA,
    SCALE,
    Leaf,
    Weight,
    register,
    register_form,
)

KERNEL = Leaf(
    MATRIX,
    columns=(("feature", "fsdp"), ("tensor",)),
    rows=(("tensor",), ("feature", "fsdp")),
    input_dim=0,
    output_dim=1,
    has_muon=True,
)
"""A matrix [in, out]."""


@register
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dense(Weight):
    """A stored matrix.

    Attributes:
      kernel: float [..., in, out].
      precision: of the product's operands; see `ModelConfig`.
    """

    kind = "dense"
    words = "dense weights"
    offers = frozenset(ABILITIES) - {"hadamard"}

    kernel: Any = dataclasses.field(metadata={LEAF: KERNEL})
    precision: str = dataclasses.field(default=PRECISIONS[0], metadata=METADATA)

    def __rmatmul__(self, x):
        from sparse_dataflow.core.weights import products

        return products.dense(x, self.kernel, self.precision)

    def times_zeros(self, x):
        """See `Weight`; a product of one token reads only the rows of its other inputs."""
        from sparse_dataflow.core.weights import products

        if self.precision != PRECISIONS[0]:
            return x @ self
        return products.skipping_zeros(x, self.kernel)

    def expert_products(self, x, tiles):
        from sparse_dataflow.core.ops.expert_matmul.expert_matmul_op import expert_matmul

        return expert_matmul(x[:, None], self.kernel.astype(x.dtype)[:, None], tiles)[:, 0]

    def dense(self):
        return self.kernel

    @classmethod
    def form(cls, spec):
        return Quantised if spec.frozen_dtype == "int8" else cls

    @classmethod
    def shapes(cls, spec, sides):
        return {"kernel": tuple(sides)}

    @classmethod
    def input_row(cls, spec, sides):
        return sides[1]

    @classmethod
    def draw(cls, spec, sides, gain, normal, layout=None):
        return {"kernel": normal(tuple(sides), gain / math.sqrt(sides[0]))}


@register_form
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Quantised(Weight):
    """A stored matrix of int8 numbers times a scale for each output, which is not trained.

    Whole numbers up to 127 are exact in every dtype of x, so a product is that of the scaled
    matrix to rounding.

    Attributes:
      kernel: int8 [..., in, out].
      kernel_scale: float32 [..., out].
    """

    kernel: Any = dataclasses.field(metadata={LEAF: KERNEL})
    kernel_scale: Any = dataclasses.field(
        metadata={LEAF: Leaf(SCALE, columns=(("tensor",),), rows=(("feature",),), output_dim=0)}
    )

    def __rmatmul__(self, x):
        from sparse_dataflow.core.weights import products

        return (products.by_rows(x, self.kernel) * self.kernel_scale).astype(x.dtype)

    def dense(self):
        return self.kernel * self.kernel_scale[..., None, :]

    @classmethod
    def arrays_of_dense(cls, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arrays of a dense weight as int8 with a scale for each output, as in qwix.

        The largest magnitude of an output is 127.5 scales, so a product of number and scale is
        within half a scale of the weight.  Takes jax and numpy arrays, and returns the same.
        """
        kernel = arrays["kernel"]
        xp: Any = np
        if not isinstance(kernel, np.ndarray):
            import jax.numpy as xp
        wide = kernel.astype(xp.float32)
        largest = xp.max(xp.abs(wide), axis=-2)
        # An output of zeros has the scale 1, so nothing is divided by 0.
        scale = xp.where(largest > 0, largest / 127.5, 1).astype(xp.float32)
        numbers = xp.clip(xp.round(wide / scale[..., None, :]), -127, 127)
        return {"kernel": numbers.astype(xp.int8), "kernel_scale": scale}

    @classmethod
    def arrays_of_float(cls, arrays: Mapping[str, object]) -> dict[str, Any]:
        """Returns the arrays of the dense weight of int8 arrays."""
        return {"kernel": cls(arrays["kernel"], arrays["kernel_scale"]).dense()}
