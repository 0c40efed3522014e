"""How the relay clips gradients, and when it applies them; see `parameter_server`.

Importing this module loads no jax.
"""

from sparse_dataflow.core.config.training import TrainingConfig

CLIPPINGS = ("exact", "eager")


def updates_at_once(training: TrainingConfig, clipping: str) -> bool:
    """Returns whether a section is updated as soon as its gradient arrives.

    A step that `skip_spikes` may leave out is accepted as a whole, after its last gradient.
    """
    return clipping == "eager" and not training.skip_spikes
