"""Memory and time of the relay against depth (L2L, arXiv 2002.05645, figure of constant memory).

Trains a model of each depth for a few steps with the stash on the host, prints compile time, device
memory and step time beside the plan, and writes them as JSON. Neither compile time nor device
memory depends on the depth; the time of a step is proportional to it.

    python -m experiments.relay_depth
    python -m experiments.relay_depth --scale=6.7b --depths=8,32,128 --density=0.125 \\
        --batch=32   # needs h200:1
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.11 python -m experiments.relay_depth --scale=6.7b \\
        --density=1 --depths=32 --batch=32 --set training.micro_batches=8 \\
        --clipping=eager   # needs h200:1, of which it takes 16 GB
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, setting

from .benchmarks.options import RelayOptions

SHARED = ("scale", "batch", "density", "pattern", "block", "seed")


@dataclasses.dataclass(frozen=True)
class Options(RelayOptions):
    """What is compared."""

    depths: tuple[int, ...] = setting((2, 8, 32), "Numbers of blocks.", legal=AT_LEAST_ONE)


def main(request, options):
    """Runs every depth; see the module docstring."""
    from .benchmarks import relay

    relay.depth(request, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options)
