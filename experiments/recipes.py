"""From flags to configs: which model runs at which scale, and how it is trained."""

import dataclasses
import math

from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.model import LinearSpec, ModelConfig
from sparse_dataflow.config.presets import SIZES
from sparse_dataflow.config.training import TrainingConfig

from experiments.contradictions import GPT2_VOCABULARY
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.models import gpt
from sparse_dataflow.planning import memory
from sparse_dataflow.sparsity.allocation import allocate
from sparse_dataflow.sparsity.evolution import PhaseSpec, phase_specs
from sparse_dataflow.training.phases import Phase, phases

LAPTOP_SCALES = ("pico", "3m", "nano", "micro", "mini")


@dataclasses.dataclass(frozen=True)
class Variant:
    """One model of a run: its name ("sparse" or "dense"), what it is, how it is trained and how
    its layouts change meanwhile."""

    name: str
    model: ModelConfig
    training: TrainingConfig
    evolution: EvolutionConfig = dataclasses.field(default_factory=EvolutionConfig)

    def with_steps(self, steps: int) -> "Variant":
        """The same, trained for that many steps."""
        return dataclasses.replace(self, training=dataclasses.replace(self.training, steps=steps))

    def to_json(self) -> dict:
        """As under "variants" in a run's config.json."""
        return {
            "model": self.model.to_json(),
            "training": self.training.to_json(),
            "evolution": dataclasses.asdict(self.evolution),
        }

    @property
    def phase_specs(self) -> tuple[PhaseSpec, ...]:
        """The models that are trained in turn; UserError where the method fits no such model."""
        return phase_specs(self.model, self.evolution)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The same, with their steps."""
        return phases(self.model, self.evolution, self.training.steps)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A scale's own training settings, used where a flag is 0.

    Attributes:
      batch: sequences in an optimizer step.
      learning_rate: peak, of dense weights.
      sparse_rate: see `TrainingConfig`.
      vector_rate: likewise.
    """

    batch: int
    learning_rate: float
    sparse_rate: float
    vector_rate: float


# Each the lowest of its sweep, one seed.
# - pico, by 2000 steps of sparse_quality: dense at 1e-3 (vectors x 8, 16), 2e-3 (x 1, 4, 8, 16) and
#   4e-3 (x 4); `random` at 2e-3, blocks x 2, 4, 8 (with vectors x 8) and x 4 (x 4, 16).
# - 3m, its vectors' by 1000 steps: `monarch` at 2e-3 (blocks x 4; x 8), 1e-3 (blocks x 4; x 8 and
#   blocks x 2, 4, 8; x 16) and 5e-4 (blocks x 2, 4, 8; x 32 and blocks x 4; x 64).  Its blocks' by
#   2000 steps: `random` at 1e-3, x 2, 4, 8 (x 32).  Its dense weights' by 2000 steps: 2.5e-4 (x
#   128), 5e-4 (x 64), 1e-3 (x 32), and by the first half of them 2e-3 (x 16).  After 1000 steps
#   dense 5e-4 (x 64) was the best, by 0.01 to 0.1, and blocks at 2e-3.
# - nano, by two thirds of the demo, with one rate for all weights: dense 5e-4, 1e-3, 2e-3, sparse
#   1e-3, 2e-3, 4e-3; its vectors learn as the sparse model's there.
# Not swept: micro and mini, scaled from nano, and the larger ones: GPT-3's batch and rate (arXiv
# 2005.14165, table 2.1), stored blocks at twice that.
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
}

# By 1000 steps of pico, one seed, dense and `random` at 1/8, blocks of 8.  Width 128: 5e-4 (vectors
# x 8, 16, 32), 1e-3 (x 4, 8, 16), 2e-3 (x 8) and, dense alone, 2.5e-4 (x 16, 32); blocks x 0.5 and
# 2 at 5e-4 (x 16) are worse than 1.  Widths 64 and 192: 2.5e-4, 5e-4 and 1e-3 (x 16).  This peak is
# the best of them at every width and density, but that for `random` at width 128 it, 5e-4 (x 8) and
# 1e-3 (x 4) lie within 0.003 bits per byte.  Not for longer runs: after 2000 steps, dense, width
# 128, 1e-3 (x 16) is 0.06 lower and the standard recipe 0.08; `random` was not compared there.
SUPAR_LEARNING_RATE = 5e-4
"""Peak of every model under SuPar, whatever its width and density.  With the multipliers of
`optim.optimizers` a dense model's matrices then learn at 0.13 / d_model."""

SUPAR_VECTOR_RATE = 16.0
"""How many times that, under SuPar, what is no matrix learns at; see `TrainingConfig`."""


EXCHANGED_BLOCKS = 0.05
"""Share of the blocks that the first update of rigl or set exchanges.  RigL's 0.3 (arXiv
1911.11134, section 3) is of single weights; by 2000 steps of pico with blocks of 8, 0.05 ends 0.03
bits per byte below 0.1 (one seed)."""


def settle(values, backend: str, memory_bytes: int | None, sparse: bool) -> list[str]:
    """Replaces every "auto" by what it stands for here; returns the names of the variants.

    Args:
      values: flags; `scale`, `dtype` and `twin` are set.
      backend: as `jax.default_backend()` names it.
      memory_bytes: of one device; None where it is not known.
      sparse: whether the experiment is the block-sparse one.
    """
    if values.scale == "auto" and _start(values):
        count = memory.parameter_count(_size(values, ""))
        distance = {n: abs(math.log(memory.parameter_count(s) / count)) for n, s in SIZES.items()}
        values.scale = min(distance, key=distance.__getitem__)
    elif values.scale == "auto":
        specs = linears(values) if sparse and not _trains_dense(values) else {}
        values.scale = memory.choose_scale(memory_bytes, backend, specs)
    values.dtype = _dtype(values, backend)
    if not sparse:
        return ["dense"]
    if values.twin == "auto":
        values.twin = "yes" if values.scale in LAPTOP_SCALES else "no"
    return ["sparse", "dense"] if values.twin == "yes" else ["sparse"]


def vocab_size(values) -> int:
    """The vocabulary that the flags ask for."""
    if _start(values):
        return _size(values, values.scale).vocab_size
    if values.tokenizer == "gpt2":
        return GPT2_VOCABULARY
    return values.vocab_size or SIZES[values.scale].vocab_size


def variants(values, names: list[str], tokens: int | None = None) -> list[Variant]:
    """The models that settled flags describe, with the steps that --steps says, else one.

    Args:
      values: flags without an "auto"; see `settle`.
      names: of the variants.
      tokens: the tokenizer's vocabulary; None stands for the one that is asked for.

    Raises:
      UserError: no such model, layout or cut of the batch; names the legal values.
    """
    dense = model_config(values, values.scale, tokens or vocab_size(values))
    models = {name: sparse_config(values, dense) if name == "sparse" else dense for name in names}
    found = [
        Variant(
            name,
            model,
            training_config(values, values.scale, model, values.steps or 1),
            evolution_config(values) if name == "sparse" else EvolutionConfig(),
        )
        for name, model in models.items()
    ]
    for variant in found:
        phase_specs(variant.model, variant.evolution)
    return found


def _dtype(values, backend):
    automatic = "float32" if backend == "cpu" else "bfloat16"
    return automatic if values.dtype == "auto" else values.dtype


def model_config(values, scale: str, vocab_size: int, backend: str = "") -> ModelConfig:
    """The dense model that the flags describe.

    Raises:
      UserError: a sequence longer than the learned positions.
    """
    size = _size(values, scale)
    begun = bool(_start(values))
    if values.sequence > size.max_len and values.positions == "learned":
        raise UserError(
            f"--sequence={values.sequence} is longer than the {size.max_len} positions of "
            f"{scale!r}; legal: 1 to {size.max_len}, or --positions=rotary."
        )
    return dataclasses.replace(
        size,
        vocab_size=vocab_size,
        norm=size.norm if begun else values.norm,
        positions=size.positions if begun else values.positions,
        remat=values.remat,
        compute_dtype=_dtype(values, backend),
        parametrization=size.parametrization if begun else values.parametrization,
        seed=values.seed,
    )


def _start(values) -> str:
    """The folder whose weights the training begins with; empty where they are drawn."""
    return getattr(values, "init_from", "")


def _size(values, scale: str) -> ModelConfig:
    """The scale's shape, or that of the weights that the training begins with."""
    if not _start(values):
        return SIZES[scale]
    from sparse_dataflow.training import starting_point

    # A run that has begun knows its own shape, wherever its weights came from.
    return starting_point.shape(values.resume or values.init_from)


def linears(values) -> dict[str, LinearSpec]:
    """The block-sparse projections that the flags describe, all at one density."""
    spec = LinearSpec(
        "block_sparse",
        values.pattern,
        values.density,
        values.block,
        values.rank,
        values.hadamard,
    )
    return dict.fromkeys(values.sparse_projections, spec)


def evolution_config(values) -> EvolutionConfig:
    """How the layouts change; static for an experiment without these flags."""
    method = getattr(values, "evolution", "static")
    if method == "static":
        return EvolutionConfig(given_layouts=bool(_start(values)))
    return EvolutionConfig(
        method,
        every=values.evolve_every,
        at=values.evolve_at,
        share=EXCHANGED_BLOCKS,
        first=values.evolve_first,
        plateau=values.evolve_plateau,
        given_layouts=bool(_start(values)),
    )


def _trains_dense(values):
    return getattr(values, "evolution", "static") in ("gradual", "sparse_to_dense")


def sparse_config(values, dense: ModelConfig) -> ModelConfig:
    """`dense` with block-sparse weights on the chosen projections, its layouts checked.

    Raises:
      UserError: block or density has no balanced layout; names the legal values.
    """
    model = allocate(dataclasses.replace(dense, linears=linears(values)), values.density_budget)
    gpt.check_layouts(model)
    return model


def training_config(values, scale: str, model: ModelConfig, steps: int) -> TrainingConfig:
    """How `model` is trained for `steps` steps.

    Raises:
      UserError: the batch cannot be cut into the micro-batches asked for; names the legal ones.
    """
    recipe = RECIPES[scale]
    batch = values.batch or recipe.batch
    if batch % values.accumulation:
        raise UserError(
            f"The batch of {batch} sequences cannot be cut into --accumulation="
            f"{values.accumulation} equal micro-batches; legal: "
            f"{', '.join(str(n) for n in range(1, batch + 1) if batch % n == 0)}."
        )
    if model.supar:
        recipe = Recipe(recipe.batch, SUPAR_LEARNING_RATE, 1.0, SUPAR_VECTOR_RATE)
    return TrainingConfig(
        steps=steps,
        batch=batch,
        sequence=values.sequence or model.max_len,
        micro_batches=values.accumulation,
        learning_rate=values.learning_rate or recipe.learning_rate,
        sparse_rate=values.sparse_rate or recipe.sparse_rate,
        vector_rate=values.vector_rate or recipe.vector_rate,
        warmup=values.warmup,
        final_rate=values.final_rate,
        weight_decay=values.weight_decay,
        seed=values.seed,
        state_dtype=values.state_dtype,
        skip_spikes=values.skip_spikes,
    )
