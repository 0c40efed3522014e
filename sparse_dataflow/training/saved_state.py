"""What a checkpoint of a training holds, and what must be the same for it to fit."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.models import gpt
from sparse_dataflow.optim.loss_spikes import Spikes
from sparse_dataflow.optim.train_state import TrainState
from sparse_dataflow.parallel.executor import SINGLE_DEVICE, Executor
from sparse_dataflow.training.phases import Phase, phase_before
from sparse_dataflow.training.plateau import Plateau, with_starts
from sparse_dataflow.training.step import abstract_state


def identity(
    model: ModelConfig, training: TrainingConfig, evolution: EvolutionConfig, tokenizer_hash: str
) -> dict[str, Any]:
    """The config that a checkpoint is stored under and compared with, JSON-able."""
    return {
        # Remat changes what is computed twice, not what is computed.
        "model": {name: value for name, value in model.to_json().items() if name != "remat"},
        "training": training.to_json(),
        "evolution": dataclasses.asdict(evolution),
        "tokenizer": tokenizer_hash,
    }


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a checkpoint holds beside arrays.

    Attributes:
      seconds: training time until its step.
      phases: where they were known to begin.
      plateau: of the present phase.
      spikes: of the losses before.
    """

    seconds: float
    phases: tuple[Phase, ...]
    plateau: Plateau
    spikes: Spikes

    @classmethod
    def read(cls, extra: Mapping[str, Any], planned: tuple[Phase, ...]) -> "Kept":
        """From a checkpoint's facts, whoever wrote them.

        Raises:
          UserError: they are not those of a training in these phases.
        """
        try:
            starts, seconds = extra["starts"], float(extra["seconds"])
            if not all(type(start) is int for start in starts) or sorted(starts) != starts:
                raise ValueError("its phases are out of order")
            found = with_starts(planned, starts)
            plateau, spikes = Plateau.from_json(extra["plateau"]), extra.get("spikes")
            return cls(seconds, found, plateau, Spikes.from_json(spikes))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"A checkpoint's extra.json was not written by this training ({error}); move its "
                "folder away to go on from the one before."
            ) from None


def saved_state(
    phases: Sequence[Phase],
    training: TrainingConfig,
    step: int,
    executor: Executor = SINGLE_DEVICE,
) -> TrainState:
    """Shapes of the state after `step` steps and where it goes, its tables as numpy arrays."""
    model = phases[phase_before(phases, step)].model
    state = abstract_state(model, training, executor)
    return state._replace(tables=gpt.layout_tables(gpt.layouts(model)))
