"""Options that the studies of served models share; loads no jax."""

import dataclasses

from sparse_dataflow.core.config.settings import ABOVE_ZERO, AT_LEAST_ONE, setting


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """How many trainings there are, and of what."""

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
