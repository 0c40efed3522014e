"""How tokens are drawn: the settings that the command line and `sd.generate` share."""

import dataclasses

from sparse_dataflow.core.config.settings import (
    A_FRACTION,
    AT_LEAST_ZERO,
    between,
    setting,
    validate,
)

FORMS = AUTO, ROWS, DENSE, INT8 = "auto", "rows", "dense", "int8"
"""Forms of the weights that decode: as rows where a CPU is faster with them, those of masks alone,
whole, or as rows of int8 with a scale for each output."""

SEEDS = between(0, 2**32 - 1)
"""Seeds of texts: a random key has one word of 32 bits for it."""


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """How the next token is drawn from the logits.

    Attributes:
      top_p: the set of arXiv 1904.09751, section 3.1.
    """

    temperature: float = setting(
        0.0, "Divisor of the logits; 0 takes the most likely token.", legal=AT_LEAST_ZERO
    )
    top_k: int = setting(
        0,
        "Number of most likely tokens to draw among; 0 is all.",
        legal=AT_LEAST_ZERO,
    )
    top_p: float = setting(
        1.0, "Draws among the fewest tokens of this total probability.", legal=A_FRACTION
    )

    def __post_init__(self):
        validate(self)
