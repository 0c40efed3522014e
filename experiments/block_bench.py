"""One transformer block, dense and sparse, forward and backward, paired in one run.

The block of a scale, attention included, on normal inputs of unit variance at the scale's batch and
sequence; gradients of inputs and parameters. Parameters are in the compute dtype, index tables are
data as in training. Prints time, TFLOP/s, MFU, the ratio of each round (median and quartiles) and
the ratio of FLOPs, which bounds it, and writes them as JSON.

    python -m experiments.block_bench
    python -m experiments.block_bench --scale=13b --block=128 --batch=8 \\
        --set model.compute_dtype=bfloat16   # needs h200:1

With --attention, times the attention of a layer alone: to all tokens, and to the blocks of
model.attention_blocks.

    python -m experiments.block_bench --attention --scale=3m --batch=1 \\
        --set model.attention_blocks=window:2,global:1,random:1 \\
        --set model.max_len=4096 --set training.sequence=4096
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import setting

from .benchmarks.options import BenchOptions


@dataclasses.dataclass(frozen=True)
class Options(BenchOptions):
    """What is timed."""

    attention: bool = setting(False, "Time the attention alone, to all tokens and to blocks.")


SHARED = ("scale", "batch", "density", "pattern", "block", "seed")


def main(request, options):
    """Measures, prints and writes; see the module docstring."""
    from .benchmarks import blocks

    (blocks.measure_attention if options.attention else blocks.measure_blocks)(request, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options)
