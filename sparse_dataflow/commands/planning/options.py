"""Options that the planner's experiments share, and the model that they name; loads no jax."""

import dataclasses

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import PRECISIONS
from sparse_dataflow.core.config.settings import A_FRACTION, AT_LEAST_ONE, AT_LEAST_ZERO, setting
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import RECIPES, SIZES, preset

STUDIES = ("weak", "strong")
"""Kinds of scaling."""

TOKENS = 300e9
"""Training tokens that a plan's days are for where no steps are given: those of GPT-3."""

CHIP_COUNTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of chips of a scaling study."""


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The model and batch that an experiment plans for."""

    scale: str = setting("13b", "Named size.", choices=tuple(SIZES))
    density: float = setting(
        1.0, "Fraction of blocks stored in every projection; 1 is dense.", legal=A_FRACTION
    )
    block: int = setting(128, "Side of a square block, in features.", legal=AT_LEAST_ONE)
    sequence: int = setting(
        0, "Tokens per sequence; 0 is the scale's own length.", legal=AT_LEAST_ZERO
    )
    batch: int = setting(
        0, "Sequences per optimizer step; 0 is the scale's own.", legal=AT_LEAST_ZERO
    )

    precision: str = setting(
        PRECISIONS[0],
        "Operands of the projections' products; the time of fp8 and int8 is extrapolated.",
        choices=PRECISIONS,
    )

    @property
    def model(self) -> ModelConfig:
        """The model, in bfloat16; see `named_model`."""
        return self.with_density(self.density)

    def with_density(self, density: float) -> ModelConfig:
        """Returns the model at another density."""
        model = named_model(self.scale, density, self.block)
        return dataclasses.replace(model, precision=self.precision)

    @property
    def sequence_length(self) -> int:
        """Tokens per sequence."""
        return self.sequence or SIZES[self.scale].max_len

    @property
    def scale_batch(self) -> int:
        """Sequences per optimizer step of the scale's recipe."""
        return RECIPES[self.scale].batch


def named_model(
    scale: str, density: float = 1.0, block: int = 128, dtype: str = "bfloat16"
) -> ModelConfig:
    """Returns a named size, block-sparse in every projection where the density is below 1.

    The planner prices any density, so only the block is checked.

    Raises:
      UserError: the block does not divide a projection.
    """
    config = preset(scale, compute_dtype=dtype).without_auto()
    if density == 1:
        return config.model
    for name in config.model.projections:
        for features in config.model.projection_shape(name):
            if features % block:
                raise UserError(
                    f"--block={block} does not divide the {features} features of {name} in "
                    f"{scale!r}; legal: divisors of them all, such as 64."
                )
    config = config.change(sparsity__density=density, sparsity__block=block)
    return dataclasses.replace(config.model, linears=config.sparsity.linears(config.model))
