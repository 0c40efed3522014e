"""50 billion parameters on one small device: the plan, and a run at 1/8 of the blocks.

Plans 62 layers of width 8192 (50 B parameters dense), dense and at --density, for one device of
--device_gb and a host of --host_gb: with float32 moments, else with bfloat16 ones, else without
copies of the weights for the device, else with masters and moments in files on disk, whichever fits
first. With --run, trains the sparse one for a few steps and prints prediction beside measurement.
L2L (arXiv 2002.05645) trained 50 B on a 16 GB V100 with 512 GB of host memory. At --shape=pico the
same runs on a CPU.

    python -m experiments.relay_50b
    python -m experiments.relay_50b --host_gb=512
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.11 python -m experiments.relay_50b --run
    python -m experiments.relay_50b --run --shape=pico --density=0.25
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import ABOVE_ZERO, AT_LEAST_ONE, setting
from sparse_dataflow.hardware.chips import CHIPS

from .benchmarks.options import KEEP_HELP, RESULTS


@dataclasses.dataclass(frozen=True)
class Options:
    """What is planned and run."""

    shape: str = setting("50b", "Shape of the model.", choices=("50b", "pico"))
    density: float = setting(
        0.125,
        "Fraction of blocks stored by the sparse model.",
        legal=("in (0, 1)", lambda density: 0 < density < 1),
    )
    batch: int = setting(8, "Sequences in a step.", legal=AT_LEAST_ONE)
    micro_batches: int = setting(8, "Micro-batches in a step.", legal=AT_LEAST_ONE)
    device_gb: float = setting(16.0, "Memory of the device, in GB.", legal=ABOVE_ZERO)
    host_gb: float = setting(128.0, "Memory of the host, in GB.", legal=ABOVE_ZERO)
    host_cores: int = setting(32, "Cores of the host, which update.", legal=AT_LEAST_ONE)
    chip: str = setting("h200", "Chip whose rates the plan takes.", choices=tuple(CHIPS))
    run: bool = setting(False, "Train the sparse model.")
    steps: int = setting(2, "Timed steps of the run.", legal=AT_LEAST_ONE)
    keep: str = setting(RESULTS, KEEP_HELP, path=True)


def main(options):
    """Plans, and runs where asked; see the module docstring."""
    from .benchmarks import relay

    relay.fifty_billion(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
