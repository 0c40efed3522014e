"""Memory and seconds of a training step of a side network, as a fraction of LoRA's.

Both train beside the same frozen model, of drawn weights, which is dense, int8 or block-sparse at
density 1/8.  The bytes of a step are those of the compiled program (weights, state and
temporaries), and the largest resident memory of a process that runs two steps.  Seconds are of
steps that take turns in one process.

    python -m experiments.side_memory
        GPT-2's smallest shape; two cores: 15 minutes
    python -m experiments.side_memory --layers=2 --width=64 --batch=2 --sequence=32 --rounds=1
        one minute

Leaves KEEP/side_memory_WIDTHxLAYERS.json.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, setting

from .benchmarks.options import KEEP_HELP, RESULTS


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured."""

    layers: int = setting(12, "Layers of the model.", legal=AT_LEAST_ONE)
    width: int = setting(768, "d_model, in heads of 64 features.", legal=AT_LEAST_ONE)
    batch: int = setting(4, "Sequences of a step.", legal=AT_LEAST_ONE)
    sequence: int = setting(512, "Tokens of a sequence.", legal=AT_LEAST_ONE)
    rank: int = setting(16, "Rank of the adapters.", legal=AT_LEAST_ONE)
    side_width: int = setting(96, "Features of the side network.", legal=AT_LEAST_ONE)
    rounds: int = setting(3, "Timed rounds.", legal=AT_LEAST_ONE)
    keep: str = setting(RESULTS, KEEP_HELP, path=True)


def main(options):
    """Measures, prints and writes; see the module docstring."""
    from .benchmarks import frozen_backbone

    frozen_backbone.measure(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
