"""Does the size of activations stay the same over width and density? (arXiv 2405.15743, figure 1)

Trains a few steps at every width and density, under the standard parametrization and under SuPar,
and prints with which power of width and density the change of each activation grows: 0 is flat, and
then one learning rate serves every model.

    python -m experiments.coordinate_check                          one core: seven minutes
    python -m experiments.coordinate_check --widths=256,512,1024 --block=32

Leaves OUT/coordinate_check.json and OUT/coordinate_check.png.
"""

import dataclasses

from sparse_dataflow.commands import command_line
from sparse_dataflow.core.config.settings import A_FRACTION, AT_LEAST_ONE, setting

SHARED = ("scale", "corpus", "batch", "learning_rate", "pattern", "block", "seed")
DEFAULTS = {"scale": "pico", "block": 8}
"""Heads keep their width, and the narrowest model has a layout at the lowest density."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compared."""

    widths: tuple[int, ...] = setting((128, 256, 512), "Values of d_model.", legal=AT_LEAST_ONE)
    densities: tuple[float, ...] = setting(
        (1.0, 0.25, 0.125), "Fractions of blocks stored.", legal=A_FRACTION
    )
    steps: int = setting(5, "Steps of each training.", legal=AT_LEAST_ONE)
    out: str = setting("runs/coordinate_check", "Folder to make.", path=True)


def main(request, options):
    """Trains all, prints the exponents and draws the figure."""
    from .benchmarks import coordinates

    coordinates.check_coordinates(request, options)


if __name__ == "__main__":
    command_line.run_main(main, __doc__, shared=SHARED, options=Options, defaults=DEFAULTS)
