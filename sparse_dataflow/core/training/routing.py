"""What the routers of a mixture of experts did in a step, as numbers of metrics."""

from typing import Any

import numpy as np


def routing_numbers(routing: Any) -> dict[str, float]:
    """Returns the means over layers of a step's `Routing`; {} for a model without experts.

    "busiest_expert" is the load of the busiest expert of any layer, as a multiple of an even one.
    """
    if not routing:
        return {}
    return {
        "balance_loss": float(np.mean(routing.balance)),
        "router_z_loss": float(np.mean(routing.z)),
        "dropped": float(np.mean(routing.dropped)),
        "busiest_expert": float(np.max(routing.load)) * routing.load.shape[-1],
    }


def non_finite_routers(routing: Any) -> list[int]:
    """Returns the layers (from 0) whose router has logits that are not finite."""
    return np.flatnonzero(~np.isfinite(routing.z)).tolist() if routing else []
