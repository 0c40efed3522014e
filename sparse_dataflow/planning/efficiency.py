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

EFFICIENCIES: dict[str, Efficiency] = {
    "ampere": Efficiency(
        matmul=0.793,
        half_width=124.0,
        attention=0.492,
        bandwidth=0.825,
        fast_link=0.703,
        slow_link=0.691,
        overlap=0.812,
        tensor_overlap=0.1,
        waits=0.00896,
        pass_seconds=3.03e-05,
    ),
    "hopper": Efficiency(
        matmul=0.701,
        half_width=791.0,
        attention=0.375,
        bandwidth=0.787,
        fast_link=0.801,
        slow_link=0.889,
        overlap=0.903,
        tensor_overlap=0.616,
        waits=0.00217,
        pass_seconds=3.19e-05,
    ),
    "cdna2": Efficiency(
        matmul=0.603,
        half_width=724.0,
        attention=0.449,
        bandwidth=0.8,
        fast_link=0.68,
        slow_link=0.699,
        overlap=0.799,
        tensor_overlap=0.097,
        waits=0.00907,
        pass_seconds=3.04e-05,
    ),
    "tpu-v4": Efficiency(
        matmul=0.874,
        half_width=64.5,
        attention=0.501,
        bandwidth=0.825,
        fast_link=0.7,
        slow_link=0.702,
        overlap=0.804,
        tensor_overlap=0.1,
        waits=0.00343,
        pass_seconds=2.96e-05,
    ),
    "tpu-v5e": Efficiency(
        matmul=0.87,
        half_width=153.0,
        attention=0.454,
        bandwidth=0.798,
        fast_link=0.801,
        slow_link=0.701,
        overlap=0.734,
        tensor_overlap=0.523,
        waits=0.0192,
        pass_seconds=3.02e-05,
    ),
    "tpu-v5p": Efficiency(
        matmul=0.78,
        half_width=49.8,
        attention=0.466,
        bandwidth=0.8,
        fast_link=0.795,
        slow_link=0.692,
        overlap=0.658,
        tensor_overlap=0.505,
        waits=0.0042,
        pass_seconds=3.12e-05,
    ),
    "tpu-v6e": Efficiency(
        matmul=0.593,
        half_width=179.0,
        attention=0.444,
        bandwidth=0.799,
        fast_link=0.659,
        slow_link=0.698,
        overlap=0.709,
        tensor_overlap=0.1,
        waits=0.00558,
        pass_seconds=3.05e-05,
    ),
}
"""Chip family -> constants."""

# No public table of the B200 has a parallel plan for each figure, so it gets the H100's constants.
EFFICIENCIES["blackwell"] = EFFICIENCIES["hopper"]
