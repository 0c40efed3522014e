"""How the model of a phase becomes that of the next one."""

from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.training.transitions import Change, change_model
from sparse_dataflow.pruning.cuts import fitted_change
from sparse_dataflow.pruning.omission import feature_change


def change_of(evolution: EvolutionConfig, training: TrainingConfig, fit_batches: int = 0) -> Change:
    """Returns the change of a training's models.

    Args:
      fit_batches: training batches that `EvolutionConfig.prune_by` reads; 0 for changes that fit
        nothing.  Programs are compiled ahead with these, since a fit takes as long as in training.
    """
    if evolution.method == "omit_features":
        return feature_change(evolution, training)
    if evolution.prune_by == "rebuild" and fit_batches:
        return fitted_change(fit_batches, training.micro_batches)
    return change_model
