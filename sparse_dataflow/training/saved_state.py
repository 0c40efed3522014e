"""What a checkpoint of a training holds, and what must be the same for it to fit."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from sparse_dataflow.execution.executor import ONE_DEVICE, Executor
from sparse_dataflow.models import gpt
from sparse_dataflow.models.sizes import ModelConfig
from sparse_dataflow.sparsity.evolution import EvolutionConfig
from sparse_dataflow.training.optimizer import TrainingConfig
from sparse_dataflow.training.phases import Phase, phase_before
from sparse_dataflow.training.step import TrainState, abstract_state


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


def saved_state(
    phases: Sequence[Phase],
    training: TrainingConfig,
    step: int,
    executor: Executor = ONE_DEVICE,
) -> TrainState:
    """Shapes of the state after `step` steps and where it goes, its tables as numpy arrays."""
    model = phases[phase_before(phases, step)].model
    state = abstract_state(model, training, executor)
    return state._replace(tables=gpt.layout_tables(gpt.layouts(model)))
