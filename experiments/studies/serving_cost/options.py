"""Options that the studies of served models share; loads no jax."""

import dataclasses

from sparse_dataflow.core.config.settings import ABOVE_ZERO, AT_LEAST_ONE, setting


@dataclasses.dataclass(frozen=True)
class NarrowOptions:
    """How many trainings there are, and the narrow dense model, whose cost all arms have."""

    vector_rate: float = setting(
        2.0, "Multiplier of the rate of embeddings and norms.", legal=ABOVE_ZERO
    )
    trials: int = setting(3, "Trials of the rate of each arm and length.", legal=AT_LEAST_ONE)
    seeds: int = setting(3, "Measured seeds of each arm.", legal=AT_LEAST_ONE)
    layers: int = setting(2, "Layers of every model.", legal=AT_LEAST_ONE)
    vocabulary: int = setting(40, "Symbols of the text.", legal=AT_LEAST_ONE)
    sequence: int = setting(32, "Symbols in a sequence.", legal=AT_LEAST_ONE)
    batch: int = setting(32, "Sequences in a step.", legal=AT_LEAST_ONE)
    corpus: str = setting("python_stdlib", "Text; see experiments.gpt13b_sparse.", path=True)
    learning_rate: float = setting(16e-3, "Peak that the first trial has.", legal=ABOVE_ZERO)
    width: int = setting(24, "d_model of the narrow model.", legal=AT_LEAST_ONE)
    hidden: int = setting(96, "d_ff of the narrow model.", legal=AT_LEAST_ONE)
    heads: int = setting(2, "Heads of every model.", legal=AT_LEAST_ONE)


SHARED = (
    "learning_rate", "vector_rate", "width", "hidden", "layers", "heads", "vocabulary", "sequence",
    "batch", "corpus",
)  # fmt: skip
"""Options that all runs of a folder of `experiments.serving_cost` share."""
