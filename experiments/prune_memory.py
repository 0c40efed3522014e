"""Peak memory of pruning a model that is read and written layer by layer, against the formula.

A Hugging Face directory of a Llama is drawn, one layer at a time, in bfloat16.  Another process
prunes it with `sd.prune(DIR, batches, out=...)` and reports its largest resident memory.  The
formula is `benchmarks.pruning_bytes.host_bytes`, whose sum does not depend on the number of layers.

    python -m experiments.prune_memory
        one core: half a minute
    python -m experiments.prune_memory --layers=32 --width=1024 --hidden=2816
        410 M parameters; one core: an hour
    python -m experiments.prune_memory --layers=32 --width=4096 --hidden=11008 --only_formula=yes
        Llama 2 7B, without a measurement

Leaves KEEP/prune_memory_WIDTHxLAYERS.json.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import AT_LEAST_ONE, setting

from .benchmarks.options import KEEP_HELP, RESULTS


@dataclasses.dataclass(frozen=True)
class Options:
    """What is pruned."""

    layers: int = setting(2, "Layers of the model.", legal=AT_LEAST_ONE)
    width: int = setting(256, "d_model, in heads of 64 features.", legal=AT_LEAST_ONE)
    hidden: int = setting(704, "d_ff.", legal=AT_LEAST_ONE)
    tokens: int = setting(4096, "Calibration tokens, in rows of 64.", legal=AT_LEAST_ONE)
    block: str = setting("16", "Shape that is pruned; see `sd.prune`.")
    rounds: int = setting(1, "Rounds of selection.", legal=AT_LEAST_ONE)
    only_formula: bool = setting(False, "Print the formula, and measure nothing.")
    keep: str = setting(RESULTS, KEEP_HELP, path=True)


def main(options):
    """Draws, prunes, prints and writes; see the module docstring."""
    from .benchmarks import pruning_memory

    pruning_memory.measure_pruning(options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, options=Options)
