"""BERT-Large's shape through the relay and in one program (L2L, arXiv 2002.05645, tables 1 and 2).

24 layers of width 1024 with 16 heads, 512 tokens: for each batch, memory and throughput of the
relay (stash on the device, and on the host) against the whole executor with full remat on the same
device. The paper reports batches up to 256, 45% less memory and 40% more throughput on a 16 GB
V100. With --scale=pico (the default on a CPU) the same runs at a toy's shape.

    python -m experiments.relay_bert_large --scale=350m   # needs h200:1
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.11 python -m experiments.relay_bert_large \\
        --scale=350m   # needs h200:1, of which it takes 16 GB
    python -m experiments.relay_bert_large --clipping=eager      updates overlap with compute
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, setting

from .benchmarks.options import RelayOptions

SHARED = ("scale", "density", "pattern", "block", "seed")
DEFAULTS = {"density": 1.0}


@dataclasses.dataclass(frozen=True)
class Options(RelayOptions):
    """What is compared."""

    batches: tuple[int, ...] = setting(
        (2, 4, 8, 16, 32, 64, 128, 256), "Sequences in a step.", legal=AT_LEAST_ONE
    )
    device_batch: int = setting(4, "Sequences in a micro-batch.", legal=AT_LEAST_ONE)


def main(request, options):
    """Runs every batch; see the module docstring."""
    from .benchmarks import relay

    relay.bert_large(request, options)


if __name__ == "__main__":
    command_line.run(main, __doc__, shared=SHARED, options=Options, defaults=DEFAULTS)
