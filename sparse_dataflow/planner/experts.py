"""Rows and weights of a mixture of experts under a parallel plan; loads no jax.

All functions broadcast over the counts of a `ParallelPlan`.
"""

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP
from sparse_dataflow.planner import collectives
from sparse_dataflow.planner.memory import matrix_count
from sparse_dataflow.planner.parallel_plan import ParallelPlan


def computed_rows(config: ModelConfig, tokens, plan: ParallelPlan):
    """Returns the rows that a chip multiplies in experts, and the experts whose weights it reads.

    Where tokens travel, the padding of the buffer counts: a CPU alone skips it.

    Args:
      config: a model with experts.
      tokens: tokens of a micro-batch on a chip.
      plan: the plan.
    """
    if not plan.exchanges:
        return tokens * config.active_experts, config.stored_copies(MLP[0])
    rows = collectives.buffer_rows(config, tokens, plan.fsdp) + tokens * config.shared_expert
    return rows, config.experts / np.asarray(plan.fsdp) + config.shared_expert


def stage_experts(config: ModelConfig, plan: ParallelPlan):
    """Returns the part of `step_time.stage_parameters` in experts that a router chooses."""
    if not config.experts:
        return 0
    routed = matrix_count(config, MLP) * config.experts / config.stored_copies(MLP[0])
    return plan.stage_layers(config) * routed / config.num_layers / plan.layer_chips
