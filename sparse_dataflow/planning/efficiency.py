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
    "megatron": "Megatron-LM, NeMo, Megatron-DeepSpeed",
    "xla": "JAX: MaxText, Pax",
    "pytorch": "compiled PyTorch with FSDP: torchtitan",
    "eager": "PyTorch with FSDP that is not compiled: llm-foundry",
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
    # pass_seconds, traffic
    "ampere": (0.779, 137, 0.479, 0.819, 0.721, 0.695, 0.81, 0.104, 0.00692, 3.01e-05, 1),
    "hopper": (0.697, 109, 0.467, 0.796, 0.736, 0.862, 0.803, 0.54, 0.0046, 0.00018, 1),
    "blackwell": (0.592, 128, 0.467, 0.796, 0.713, 0.862, 0.797, 0.48, 0.0047, 0.000443, 1),
    "cdna2": (0.462, 128, 0.277, 0.8, 0.7, 0.7, 0.8, 0.1, 0.005, 3e-05, 1),
    "tpu-v4": (0.884, 128, 0.53, 0.8, 0.7, 0.7, 0.8, 0.1, 0.005, 3e-05, 1),
    "tpu-v5e": (0.866, 192, 0.453, 0.799, 0.736, 0.698, 0.771, 0.66, 0.0208, 3.01e-05, 1),
    "tpu-v5p": (0.782, 83.9, 0.459, 0.8, 0.741, 0.702, 0.779, 0.554, 0.00434, 3.03e-05, 1),
    "tpu-v6e": (0.623, 136, 0.457, 0.801, 0.653, 0.698, 0.652, 0.1, 0.00564, 3.02e-05, 1),
    "hopper-500w": (0.563, 109, 0.458, 0.796, 0.736, 0.858, 0.747, 0.267, 0.00487, 0.000202, 2.31),
    "ampere/eager": (0.819, 137, 0.324, 0.819, 0.721, 0.706, 0.617, 0.104, 0.00622, 0.000643, 1.68),
    "ampere/pytorch": (0.695, 137, 0.428, 0.819, 0.721, 0.695, 0.81, 0.104, 0.00692, 3.01e-05, 1),
    "ampere/xla": (0.746, 137, 0.459, 0.819, 0.721, 0.695, 0.81, 0.104, 0.00692, 3.01e-05, 1),
    "hopper/eager": (0.738, 109, 0.18, 0.796, 0.736, 0.867, 0.594, 0.54, 0.00823, 0.000698, 2.08),
    "hopper/xla": (0.82, 109, 0.485, 0.796, 0.736, 0.861, 0.813, 0.54, 0.00191, 0.000855, 5.02),
    "hopper-500w/eager": (
        0.468, 109, 0.381, 0.796, 0.736, 0.858,
        0.747, 0.267, 0.00487, 0.000202, 2.31,
    ),
}  # fmt: skip
EFFICIENCIES = {k: Efficiency(*v[:-1], traffic=v[-1]) for k, v in _FITTED.items()}
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
    """Returns the FLOP/s of a projection's product relative to a dense one; 1 for a dense weight.

    A side between two measured ones has the rate of the smaller.  Below the smallest, the rate is
    proportional to the side.
    """
    if spec.kind == "dense":
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
