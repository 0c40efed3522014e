"""The models of a run: what a `RunConfig` comes to once its vocabulary and steps are known."""

import dataclasses
from collections.abc import Mapping

from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.run import RunConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.models import gpt
from sparse_dataflow.sparsity.allocation import allocate
from sparse_dataflow.sparsity.evolution import PhaseSpec, phase_specs
from sparse_dataflow.training.phases import Phase, phases


@dataclasses.dataclass(frozen=True)
class Variant:
    """One model of a run.

    Attributes:
      name: "sparse" or "dense".
      model: its final or initial config; see `EvolutionConfig`.
      training: how it is trained, with its own number of steps.
      evolution: how its layouts change.
    """

    name: str
    model: ModelConfig
    training: TrainingConfig
    evolution: EvolutionConfig = dataclasses.field(default_factory=EvolutionConfig)

    def with_steps(self, steps: int) -> "Variant":
        """The same, trained for that many steps."""
        return dataclasses.replace(self, training=dataclasses.replace(self.training, steps=steps))

    @property
    def phase_specs(self) -> tuple[PhaseSpec, ...]:
        """The models that are trained in turn; UserError where the method fits no such model."""
        return phase_specs(self.model, self.evolution)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The same, with their steps."""
        return phases(self.model, self.evolution, self.training.steps)


def variants(
    config: RunConfig, vocab_size: int | None = None, steps: Mapping[str, int] | None = None
) -> list[Variant]:
    """The models that a run trains.

    Args:
      config: of the run.
      vocab_size: tokens of the tokenizer; `config.model.vocab_size` where None.
      steps: variant -> steps; where None those of the config, at least 1.

    Raises:
      UserError: no such model, layout or cut of the batch; names the legal values.
    """
    return [
        variant(config, name, vocab_size).with_steps(
            steps[name] if steps else config.training.steps or 1
        )
        for name in config.variants
    ]


def variant(config: RunConfig, name: str, vocab_size: int | None = None) -> Variant:
    """The "sparse" or "dense" model of a run; see `variants`."""
    dense = dataclasses.replace(
        config.model,
        vocab_size=vocab_size or config.model.vocab_size,
        seed=config.training.seed,
    )
    given_layouts = bool(config.run.init_from)
    if name == "dense":
        return Variant(name, dense, config.training)
    model = dataclasses.replace(dense, linears=config.sparsity.linears())
    model = allocate(model, config.sparsity.budget)
    gpt.check_layouts(model)
    evolution = dataclasses.replace(config.evolution, given_layouts=given_layouts)
    sparse = Variant(name, model, config.training, evolution)
    phase_specs(sparse.model, sparse.evolution)  # Refuses a method that fits no such model.
    return sparse
