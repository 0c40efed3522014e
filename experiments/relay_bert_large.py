"""BERT-Large through the relay and in one program (L2L, arXiv 2002.05645, tables 1 and 2).

24 layers of width 1024 with 16 heads, 512 tokens of text, of which the model predicts the hidden
15% from both sides: for each batch, memory and throughput of the relay (stash on the device, and on
the host) against the whole executor with full remat on the same device. The paper reports batches
up to 256, 45% less memory and 40% more throughput on a 16 GB V100. With --scale=pico (the default
on a CPU) the same runs at a toy's shape.

With --device_memory each executor instead takes the largest batch, up to the largest of --batches,
that the planner fits into so many bytes. The whole executor runs it in one micro-batch. All are
compiled at once, so the machine needs room for all of them.

    python -m experiments.relay_bert_large --scale=350m   # needs h200:1
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.11 python -m experiments.relay_bert_large \\
        --scale=350m   # needs h200:1, of which it takes 16 GB
    python -m experiments.relay_bert_large --clipping=eager      updates overlap with compute
    python -m experiments.relay_bert_large --device_memory=16GiB --scale=350m   # needs h200:1
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, setting
from sparse_dataflow.runs.parallel import byte_count

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
    device_memory: str = setting(
        "",
        "Bytes that every executor may take, as in 16GiB or 16e9, each with its largest batch; "
        "empty compares equal batches.",
    )

    def __post_init__(self):
        _ = self.limit  # Refuses an illegal one.

    @property
    def limit(self) -> int | None:
        """Bytes of `device_memory`; None without one."""
        return byte_count(self.device_memory, "--device_memory") if self.device_memory else None


def main(request, options):
    """Runs every batch; see the module docstring."""
    from .benchmarks import relay

    relay.bert_large(request, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options, defaults=DEFAULTS)
