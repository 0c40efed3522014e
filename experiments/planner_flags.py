"""What the planner's experiments share: which model on which chips. Loads no jax."""

import dataclasses
import types

from experiments.command_line import A_FRACTION, AT_LEAST_ONE, Flag
from sparse_dataflow.config.model import PROJECTIONS, LinearSpec, ModelConfig
from sparse_dataflow.config.presets import SIZES
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.hardware import chips

DENSITIES = (1.0, 1 / 2, 1 / 4, 1 / 8)
"""Of the interplay's models."""
SCALE = Flag("scale", "choice", "13b", "Named size.", tuple(SIZES))
SEQUENCE = Flag("sequence", "integer", 0, "Tokens in a sequence; 0 is the scale's own length.")
DENSITY = Flag(
    "density",
    "number",
    1.0,
    "Fraction of blocks stored in every projection; 1 is dense.",
    legal=A_FRACTION,
)
BLOCK = Flag("block", "integer", 128, "Side of a square block, in features.", legal=AT_LEAST_ONE)
HARDWARE = Flag(
    "hardware",
    "text",
    "h100",
    f"Chip: {', '.join(chips.CHIPS)}, the start of one, or a TOML file that describes your own.",
)


def model(scale: str, density: float = 1.0, block: int = 128, dtype: str = "bfloat16"):
    """A named size, block-sparse in every projection where the density is below 1.

    Raises:
      UserError: the block does not divide a projection.
    """
    config: ModelConfig = dataclasses.replace(SIZES[scale], compute_dtype=dtype)
    if density == 1:
        return config
    for name in PROJECTIONS:
        for features in config.projection_shape(name):
            if features % block:
                raise UserError(
                    f"--block={block} does not divide the {features} features of {name} in "
                    f"{scale!r}; legal: divisors of them all, such as 64."
                )
    return config.with_linears(LinearSpec("block_sparse", density=density, block=block))


def settings(values, names) -> types.SimpleNamespace:
    """The flags' values by name."""
    return types.SimpleNamespace(**{name: values[name].value for name in names})
