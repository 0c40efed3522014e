"""Efficiency constants of each chip family: fractions of data-sheet rates that training reaches.

`python -m experiments.planner_truth --fit` fits EFFICIENCIES to the rows of `published/` marked
"fit", without those marked "test".  A test compares the constants with a new fit.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Fitted constants of one chip family.

    Attributes:
      matmul: fraction of the peak rate of very large dense products.
      half_width: input or output features per chip at which a product has half of that rate.
      attention: fraction of the peak rate of fused attention.
      bandwidth: fraction of the memory bandwidth of element-wise passes.
      fast_link: fraction of the link rate of collectives within an island.
      slow_link: fraction of the link rate of collectives between islands.
      overlap: fraction of weight and gradient collectives that can overlap with computation, and
        fraction of the computation that can overlap with them.
      tensor_overlap: fraction of the collectives within layers that overlaps with products.
      waits: relative growth of the step time with each doubling of the islands, because of
        stragglers and shared links.
      pass_seconds: overhead of one pass of a block over one micro-batch, in seconds.
      half_block: side of a block at which a block-sparse product has half the rate of a dense one.
        98.6% at 128 on an A100 (stk README) gives 1.8.
    """

    matmul: float
    half_width: float
    attention: float
    bandwidth: float
    fast_link: float
    slow_link: float
    overlap: float
    tensor_overlap: float
    waits: float
    pass_seconds: float
    half_block: float = 1.8


PRIOR = Efficiency(
    matmul=0.75,
    half_width=128.0,
    attention=0.45,
    bandwidth=0.8,
    fast_link=0.7,
    slow_link=0.7,
    overlap=0.8,
    tensor_overlap=0.1,
    waits=0.005,
    pass_seconds=3e-5,
)
"""Starting point of every fit, and the constants of families without published rows."""

_FITTED = {
    # matmul, half_width, attention, bandwidth, fast and slow link, overlap, tensor_overlap, waits,
    # pass_seconds
    "ampere":  (0.793, 124.0, 0.492, 0.825, 0.703, 0.691, 0.812, 0.1,   0.00896, 3.03e-05),
    "hopper":  (0.701, 791.0, 0.375, 0.787, 0.801, 0.889, 0.903, 0.616, 0.00217, 3.19e-05),
    "cdna2":   (0.603, 724.0, 0.449, 0.8,   0.68,  0.699, 0.799, 0.097, 0.00907, 3.04e-05),
    "tpu-v4":  (0.874, 64.5,  0.501, 0.825, 0.7,   0.702, 0.804, 0.1,   0.00343, 2.96e-05),
    "tpu-v5e": (0.87,  153.0, 0.454, 0.798, 0.801, 0.701, 0.734, 0.523, 0.0192,  3.02e-05),
    "tpu-v5p": (0.78,  49.8,  0.466, 0.8,   0.795, 0.692, 0.658, 0.505, 0.0042,  3.12e-05),
    "tpu-v6e": (0.593, 179.0, 0.444, 0.799, 0.659, 0.698, 0.709, 0.1,   0.00558, 3.05e-05),
}  # fmt: skip
EFFICIENCIES = {family: Efficiency(*constants) for family, constants in _FITTED.items()}
"""Chip family -> constants."""

# No public table of the B200 has a parallel plan for each figure, so it gets the H100's constants.
EFFICIENCIES["blackwell"] = EFFICIENCIES["hopper"]
