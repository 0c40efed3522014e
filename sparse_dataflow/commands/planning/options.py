"""Options that the planner's experiments share, and the model that they name; loads no jax."""

import dataclasses
from collections.abc import Mapping

from sparse_dataflow.core.config import settings
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import PRECISIONS
from sparse_dataflow.core.config.settings import A_FRACTION, AT_LEAST_ONE, AT_LEAST_ZERO, setting
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import RECIPES, SIZES, RunConfig, preset

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
    def changes(self) -> dict[str, object]:
        """Settings of a `RunConfig` that differ from those of the scale, by path."""
        return {}

    @property
    def model(self) -> ModelConfig:
        """The model, in bfloat16; see `named_model`."""
        return self.with_density(self.density)

    def with_density(self, density: float) -> ModelConfig:
        """Returns the model at another density."""
        model = named_model(self.scale, density, self.block, changes=self.changes)
        return dataclasses.replace(model, precision=self.precision)

    @property
    def sequence_length(self) -> int:
        """Tokens per sequence."""
        return self.sequence or self.model.max_len

    @property
    def scale_batch(self) -> int:
        """Sequences per optimizer step of the scale's recipe."""
        return RECIPES[self.scale].batch


def shape_changes(shape: str, others: frozenset[str] = frozenset()) -> dict[str, object]:
    """Returns the settings that a text such as "num_layers=48,d_model=6144" changes, by path.

    Args:
      others: fields of the model that have flags of their own.

    Raises:
      UserError: a member is no NAME=VALUE, no field, or no legal value of it.
    """
    legal = {
        path.removeprefix("model."): field
        for path, field in settings.by_path(RunConfig).items()
        if path.startswith("model.") and path != "model.remat"  # The plan has it.
    }
    changes = {}
    for member in filter(None, shape.split(",")):
        name, equals, text = (part.strip() for part in member.partition("="))
        if f"model.{name}" in changes:
            raise UserError(f"--shape={shape} gives {name} twice; leave one out.")
        if name in others:
            raise UserError(f"--shape={shape}: {name} is given by --{name}.")
        if name not in legal or not equals:
            words = settings.hint(name, legal).replace("--help", "gpt13b_sparse --help")
            raise UserError(f"--shape={shape}: {member} is no FIELD=VALUE; {words}")
        changes[f"model.{name}"] = settings.parsed(legal[name], text, f"--shape: {name}")
    if "model.max_len" in changes:
        changes["training.sequence"] = changes["model.max_len"]
    return changes


def named_model(
    scale: str,
    density: float = 1.0,
    block: int = 128,
    dtype: str = "bfloat16",
    changes: Mapping[str, object] | None = None,
) -> ModelConfig:
    """Returns a named size, block-sparse in every projection where the density is below 1.

    The planner prices any density, so only the block is checked.

    Args:
      changes: settings of a `RunConfig` that differ from those of the scale, by path.

    Raises:
      UserError: the block does not divide a projection, or the changes make no legal model.
    """
    config = settings.changed(preset(scale, compute_dtype=dtype).without_auto(), changes or {})
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
