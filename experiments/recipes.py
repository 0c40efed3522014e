"""From flags to configs: which model runs at which scale, and how it is trained."""

import dataclasses

from sparse_dataflow.errors import UserError
from sparse_dataflow.models import gpt
from sparse_dataflow.models.sizes import SIZES, LinearSpec, ModelConfig
from sparse_dataflow.training.optimizer import TrainingConfig

LAPTOP_SCALES = ("nano", "micro", "mini")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A scale's own training settings, used where a flag is 0.

    Attributes:
      batch: sequences in an optimizer step.
      learning_rate: peak, of the dense model.
      sparse_learning_rate: peak, of the block-sparse model at 1/8 density.
    """

    batch: int
    learning_rate: float
    sparse_learning_rate: float


# Laptop rates: the best of a sweep for each model by itself, at the demo's own length.  Larger
# scales: GPT-3's batch and rate (arXiv 2005.14165, table 2.1), the sparse one doubled.
RECIPES = {
    "nano": Recipe(16, 1e-3, 2e-3),
    "micro": Recipe(8, 1e-3, 2e-3),
    "mini": Recipe(8, 6e-4, 1.2e-3),
    "125m": Recipe(256, 6e-4, 1.2e-3),
    "350m": Recipe(256, 3e-4, 6e-4),
    "1.3b": Recipe(512, 2e-4, 4e-4),
    "6.7b": Recipe(1024, 1.2e-4, 2.4e-4),
    "13b": Recipe(1024, 1e-4, 2e-4),
    "22b": Recipe(1024, 1e-4, 2e-4),
    "175b": Recipe(1600, 6e-5, 1.2e-4),
    "1t": Recipe(1600, 6e-5, 1.2e-4),
}


def model_config(values, scale: str, vocab_size: int, backend: str) -> ModelConfig:
    """The dense model that the flags describe.

    Raises:
      UserError: a sequence longer than the learned positions.
    """
    size = SIZES[scale]
    if values.sequence > size.max_len and values.positions == "learned":
        raise UserError(
            f"--sequence={values.sequence} is longer than the {size.max_len} positions of "
            f"{scale!r}; legal: 1 to {size.max_len}, or --positions=rotary."
        )
    automatic = "float32" if backend == "cpu" else "bfloat16"
    return dataclasses.replace(
        size,
        vocab_size=vocab_size,
        norm=values.norm,
        positions=values.positions,
        remat=values.remat,
        compute_dtype=automatic if values.dtype == "auto" else values.dtype,
        parametrization=values.parametrization,
        seed=values.seed,
    )


def linears(values) -> dict[str, LinearSpec]:
    """The block-sparse projections that the flags describe."""
    spec = LinearSpec("block_sparse", values.pattern, values.density, values.block, values.rank)
    return dict.fromkeys(values.sparse_projections, spec)


def sparse_config(values, dense: ModelConfig) -> ModelConfig:
    """`dense` with block-sparse weights on the chosen projections, its layouts checked.

    Raises:
      UserError: block or density has no balanced layout; names the legal values.
    """
    model = dataclasses.replace(dense, linears=linears(values))
    gpt.layouts(dataclasses.replace(model, num_layers=1))
    return model


def training_config(values, scale: str, model: ModelConfig, steps: int) -> TrainingConfig:
    """How `model` is trained for `steps` steps."""
    recipe = RECIPES[scale]
    sparse = bool(model.sparse_projections)
    own_rate = recipe.sparse_learning_rate if sparse else recipe.learning_rate
    return TrainingConfig(
        steps=steps,
        batch=values.batch or recipe.batch,
        sequence=values.sequence or model.max_len,
        micro_batches=values.accumulation,
        learning_rate=values.learning_rate or own_rate,
        warmup=values.warmup,
        weight_decay=values.weight_decay,
        seed=values.seed,
    )
