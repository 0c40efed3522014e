"""Efficiency constants of each chip family: fractions of data-sheet rates that training reaches.

`python -m experiments.planner_truth --fit` fits EFFICIENCIES to the rows of `published/` marked
"fit", without those marked "test".  A test compares the constants with a new fit.
"""

import dataclasses

from sparse_dataflow.config.model import LinearSpec, ModelConfig
from sparse_dataflow.config.sparsity import GROUPED_PATTERNS


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
      half_block: side of a block at which a block-sparse product has half the rate of a dense one,
        for chips that are not in BLOCK_RATES.  98.6% at 128 on an A100 (stk README) gives 1.8.
      traffic: bytes of element-wise passes and of the loss, relative to fused kernels.
      by_owner: extra time of ZeRO 1 and 2 between islands with each island of the group, relative
        to the collectives' own; it does not overlap.  DeepSpeed reduces each part of the gradients
        to the chip that owns it (runtime/zero/stage_1_and_2.py, average_tensor), and InternEvo
        broadcasts each part of the weights from its owner (hybrid_zero_optim.py).
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
    traffic: float = 1.0
    by_owner: float = 0.0


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

STACKS = {
    "megatron": "Megatron-LM, NeMo",
    "xla": "JAX: MaxText, Pax",
    "pytorch": "compiled PyTorch with FSDP: torchtitan",
    "eager": "PyTorch with FSDP that is not compiled: llm-foundry",
    "deepspeed": "Megatron-DeepSpeed, GPT-NeoX",
    "internevo": "InternEvo",
    "aleph": "Aleph Alpha's framework with its RMSNorm kernel",
    "aleph-norm": "Aleph Alpha's framework with the RMSNorm of PyTorch operations",
    "paddle": "PaddlePaddle",
}
"""Software of published runs -> its frameworks."""


_TUNED = {"hopper-500w": "pytorch"}


def key(family: str, stack: str) -> str:
    """Returns the key in EFFICIENCIES of a stack on a chip family.

    A family alone is its best-tuned published stack: XLA on TPUs, Megatron elsewhere where it is
    known.
    """
    tuned = "xla" if family.startswith("tpu") else _TUNED.get(family, "megatron")
    return family if stack == tuned else f"{family}/{stack}"


def own_key(family: str) -> str:
    """Returns the key of the constants that predict this project: XLA's, where they are known."""
    return f"{family}/xla" if f"{family}/xla" in EFFICIENCIES else family


_FITTED = {
    # matmul, half_width, attention, bandwidth, fast and slow link, overlap, tensor_overlap, waits,
    # pass_seconds, traffic, by_owner where it is fitted
    "ampere": (0.805, 121, 0.481, 0.822, 0.744, 0.611, 0.806, 0.11, 0.0132, 3e-05, 1),
    "hopper": (0.707, 97.2, 0.436, 0.794, 0.573, 0.838, 0.768, 0.629, 0.00549, 0.000215, 1),
    "blackwell": (0.595, 113, 0.435, 0.794, 0.519, 0.838, 0.76, 0.566, 0.00551, 0.000409, 1),
    "cdna2": (0.462, 128, 0.277, 0.8, 0.7, 0.7, 0.8, 0.1, 0.005, 3e-05, 1),
    "tpu-v4": (0.884, 128, 0.53, 0.8, 0.7, 0.7, 0.8, 0.1, 0.005, 3e-05, 1),
    "tpu-v5e": (0.866, 192, 0.453, 0.799, 0.736, 0.698, 0.771, 0.66, 0.0208, 3.01e-05, 1),
    "tpu-v5p": (0.782, 83.9, 0.459, 0.8, 0.741, 0.702, 0.779, 0.554, 0.00434, 3.03e-05, 1),
    "tpu-v6e": (0.623, 136, 0.457, 0.801, 0.653, 0.698, 0.652, 0.1, 0.00564, 3.02e-05, 1),
    "hopper-500w": (0.674, 97.2, 0.431, 0.794, 0.573, 0.829, 0.656, 0.354, 0.00552, 0.000236, 3.25),
    "ampere/eager": (0.815, 121, 0.324, 0.822, 0.744, 0.624, 0.749, 0.11, 0.00817, 0.000758, 1.66),
    "ampere/pytorch": (0.714, 121, 0.426, 0.822, 0.744, 0.611, 0.806, 0.11, 0.0132, 3e-05, 1),
    "ampere/xla": (0.773, 121, 0.462, 0.822, 0.744, 0.611, 0.806, 0.11, 0.0132, 3e-05, 1),
    "hopper/eager": (0.749, 97.2, 0.18, 0.794, 0.573, 0.847, 0.631, 0.629, 0.00897, 0.000619, 2.22),
    "hopper/pytorch": (0.59, 97.2, 0.364, 0.794, 0.573, 0.838, 0.768, 0.629, 0.00549, 0.000215, 1),
    "hopper/xla": (0.882, 97.2, 0.469, 0.794, 0.573, 0.837, 0.818, 0.629, 0.00205, 0.000797, 5.88),
    "hopper-500w/eager": (
        0.539, 97.2, 0.345, 0.794, 0.573, 0.829,
        0.656, 0.354, 0.00552, 0.000236, 3.25,
    ),
    "ampere/deepspeed": (
        0.845, 121, 0.486, 0.822, 0.744, 0.629,
        0.796, 0.101, 0.00968, 2.93e-05, 2.78, 0.111,
    ),
    "ampere/internevo": (
        0.75, 121, 0.477, 0.822, 0.744, 0.457,
        0.799, 0.108, 0.00233, 3.77e-05, 3.64, 0.013,
    ),
    "ampere/aleph": (
        0.834, 121, 0.481, 0.822, 0.744, 0.608,
        0.797, 0.0553, 0.0264, 0.00058, 1.84, 0.35,
    ),
    "ampere/aleph-norm": (
        0.872, 121, 0.667, 0.822, 0.744, 0.639,
        0.809, 0.0744, 0.023, 0.000681, 6.19, 0.298,
    ),
}  # fmt: skip
EFFICIENCIES = {
    k: Efficiency(*v[:10], **dict(zip(("traffic", "by_owner"), v[10:]))) for k, v in _FITTED.items()
}
"""Key -> constants; see `key`."""

_BLOCK_RATES = {
    # family: (rates of equal groups, rates of index tables) at blocks of 64, 128 and 256
    "tpu-v5e": ((0.557, 1.022, 1.02), (0.254, 0.925, 0.944)),
    "tpu-v5p": ((0.505, 1.034, 1.032), (0.215, 0.835, 0.871)),
    "tpu-v6e": ((0.288, 0.912, 0.978), (0.095, 0.391, 0.733)),
}
BLOCK_RATES = {
    family: {
        grouped: dict(zip((64, 128, 256), rates)) for grouped, rates in zip((True, False), pair)
    }
    for family, pair in _BLOCK_RATES.items()
}
"""Chip family -> whether a layout is equal groups -> side of a block -> FLOP/s on stored blocks
relative to a dense product, where HBM is no bound.  Estimates: the cycles of GPT-13B's twelve
products, density 1/8 (1/10 at 256), from `experiments.schedule_bench`; a test compares them with
its kept result."""


def block_rate(family: str, spec: LinearSpec, efficiency: Efficiency) -> float:
    """Returns the FLOP/s of a projection's product relative to a dense one; 1 for dense weights and
    factors.

    A side between two measured ones has the rate of the smaller.  Below the smallest, the rate is
    proportional to the side.
    """
    if spec.kind != "block_sparse":
        return 1.0
    rates = BLOCK_RATES.get(family)
    if rates is None:
        return spec.block / (spec.block + efficiency.half_block)
    by_side = rates[spec.pattern in GROUPED_PATTERNS]
    side = max((side for side in by_side if side <= spec.block), default=min(by_side))
    return by_side[side] * min(1.0, spec.block / side)


def slower_than_dense(config: ModelConfig, family: str) -> list[str]:
    """Returns the block-sparse projections whose products are estimated slower than dense ones."""
    efficiency = EFFICIENCIES.get(family, PRIOR)
    specs = {name: config.linear(name) for name in config.sparse_projections}
    return [n for n, spec in specs.items() if block_rate(family, spec, efficiency) < spec.density]
