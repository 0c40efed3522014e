"""Estimates of GPT-13B's products on TPUs and GPUs, from compiled programs; needs no chip.

Compiles each weight's three products for described TPUs (the extra `aot` brings the compiler),
reads libtpu's final instruction schedule, and prints for every chip, projection, block and product:

- cycles, and spills (vector registers stored to memory for lack of registers);
- MXU: the fraction of the estimated time in which the matrix units, at the data sheet's rate,
  compute the stored blocks;
- HBM: the fraction in which HBM, at its peak bandwidth, moves the bytes that the program copies;
  at 100% HBM is the bound;
- the estimated time, and the ratio over XLA's dense product.

`fused_mlp` is the MLP of aligned groups, forward and backward, over its six dense products.
The dense product's cycles are XLA's own estimate.  All numbers are estimates: stalls are not
counted, so absolute times are optimistic by 5% to 20%; ratios between programs are good.  Densities
are the largest legal ones up to --density: 1/8 at blocks of 64 and 128, 1/10 at 256.

    make bench-schedule                                  all chips; at most 6 minutes on 2 cores
    make bench-schedule ARGS="--chips=v6e --blocks=128"

For GPUs (the extra `cuda` brings the compilers) each product has, from HLO and PTX: the number of
GEMMs and of other kernels; what compiles the GEMM, its matrix instruction, stages, registers and
spills (cuBLAS shows none; XLA's own are untuned without the GPU); temporaries; memory traffic over
what is needed, with each kernel's operands read once; and a roofline of FLOPs and traffic.

    make bench-schedule-gpu                              T4, L4, A100, H100, B200, blocks of 128

Results of a compiled weight are cached by content (sources, shapes, versions).  Writes JSON.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import A_FRACTION, AT_LEAST_ONE, setting
from sparse_dataflow.runs.run_config import SIZES

from .benchmarks.options import KEEP_HELP, RESULTS

PROJECTIONS = SIZES["13b"].projections
TPUS = ("v5e", "v5p", "v6e")
GPUS = ("t4", "a100", "l4", "h100", "b200")
IMPLEMENTATIONS = (
    "pallas_tpu",
    "pallas_tpu_grouped",
    "fused_mlp",
    "grouped",
    "xla",
    "pallas_hopper",
    "pallas_triton",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compiled."""

    chips: tuple[str, ...] = setting(TPUS, "Kinds of chip.", choices=TPUS + GPUS)
    projections: tuple[str, ...] = setting(PROJECTIONS, "Weights.", choices=PROJECTIONS)
    blocks: tuple[int, ...] = setting((64, 128, 256), "Sides of a block.", legal=AT_LEAST_ONE)
    density: float = setting(0.125, "Stored fraction, at most.", legal=A_FRACTION)
    tokens: int = setting(2048, "Rows of x.", legal=AT_LEAST_ONE)
    implementations: tuple[str, ...] = setting(
        IMPLEMENTATIONS, "Implementations, on the chips they run on.", choices=IMPLEMENTATIONS
    )
    jobs: int = setting(2, "Weights compiled at once.", legal=AT_LEAST_ONE)
    cache: str = setting(
        "build/schedules", "Folder of cached counts; empty caches nothing.", path=True
    )
    keep: str = setting(RESULTS, KEEP_HELP, path=True)


def main(options):
    """Compiles, prints and writes; see the module docstring."""
    from .benchmarks.schedules import estimates, gpu_estimates

    benches = (TPUS, estimates.estimate_tpus), (GPUS, gpu_estimates.estimate_gpus)
    for family, estimate in benches:
        if chips := tuple(chip for chip in options.chips if chip in family):
            estimate(dataclasses.replace(options, chips=chips))


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
