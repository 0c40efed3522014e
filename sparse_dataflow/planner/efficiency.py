"""Efficiency constants of each chip family: fractions of data-sheet rates that training reaches.

`python -m experiments.planner_truth --fit` fits EFFICIENCIES to the rows of
`experiments/planning/published` marked "fit", without those marked "test".  A test compares the
constants with a new fit.
"""

import dataclasses

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import GROUPED_PATTERNS


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
      data_overlap: fraction of `overlap` of the gradient sums over "data".  XLA combines sums of up
        to 1 GiB where its flags say so (AI-Hypercomputer/maxtext, configs/gpu/a3/llama_2_7b), and
        its pass that overlaps them with the backward pass is for TPUs
        (benchmarks/xla_flags_library.py, DATA_PARALLEL_OVERLAP).
      launch_seconds: overhead of a pass of a compiled program on one chip, in seconds, or None for
        `pass_seconds`.
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
    data_overlap: float = 1.0
    launch_seconds: float | None = None

    def overhead(self, chips):
        """Returns the seconds of overhead of a pass of a block over a micro-batch.

        Args:
          chips: chips of the plan, which may be an array.
        """
        alone = self.pass_seconds if self.launch_seconds is None else self.launch_seconds
        return np.where(np.asarray(chips) > 1, self.pass_seconds, alone)


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
    "sail": "Sea AI Lab's forks of Megatron-LM with pipelines of their own",
    "pipelining": "PyTorch's pipelines and tensor parallelism, not compiled: KempnerForge",
    "nanotron": "Hugging Face's nanotron",
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
    # pass_seconds, traffic; then by_owner and data_overlap where they are fitted
    "ampere": (0.805, 121, 0.481, 0.822, 0.744, 0.608, 0.806, 0.11, 0.0132, 2.95e-05, 1),
    "hopper": (0.703, 102, 0.437, 0.795, 0.571, 0.831, 0.776, 0.591, 0.00513, 0.000189, 1),
    "blackwell": (0.558, 122, 0.435, 0.795, 0.542, 0.832, 0.773, 0.559, 0.00496, 0.000249, 1),
    "cdna2": (0.462, 128, 0.277, 0.8, 0.7, 0.7, 0.8, 0.1, 0.005, 3e-05, 1),
    "tpu-v4": (0.884, 128, 0.531, 0.8, 0.7, 0.7, 0.8, 0.1, 0.005, 3e-05, 1),
    "tpu-v5e": (0.866, 192, 0.453, 0.799, 0.736, 0.698, 0.771, 0.66, 0.0208, 3.02e-05, 1),
    "tpu-v5p": (0.782, 83.9, 0.459, 0.8, 0.741, 0.702, 0.779, 0.554, 0.00434, 3.02e-05, 1),
    "tpu-v6e": (0.623, 136, 0.457, 0.801, 0.653, 0.698, 0.651, 0.1, 0.00564, 3.03e-05, 1),
    "hopper-500w": (0.671, 102, 0.432, 0.795, 0.571, 0.821, 0.664, 0.356, 0.00512, 0.000213, 3.22),
    "ampere/eager": (0.813, 121, 0.645, 0.822, 0.744, 0.618, 0.753, 0.11, 0.00775, 0.000756, 1.65),
    "ampere/pytorch": (0.714, 121, 0.427, 0.822, 0.744, 0.608, 0.806, 0.11, 0.0132, 2.95e-05, 1),
    "hopper/eager": (0.771, 102, 0.36, 0.795, 0.571, 0.842, 0.661, 0.591, 0.0168, 0.000785, 2.25),
    "hopper/pytorch": (
        0.765, 102, 0.441, 0.795, 0.571, 0.799,
        0.509, 0.122, 0.00603, 0.000516, 0.952,
    ),
    "ampere/xla": (0.773, 121, 0.462, 0.822, 0.744, 0.608, 0.806, 0.11, 0.0132, 2.95e-05, 1),
    "hopper/xla": (
        0.746, 102, 0.445, 0.795, 0.571, 0.392,
        0.925, 0.591, 0.00249, 0.000385, 2.84, 0, 0.0799,
    ),
    "hopper/pipelining": (
        0.451, 102, 0.21, 0.795, 0.571, 0.842,
        0.661, 0.591, 0.0168, 0.000785, 2.25,
    ),
    "ampere/sail": (0.644, 121, 0.482, 0.822, 0.744, 0.608, 0.799, 0.11, 0.00948, 2.78e-05, 0.769),
    "hopper-500w/eager": (
        0.623, 102, 0.401, 0.795, 0.571, 0.821,
        0.664, 0.356, 0.00512, 0.000213, 3.22,
    ),
    "ampere/deepspeed": (
        0.817, 121, 0.454, 0.822, 0.744, 0.575,
        0.8, 0.101, 0.0205, 3.29e-05, 1.8, 0.0801,
    ),
    "ampere/internevo": (
        0.751, 121, 0.477, 0.822, 0.744, 0.456,
        0.799, 0.108, 0.00233, 3.64e-05, 3.66, 0.013,
    ),
    "ampere/aleph": (
        0.832, 121, 0.476, 0.822, 0.744, 0.615,
        0.801, 0.0542, 0.0274, 0.000545, 1.94, 0.346,
    ),
    "ampere/aleph-norm": (
        0.833, 121, 0.598, 0.822, 0.744, 0.6,
        0.813, 0.084, 0.0226, 0.000658, 2.97, 0.273,
    ),
    "ampere/paddle": (
        0.624, 121, 0.477, 0.822, 0.744, 0.608,
        0.806, 0.109, 0.0132, 3.14e-05, 1.27, 0.01,
    ),
}  # fmt: skip
EFFICIENCIES = {
    key: Efficiency(*v[:10], **dict(zip(("traffic", "by_owner", "data_overlap"), v[10:])))
    for key, v in _FITTED.items()
}
"""Key -> constants; see `key`."""


PASS_KERNELS = 20
"""Kernels of one pass of a block in a compiled step of this project: 3,140 of 40 layers with four
passes each, optimizer and head apart (`experiments/results/account/13b_dense_h200-1_account.json`).
"""

LAUNCH_SECONDS = 0.9e-6
"""Seconds between two kernels of a stream: 3.8 us for each kernel of 2.9 us (NVIDIA, Getting
Started with CUDA Graphs)."""


def for_family(family: str, one_program: bool = True) -> Efficiency:
    """Returns the constants that predict this project; the prior for an unknown family.

    XLA's fitted runs on GPUs are on several chips, and `pass_seconds` has what their passes lose by
    waiting for the collectives of each block.  On one chip a pass loses the launches of its
    kernels, if the step is one program.

    Args:
      one_program: whether the host starts a step once, and not every block and micro-batch.
    """
    constants = EFFICIENCIES.get(own_key(family), PRIOR)
    # Other families were fitted to runs of one program on TPUs, or are the prior: there is no
    # second overhead.
    if own_key(family) == family or not one_program:
        return constants
    return dataclasses.replace(constants, launch_seconds=PASS_KERNELS * LAUNCH_SECONDS)


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
    """Returns the FLOP/s of a projection's product relative to a dense one.

    It is 1 for dense weights and factors.  A side between two measured ones has the rate of the
    smaller.  Below the smallest, the rate is proportional to the side.
    """
    if not spec.weight.stores_blocks:
        return 1.0
    rates = BLOCK_RATES.get(family)
    if rates is None:
        return spec.block / (spec.block + efficiency.half_block)
    by_side = rates[spec.pattern in GROUPED_PATTERNS]
    side = max((side for side in by_side if side <= spec.block), default=min(by_side))
    # The rate of a smaller side falls with the side, as its product fills less of the matrix unit.
    return by_side[side] * min(1.0, spec.block / side)


def slower_than_dense(config: ModelConfig, family: str) -> list[str]:
    """Returns the block-sparse projections whose products are estimated slower than dense ones."""
    efficiency = EFFICIENCIES.get(family, PRIOR)
    specs = {name: config.linear(name) for name in config.sparse_projections}
    return [n for n, spec in specs.items() if block_rate(family, spec, efficiency) < spec.density]
