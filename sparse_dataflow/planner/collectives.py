"""Time of collectives: alpha-beta model over islands of fast links.

Over g chips, (g - 1) / g of the gathered bytes pass through each chip, in log2 g hops (recursive
doubling; Thakur, Rabenseifner and Gropp 2005, section 4).  Over several islands the collective is
hierarchical: first within each island, then between islands with each chip's share of the bytes.
All times broadcast over numpy arrays.
"""

import functools
import math

import numpy as np

from sparse_dataflow.core.config.expert_rows import exchanged_rows
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import ROW_PARALLEL
from sparse_dataflow.hardware.chips import Network
from sparse_dataflow.planner.efficiency import Efficiency
from sparse_dataflow.planner.memory import DTYPE_BYTES
from sparse_dataflow.planner.parallel_plan import ParallelPlan


def gather_seconds(size, chips, near, network: Network, efficiency: Efficiency, axes=1):
    """Returns the seconds of an all-gather or reduce-scatter of `size` bytes.

    Args:
      size: bytes of the whole array.
      chips: chips in the group.
      near: chips of the group in one island; the group spans chips / near islands.
      network: links of the chips.
      efficiency: constants of the chip family.
      axes: torus axes that the group spans.
    """
    # A group that is smaller than an island has no links between islands: `islands` is 1, and its
    # terms vanish.
    near = np.minimum(near, chips)
    islands = chips / near
    # A chip has 1 / near of the bytes already; in log2(near) hops it gets the rest.
    inside = (near - 1) / near * size / (_fast_rate(near, network, axes) * efficiency.fast_link)
    inside = inside + np.log2(near) * network.fast_latency
    # Between islands each chip moves its own share alone, next to those of its island.
    across = (islands - 1) / islands * (size / near) / (network.slow * efficiency.slow_link)
    return inside + across + np.log2(islands) * network.slow_latency


def _fast_rate(near, network, axes):
    """Returns the bytes/s of a chip to `near` chips of its island."""
    rate = network.fast * np.clip(axes, 1, network.axes)
    return np.where(near <= 2, network.pair, rate) if network.pair else rate


def reduce_seconds(size, chips, near, network: Network, efficiency: Efficiency, axes=1):
    """Returns the seconds of an all-reduce of `size` bytes: reduce-scatter, then all-gather."""
    return 2 * gather_seconds(size, chips, near, network, efficiency, axes)


def send_seconds(size, near, network: Network, efficiency: Efficiency):
    """Returns the seconds to send `size` bytes to a chip, which is in the same island if `near`."""
    fast = size / (network.fast * efficiency.fast_link) + network.fast_latency
    slow = size / (network.slow * efficiency.slow_link) + network.slow_latency
    return np.where(near, fast, slow)


def layer_gathers(config: ModelConfig, tokens, tensor, feature):
    """Returns the bytes of the all-gathers of a block, forward and backward.

    As many arrays of the same bytes are reduce-scattered.  Of the tokens of a micro-batch:

    - "tensor" gathers the inputs of two products in the forward pass and the gradients of the
      outputs of two in the backward pass, each tokens x d_model / feature.
    - "feature" gathers one array for each projection, tokens x n / tensor, with n the features that
      the projection does not share with the residual stream.  It is the input of `attn_out` or
      `mlp_out` in the forward pass, or the gradient of another's output in the backward pass.

    AxoNN all-reduces the same arrays (arXiv 2305.13525), which is a reduce-scatter and an
    all-gather.  The sums of squares of the norms, two numbers per token, are not counted.

    Args:
      tokens: tokens of a micro-batch on a device.
      tensor: devices of the axis "tensor".
      feature: devices of the axis "feature".

    Returns:
      (bytes of each of the four arrays of "tensor", {projection: bytes of the array of "feature"}).
    """
    size = tokens * DTYPE_BYTES[config.compute_dtype]
    inner = {
        name: config.projection_shape(name)[name not in ROW_PARALLEL] for name in config.projections
    }
    return size * config.d_model / feature, {name: size * n / tensor for name, n in inner.items()}


EXCHANGES = {"none": 4, "keep": 6, "full": 6}
"""Remat of the project -> all-to-alls of rows in a layer of experts, in a step of a micro-batch.

Rows travel to the experts and back, and so do their gradients.  Remat repeats the former.
"""


def exchange_bytes(config: ModelConfig, tokens, plan: ParallelPlan):
    """Returns the bytes of the rows that a device sends in one all-to-all, to itself included.

    Without buffers, each of the devices of "tensor" sends its tokens.

    Args:
      tokens: tokens of a micro-batch on a device.
    """
    rows = travelling_rows(config, tokens, plan)
    rows = rows / plan.tensor if plan.experts == "dropless" else rows
    return rows * config.d_model * DTYPE_BYTES[config.compute_dtype]


def travelling_rows(config: ModelConfig, tokens, plan: ParallelPlan):
    """Returns the rows that a device computes for the experts which share a layer.

    They are those of the buffer, or without one as many as its tokens choose.
    """
    if plan.experts == "dropless":
        return tokens * (config.active_experts - config.shared_expert)
    return buffer_rows(config, tokens, plan.expert_chips)


def buffer_rows(config: ModelConfig, tokens, devices):
    """Returns the rows that a device sends in one all-to-all, padding included.

    Where the number of devices does not divide the experts, fewer devices count.
    """

    @functools.cache
    def rows(tokens, devices):
        return devices * exchanged_rows(config, int(tokens), math.gcd(config.experts, int(devices)))

    return np.vectorize(rows, otypes=[np.int64])(tokens, devices)


def exchange_seconds(size, chips, near, network: Network, efficiency: Efficiency, axes=1):
    """Returns the seconds of an all-to-all in which each chip sends `size` bytes in equal parts.

    Arguments as in `gather_seconds`.  A part for a chip of another island travels there directly.
    """
    near = np.minimum(near, chips)
    inside = (near - 1) / chips * size / (_fast_rate(near, network, axes) * efficiency.fast_link)
    inside = inside + np.log2(near) * network.fast_latency
    # Parts for chips of the same island do not leave it.
    across = (chips - near) / chips * size / (network.slow * efficiency.slow_link)
    return inside + across + np.log2(chips / near) * network.slow_latency
