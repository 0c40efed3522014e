"""Which attention runs on a chip: a kernel that keeps the scores there, or XLA's; loads no jax.

The rules are those by which `ops.attention.attention_op` chooses.
"""

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.hardware.chips import Chip

WIDEST_HEAD = 256
"""Widest head of the kernels; cuDNN's heads are also multiples of 8 wide."""


def runs_fused(config: ModelConfig, chip: Chip, host: bool = False) -> bool:
    """Returns whether attention of a model runs in a kernel: splash on TPUs, cuDNN on GPUs.

    Args:
      config: the model.
      chip: kind of chip.
      host: whether it is the CPU of this host.
    """
    if host:
        return False
    if chip.is_tpu:
        return config.head_width <= WIDEST_HEAD
    fits = config.head_width <= WIDEST_HEAD and config.head_width % 8 == 0
    return fits and not config.attention_cap and config.compute_dtype == "bfloat16"
