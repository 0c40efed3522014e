"""The fused MLP of aligned groups on a described TPU: its schedules as a line of JSON.

Forward and backward pass in one program, for the `case.Case` of W_in.
"""

import sys
from pathlib import Path

from . import case as schedule_case
from .case import Case

FUSED = "fused_mlp"
"""The implementation of these cases, `chips.tpu.grouped_mlp`."""

PRODUCT = "mlp"
"""Name of its six products together."""


def measure(case: Case, folder: Path) -> dict[str, dict[str, int]]:
    """Return {PRODUCT: counts}, as `case.measure`."""
    import jax
    import jax.numpy as jnp

    from sparse_dataflow.chips.tpu.grouped_mlp import grouped_mlp
    from sparse_dataflow.core.layouts.patterns import make_layout

    sides = case.in_features, case.out_features
    groups = [
        make_layout(case.pattern, *shape, case.block, case.density).groups
        for shape in (sides, sides[::-1])
    ]
    assert groups[0]
    count = groups[0].count
    group = sides[0] // count, sides[1] // count
    tokens = case.tokens, case.in_features
    shapes = tokens, (count, *group), sides[1:], (count, *group[::-1]), tokens
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.float32 if len(shape) == 1 else jnp.bfloat16)
        for shape in shapes
    ]

    def gradients(*arrays):
        *primals, dy = arrays
        y, pullback = jax.vjp(lambda *o: grouped_mlp(*o, *groups, block=case.block), *primals)
        return y, *pullback(dy)

    return schedule_case.count_products(case, {PRODUCT: gradients}, operands, folder, dense=False)


if __name__ == "__main__":
    schedule_case.main(sys.argv[1:], measure)
