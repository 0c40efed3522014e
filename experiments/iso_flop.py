"""Is block sparsity better than a narrower dense model of the same FLOPs?

Trains GPTs of equal FLOPs per token, of equal stored parameters or of equal shape, at several
densities.  Where the cost is equal, a sparser model is wider.  The width of a head and d_ff /
d_model stay.  Every arm has the same tokens, the same number of trials of its learning rate on
tuning documents, and the same seeds.  Bits per byte are measured on other, held-out documents.
Differences to the dense model are paired by seed, with intervals of Student's t.  Time to quality
is what an arm needs to reach the final loss of the best-tuned dense model of its budget and length:
the tokens of a training that ends there, between the lengths that were trained.

    python -m experiments.iso_flop --pattern=monarch --block=4 --budgets=0.27 --equal=flops
        one core: about 6 hours
    python -m experiments.iso_flop
        one core: days
    python -m experiments.iso_flop --set model.num_layers=6 --set model.num_heads=16 ...
        a deeper shape with narrower heads
    python -m experiments.iso_flop --equal=shape --steps=500,1000,2000 --sparse_steps=4000 ...
        how long a sparse model trains to be as good as the dense one of its shape
    python -m experiments.iso_flop --scale=125m --block=32 --budgets=1,4 --steps=20000 --corpus=...
        a GPU

On a CPU the pattern `monarch` compiles and trains faster than `random`, the default here, whose
outputs read several separate blocks, as in the 13B.

Leaves OUT/settings.json, OUT/runs.jsonl (a line for each run), OUT/iso_flop.json, OUT/iso_flop.md,
OUT/iso_flop.png and, of several lengths, OUT/iso_flop_length.png. The same command goes on where it
was stopped, also with more budgets, lengths, densities, optimizers or seeds. These files are enough
to go on with on another machine.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import A_FRACTION, ABOVE_ZERO, AT_LEAST_ONE, setting
from sparse_dataflow.core.config.training import BUILT_IN, OPTIMIZERS

SHARED = ("scale", "corpus", "batch", "learning_rate", "pattern", "block", "evolution")
DEFAULTS = {"scale": "3m", "block": 8, "pattern": "random"}
"""Small blocks, so that an output reads several blocks at every density, as in the 13B."""

EQUAL = ("flops", "parameters", "shape")


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of its own."""

    budgets: tuple[float, ...] = setting(
        (0.25, 1, 4),
        "FLOPs per token, relative to the dense model of the scale.",
        legal=ABOVE_ZERO,
    )
    densities: tuple[float, ...] = setting(
        (1, 0.5, 0.25, 0.125, 0.0625),
        "Densities; the dense model is always trained.",
        legal=A_FRACTION,
    )
    optimizers: tuple[str, ...] = setting(
        BUILT_IN, "Optimizers, each tuned by itself.", choices=OPTIMIZERS
    )
    equal: tuple[str, ...] = setting(
        ("flops", "parameters"), "What the arms have in common with the dense model.", choices=EQUAL
    )
    steps: tuple[int, ...] = setting(
        (1000,), "Lengths of training, in optimizer steps.", legal=AT_LEAST_ONE
    )
    sparse_steps: tuple[int, ...] = setting(
        (),
        "More lengths for the sparse arms alone, to see when they reach a dense loss.",
        legal=AT_LEAST_ONE,
    )
    trials: int = setting(4, "Trials of the learning rate of each arm.", legal=AT_LEAST_ONE)
    seeds: int = setting(3, "Measured seeds of each arm.", legal=AT_LEAST_ONE)
    headline_seeds: int = setting(
        5, "Seeds of the dense and of the best sparse arm of a curve.", legal=AT_LEAST_ONE
    )
    out: str = setting("runs/iso_flop", "Folder to make, or to go on in.", path=True)


def main(request, options):
    """Trains what is not trained yet, then writes tables and figure."""
    from .studies import iso_flop

    return iso_flop.study_iso_flop(request, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options, defaults=DEFAULTS)
