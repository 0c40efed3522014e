"""Rows of the buffers of experts."""

import math

from sparse_dataflow.core.config.model import ModelConfig


def expert_rows(config: ModelConfig, tokens: int) -> int:
    """Returns the most rows of an expert, for the tokens of a micro-batch on a device."""
    choices = tokens * config.prototypes * config.top_k
    if not config.expert_capacity:
        return choices
    return min(choices, math.ceil(config.expert_capacity * choices / config.experts))


def exchanged_rows(config: ModelConfig, tokens: int, devices: int) -> int:
    """Returns the rows that a device can send to another, and so has room for in its buffer.

    Without a capacity, that is every choice that tokens can have of the experts of one device.

    Args:
      tokens: tokens of a micro-batch on a device.
      devices: number of devices, each with equally many consecutive experts.
    """
    local, group = config.experts // devices, config.experts // config.prototypes

    def choices(first):
        """Returns the most choices that a token has of the experts of one device."""
        shares = (
            # Experts of a prototype group that this device has, of which a token chooses at most
            # top_k.
            min(first + local, start + group) - max(first, start)
            for start in range(0, config.experts, group)
        )
        return sum(min(config.top_k, max(0, share)) for share in shares)

    most = tokens * max(map(choices, range(0, config.experts, local)))
    return min(most, local * expert_rows(config, tokens))
