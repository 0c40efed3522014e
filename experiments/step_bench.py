"""The whole training step, dense and sparse, paired in one run.

Both steps run in turn on the same random tokens: forward, backward, clipping and AdamW at the
scale's batch; one after the other where the device has no room for both states. Prints step time,
tokens/s, MFU, memory, joules where the machine counts them, the ratio of each round (median and
quartiles) and the FLOP ceiling of the scale, and writes them as JSON. With --peers the same dense
step in torch (torch.compile, fused attention), from the same parameters, takes its turn where torch
is installed; on a GPU jax must leave it memory. With --narrow a narrower dense model of the sparse
one's FLOPs takes its turn.

    python -m experiments.step_bench
    python -m experiments.step_bench --scale=micro --density=0.25
    python -m experiments.step_bench --scale=nano --set model.num_layers=2   fewer layers
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.98 python -m experiments.step_bench --scale=13b --block=128 \\
        --batch=1 --set model.remat=full --set training.state_dtype=bfloat16 \\
        --rounds=3   # needs h200:1, which the dense one fills
    XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_MEM_FRACTION=0.98 \\
        python -m experiments.step_bench --scale=13b --block=128 --batch=1 --set model.remat=full \\
        --set training.state_dtype=bfloat16 --peers   # needs h200:1; torch's step first
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import setting

from .benchmarks.options import BenchOptions

SHARED = ("scale", "batch", "density", "pattern", "block", "seed")


@dataclasses.dataclass(frozen=True)
class Options(BenchOptions):
    """What else is timed."""

    peers: bool = setting(False, "Time the dense step in torch too.")
    narrow: bool = setting(False, "Time a narrower dense model of the sparse one's FLOPs too.")


def main(request, options):
    """Measures, prints and writes; see the module docstring."""
    from .benchmarks import steps

    steps.measure_steps(request, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options)
