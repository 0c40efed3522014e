"""Presets: named scales from a laptop to a trillion parameters, each with its training recipe."""

import dataclasses

from sparse_dataflow.core.config import remat, settings
from sparse_dataflow.core.config.run import RunConfig, RunSettings
from sparse_dataflow.core.config.sizes import SIZES
from sparse_dataflow.core.config.sparsity import SparsityConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError

GPT2_VOCABULARY = 50257
"""Tokens of GPT-2's tokenizer: 256 bytes, 50,000 merges and the end of a text."""

LAPTOP_SCALES = ("pico", "3m", "nano", "micro", "mini")
"""Scales at which the dense twin is trained as well."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Training settings of a scale; the fields are those of `TrainingConfig`."""

    batch: int
    learning_rate: float
    sparse_rate: float
    vector_rate: float


RECIPES = {
    "pico": Recipe(8, 2e-3, 4, 8),
    "3m": Recipe(8, 1e-3, 4, 32),
    "nano": Recipe(8, 1e-3, 2, 2),
    "micro": Recipe(8, 1e-3, 2, 2),
    "mini": Recipe(8, 6e-4, 2, 2),
    "125m": Recipe(256, 6e-4, 2, 1),
    "350m": Recipe(256, 3e-4, 2, 1),
    "1.3b": Recipe(512, 2e-4, 2, 1),
    "6.7b": Recipe(1024, 1.2e-4, 2, 1),
    "13b": Recipe(1024, 1e-4, 2, 1),
    "22b": Recipe(1024, 1e-4, 2, 1),
    "175b": Recipe(1600, 6e-5, 2, 1),
    "1t": Recipe(1600, 6e-5, 2, 1),
    "llama3-1b": Recipe(128, 2e-4, 2, 1),
    "llama3-8b": Recipe(256, 1e-4, 2, 1),
    "qwen3-0.6b": Recipe(128, 3e-4, 2, 1),
    "qwen3-8b": Recipe(256, 1e-4, 2, 1),
}
"""Recipes by scale.  pico, 3m and nano: the lowest held-out loss of a sweep (docs/quality.md).
micro and mini: scaled from nano.  125m and larger: batch and rate of GPT-3 (arXiv 2005.14165, table
2.1), stored blocks at twice that rate.  Llama and Qwen: the rates of GPT-3's nearest size, and
batches of about its tokens."""

BLOCKS = {
    "pico": 16,
    "3m": 32,
    "125m": 32,
    **dict.fromkeys(("350m", "1.3b", "6.7b", "13b", "22b", "175b", "1t", "llama3-8b"), 128),
    **dict.fromkeys(("qwen3-0.6b", "qwen3-8b"), 128),
}
"""Side of a block by scale, where it is not `SparsityConfig.block`: blocks of 64 do not divide
pico, 3m and 125m into eighths, and TPUs multiply blocks of 128 twice as fast (`efficiency`)."""

LONGEST_SEQUENCE = 8192
"""Upper bound of a preset's training sequence, in tokens: the length that Llama 3 trains at."""

SUPAR_LEARNING_RATE = 5e-4
"""Peak of every model under SuPar, whatever its width and density (docs/quality.md).  With the
multipliers of the optimizer a dense model's matrices then learn at 0.13 / d_model."""

SUPAR_VECTOR_RATE = 16.0
"""`TrainingConfig.vector_rate` under SuPar."""


def preset(scale: str, *, compute_dtype: str = "float32") -> RunConfig:
    """The run of a named scale with its recipe: block-sparse at 1/8, beside its dense twin where
    the scale fits a laptop.  The planner settles micro-batches, remat and mesh.

    Args:
      scale: a name in `SIZES`.
      compute_dtype: dtype of activations; bfloat16 suits accelerators.

    Raises:
      UserError: no such scale.

    Examples:
        >>> sd.preset("13b").model.d_model
        5120
    """
    if scale not in SIZES:
        raise UserError(f"There is no scale {scale!r}; legal: {', '.join(SIZES)}.")
    size, recipe = SIZES[scale], RECIPES[scale]
    return RunConfig(
        model=dataclasses.replace(size, compute_dtype=compute_dtype, remat=remat.AUTO),
        sparsity=SparsityConfig(block=BLOCKS.get(scale, SparsityConfig().block)),
        training=TrainingConfig(
            sequence=min(size.longest, LONGEST_SEQUENCE), micro_batches=0, **vars(recipe)
        ),
        run=RunSettings(scale=scale, twin="yes" if scale in LAPTOP_SCALES else "no"),
    )


def rescaled(config: RunConfig, scale: str) -> RunConfig:
    """Another scale with every setting in which a config differs from its own scale's preset."""
    before, after = preset(config.run.scale).to_json(), config.to_json()
    changes = {
        f"{member}.{name}": getattr(getattr(config, member), name)
        for member, fields in after.items()
        for name, value in fields.items()
        if value != before[member][name]
    }
    return settings.changed(preset(scale), changes)


def supar(config: RunConfig) -> RunConfig:
    """A config under the SuPar parametrization (arXiv 2405.15743), with its learning rates."""
    return config.change(
        model__parametrization="supar",
        training__learning_rate=SUPAR_LEARNING_RATE,
        training__sparse_rate=1.0,
        training__vector_rate=SUPAR_VECTOR_RATE,
    )
