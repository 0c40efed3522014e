"""The block-sparse product beside the dense one, each of its three products, paired in one run.

For each shape: y = xW, dx = dy Wᵀ and dW, dense through XLA (on a GPU: cuBLAS) and block-sparse
through each implementation that runs here; inputs are normal with unit variance. Prints medians,
the ratio dense / sparse of each round (median and quartiles), TFLOP/s at the stored blocks, and
the ratio as a part of the ideal (1 / density), which is also the rate at the stored blocks over the
dense rate. Results are written as JSON after every shape.

On an accelerator "auto" means GPT-13B's four projections in bfloat16 at blocks of 64 and 128,
densities from 1/2 to 1/16 and 2048 to 16384 tokens; on a CPU, four laptop shapes.

    python -m experiments.kernel_bench
    python -m experiments.kernel_bench --shapes=13b --tokens=2048 --densities=0.125 --blocks=128
    python -m experiments.kernel_bench --dtype=bfloat16 --patterns=pixelfly,random
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.model import DTYPES
from sparse_dataflow.core.config.settings import A_FRACTION, AT_LEAST_ONE, setting
from sparse_dataflow.core.layouts.patterns import PATTERNS

from .benchmarks.options import IMPLEMENTATIONS, PRODUCTS, BenchOptions

LAYOUTS = tuple(name for name in PATTERNS if name != "dense")
SPARSE = tuple(dict.fromkeys(name for names in IMPLEMENTATIONS.values() for name in names))


@dataclasses.dataclass(frozen=True)
class Options(BenchOptions):
    """What is timed; auto is by device."""

    shapes: str | None = setting(None, "INxOUT, ... or a scale's four projections: 13b.")
    tokens: tuple[int, ...] | None = setting(None, "Rows of x.", legal=AT_LEAST_ONE)
    densities: tuple[float, ...] | None = setting(None, "Stored fractions.", legal=A_FRACTION)
    blocks: tuple[int, ...] | None = setting(None, "Sides of a block.", legal=AT_LEAST_ONE)
    products: tuple[str, ...] = setting(
        PRODUCTS, "Products, and all in one program.", choices=PRODUCTS
    )
    patterns: tuple[str, ...] | None = setting(None, "Layouts.", choices=LAYOUTS)
    implementations: tuple[str, ...] = setting(
        SPARSE, "Implementations of the sparse product.", choices=SPARSE
    )
    peers: bool = setting(False, "Time the forward product of installed peers too.")
    dtype: str | None = setting(None, "Dtype of x and W.", choices=DTYPES)
    rounds: int = setting(9, "Timed rounds.", legal=AT_LEAST_ONE)


def main(options):
    """Measures, prints and writes; see the module docstring."""
    from .benchmarks.kernels import bench

    bench.measure_kernels(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
