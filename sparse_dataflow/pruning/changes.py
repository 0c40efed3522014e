"""How the model of a phase becomes that of the next one."""

from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.training.transitions import Change, change_model
from sparse_dataflow.pruning.omission import feature_change


def change_of(evolution: EvolutionConfig, training: TrainingConfig) -> Change:
    """Returns the change of a training's models."""
    if evolution.method == "omit_features":
        return feature_change(evolution, training)
    return change_model
