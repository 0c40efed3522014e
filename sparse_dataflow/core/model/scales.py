"""Constant factors of a model: of embeddings, of attention scores and of logits."""

import math

from sparse_dataflow.core.config.model import SUPAR_HEAD, SUPAR_WIDTH, ModelConfig


def embedding_scale(config: ModelConfig) -> float:
    """Returns the factor of the embedding of a token."""
    scale = math.sqrt(config.d_model) if config.scaled_embeddings else 1.0
    return scale * config.embedding_scale


def query_scale(config: ModelConfig) -> float:
    """Returns the factor of the queries, whose products with keys are divided by the square root of
    the width of a head."""
    # Keys and queries align in training, so their product grows with head_dim instead of its
    # square root: scale by 1 / head_dim, not 1 / sqrt(head_dim) (arXiv 2203.03466, 4.1).
    scale = math.sqrt(SUPAR_HEAD / config.head_width) if config.supar else 1.0
    if config.attention_scalar:
        scale *= math.sqrt(config.head_width / config.attention_scalar)
    return scale


def logit_scale(config: ModelConfig) -> float:
    """Returns the factor of the input of the output layer."""
    # The output layer sums over d_model features whose scale does not shrink with width, so its
    # multiplier is 1 / d_model (arXiv 2203.03466, table 8).
    scale = SUPAR_WIDTH / config.d_model if config.supar else 1.0
    return scale / config.logit_divisor
