"""The held-out loss that a scaling law expects of a run; loads no jax.

A dense model has the loss of Chinchilla's law as fitted again by Besiroglu and others (arXiv
2404.10102).  A block-sparse model has the loss of a dense one with more parameters than it stores,
by this project's own law (docs/evidence/quality.md, `experiments.sparse_scaling_law`).
"""

import dataclasses
import math

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.training import cost

LAWS = (
    {"e": 1.8172, "a": 482.01, "b": 2085.43, "alpha": 0.3478, "beta": 0.3658},
    {"e": 1.6934, "a": 406.4, "b": 410.7, "alpha": 0.3392, "beta": 0.2849},
)
"""Constants for parameters and tokens: arXiv 2404.10102, table 1, then arXiv 2203.15556, as given
there.  The first is the estimate; the difference of the two is part of the error."""

GAIN = {"a_s": 0.914, "b_s": 0.512, "c_s": 4.18, "b_n": 0.122}
"""Constants of the law of sparse models that say which dense model has equal loss."""
GAIN_AT_EIGHTH = (2.4, 2.8, 3.9)
"""Dense parameters for each stored one at density 1/8: lower end of its 90% interval, estimate,
upper end."""

LAW_ERROR = 0.045
"""Largest relative error of that law in runs that were predicted before they were made."""

SMALLEST = 44e6
"""Parameters of the smallest model that Chinchilla's law was fitted to."""
SMALLEST_VOCABULARY = 32000
"""Tokens of its tokenizer: losses of smaller vocabularies are not comparable."""


@dataclasses.dataclass(frozen=True)
class ExpectedLoss:
    """Held-out loss in nats a token, of text like the law's.

    Attributes:
      low: lower end of its range.
      high: upper end.
    """

    estimate: float
    low: float
    high: float


def expected(model: ModelConfig, dense: ModelConfig, tokens: float) -> ExpectedLoss | None:
    """Returns the loss after training from scratch.

    Args:
      dense: the dense model of the same shape.
      tokens: training tokens.

    Returns:
      None for what the laws do not describe: experts, small models and small vocabularies.
    """
    if model.experts or model.vocab_size < SMALLEST_VOCABULARY or tokens <= 0:
        return None
    sizes = [_dense_parameters(model, dense, number) for number in range(len(GAIN_AT_EIGHTH))]
    if sizes[0] < SMALLEST:
        return None
    losses = [_loss(law, size, tokens) for law in LAWS for size in sizes]
    return ExpectedLoss(
        _loss(LAWS[0], sizes[1], tokens),
        min(losses) * (1 - LAW_ERROR),
        max(losses) * (1 + LAW_ERROR),
    )


def _loss(law, parameters, tokens) -> float:
    size, data = law["a"] * parameters ** -law["alpha"], law["b"] * tokens ** -law["beta"]
    return float(law["e"] + size + data)


def _dense_parameters(model, dense, number) -> float:
    """Returns the parameters of a dense model of equal loss, by an entry of GAIN_AT_EIGHTH."""
    total = cost.parameter_count(model)
    shapes = [dense.projection_shape(name) for name in dense.projections]
    whole = dense.num_layers * sum(math.prod(shape) for shape in shapes)
    stored = whole - (cost.parameter_count(dense) - total)
    share = min(stored / whole, 1.0)
    capacity = GAIN["a_s"] * share ** GAIN["b_s"] + GAIN["c_s"]
    gain = (capacity / (GAIN["a_s"] + GAIN["c_s"])) ** (-1 / GAIN["b_n"])
    spread = math.log(GAIN_AT_EIGHTH[number]) / math.log(GAIN_AT_EIGHTH[1])
    return float(total + stored * (gain**spread - 1))
